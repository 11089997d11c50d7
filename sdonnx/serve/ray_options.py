"""Options of the application on Ray Serve: `serve run sdonnx.serve.ray:app folder=... replicas=2`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sdonnx.errors import OptionError
from sdonnx.lora.lora_folder import list_loras
from sdonnx.serve.serve_limits import ServeLimits

__all__ = ["RayOptions"]

_LIMITS = ServeLimits()


class RayOptions(BaseModel):
    """Options, each a text or a number."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    folder: str | None = None
    models: str | None = Field(None, description="NAME=FOLDER, separated by commas, in place of folder")
    lora_folder: str | None = Field(None, description="LoRA files that requests may name; the same on every node")
    provider: str | None = None
    replicas: int = Field(1, ge=1, description="replicas of each model; the minimum with max_replicas")
    max_replicas: int | None = Field(None, ge=1, description="scale up to this number by the length of the queues")
    gpus_per_replica: float = Field(1, ge=0, description="0 for a CPU")
    cpus_per_replica: float = Field(1, ge=0)
    front_replicas: int = Field(1, ge=1, description="processes that speak HTTP")
    health_period_s: float = Field(10, gt=0)
    max_batch_s: float = Field(600, gt=0, description="seconds after which a replica that runs a batch is replaced")
    max_batch_size: int = _LIMITS.max_batch_size
    batch_wait_ms: float = _LIMITS.batch_wait_ms
    max_waiting: int = _LIMITS.max_waiting
    max_wait_s: float = _LIMITS.max_wait_s
    max_images: int = _LIMITS.max_images
    max_pixels: int | None = _LIMITS.max_pixels
    max_steps: int = _LIMITS.max_steps

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> RayOptions:
        """Return the options.

        Raises:
            OptionError: an option is unknown, or has a value that cannot be used.
        """
        try:
            options = cls.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise OptionError(
                f"{name} cannot be used ({first['msg']})", f"options among {', '.join(cls.model_fields)}"
            ) from error
        options.folders()
        options.limits()
        if options.max_replicas is not None and options.max_replicas < options.replicas:
            raise OptionError(f"max_replicas is {options.max_replicas}", f"at least replicas, {options.replicas}")
        return options

    def limits(self) -> ServeLimits:
        """Return the limits of each replica."""
        names = ServeLimits.__dataclass_fields__.keys() & type(self).model_fields.keys()
        return ServeLimits(**{name: getattr(self, name) for name in names})

    def loras(self) -> dict[str, str]:
        """Return the LoRA files by name; they are listed on the node that builds the application.

        Raises:
            OptionError: the folder cannot be used, see `list_loras`.
        """
        if self.lora_folder is None:
            return {}
        return {name: str(path) for name, path in list_loras(Path(self.lora_folder)).items()}

    def folders(self) -> dict[str, str]:
        """Return the folders by the names of their models.

        Raises:
            OptionError: there is none, or a model has no name or no folder.
        """
        if (self.folder is None) == (self.models is None):
            raise OptionError("folder and models are both given, or missing", "one of them", "pass folder=FOLDER")
        if self.folder is not None:
            return {self.folder.rstrip("/").rpartition("/")[2]: self.folder}
        pairs = [each.partition("=") for each in (self.models or "").split(",")]
        if not all(name and folder for name, _, folder in pairs) or len({name for name, _, _ in pairs}) < len(pairs):
            raise OptionError(f"models is {self.models!r}", "NAME=FOLDER,NAME=FOLDER", "give each another name")
        return {name: folder for name, _, folder in pairs}
