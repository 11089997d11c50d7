"""An optimized folder, run by this project's pipeline with the settings that the reference has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.errors import FolderError, ProviderError
from sdonnx.folder.folder_version import FolderKind
from sdonnx.folder.pipeline_folder import REPORT, PipelineFolder, read_json
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Family
from sdonnx.reference.diffusers_pipeline import open_folder
from sdonnx.reference.workload import Workload, call_arguments

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["OPTIMIZE", "OptimizedPipeline", "check_adapters", "quantized_types", "reported_precision"]

OPTIMIZE = "export the pipeline if it is not yet exported, and run sdonnx optimize on the result"
"""How to get an optimized folder."""


class OptimizedPipeline:
    """This project's pipeline of an optimized folder. The constructor checks the folder; it loads nothing.

    Args:
        folder: the folder written by `sdonnx optimize`.
        provider: "cuda" or "cpu"; None for the folder's target.
        adapters: files of the image-prompt adapters that the folder was exported with.
        safety_checker: run the folder's safety checker.

    Attributes:
        folder: the folder.
        family: its family.
        device: the provider, "cuda" or "cpu".
        precision: the data type, and the types of quantized components.
        pipeline: the `OrtDiffusionPipeline`, after `load`.

    Raises:
        FolderError: the folder is of another kind, or was exported with other adapters.
        ProviderError: the folder was optimized for another provider.
    """

    pipeline: Any

    def __init__(
        self,
        folder: Path,
        provider: str | None = None,
        *,
        adapters: Sequence[str] = (),
        safety_checker: bool = False,
    ) -> None:
        self.folder = open_folder(folder, FolderKind.OPTIMIZED, "sdonnx", OPTIMIZE)
        self.family = family_of(self.folder)
        check_adapters(self.folder, self.family, adapters)
        self.device = str(read_json(self.folder.path / REPORT).get("provider"))
        if provider not in (None, self.device):
            raise ProviderError(
                f"{self.folder.path} was optimized for {self.device}",
                f"a folder for {provider}",
                f"optimize the exported pipeline with --provider {provider}",
            )
        self.precision = reported_precision(self.folder)
        self._adapters, self._safety_checker = len(adapters), safety_checker

    def load(self, workload: Workload) -> None:
        """Load the graphs and set the workload's sampler."""
        from sdonnx.runtime.pipeline import OrtDiffusionPipeline

        checker: dict[str, Any] = {} if self._safety_checker else {"safety_checker": None}
        self.pipeline = OrtDiffusionPipeline.from_pretrained(self.folder.path, self.device, **checker)
        self.pipeline.set_progress_bar_config(disable=True)
        if workload.scheduler is not None:
            self.pipeline.scheduler = workload.scheduler

    def unload(self) -> None:
        """Close the pipeline."""
        self.pipeline.close()

    def generate(self, prompt: str | list[str], workload: Workload) -> list[Image]:
        """Generate images of a prompt or of several ones."""
        arguments = call_arguments(workload, self._adapters, self.family) | workload.start_image
        if workload.ip_adapter_scale is not None:
            arguments["ip_adapter_scale"] = workload.ip_adapter_scale
        images: list[Image] = self.pipeline(
            prompt, workload.height, workload.width, seed=workload.seed, **arguments
        ).images
        return images


def check_adapters(folder: PipelineFolder, family: Family, adapters: Sequence[str]) -> None:
    """Raise FolderError unless a folder of graphs was exported with the adapters of these files."""
    own = family.adapters
    held = () if own is None else tuple(adapter.name for adapter in own.adapters)
    named = tuple(Path(path).stem for path in adapters)
    if held != named:
        raise FolderError(
            f"{folder.path} was exported with {', '.join(held) or 'no adapter'}",
            f"{', '.join(named) or 'none'}, the value of --ip_adapter",
            "name the adapters of the folder, or pass another folder",
        )


def reported_precision(folder: PipelineFolder) -> str:
    """Return the data type of an optimized folder, and of its quantized components: `float16, unet in int8_dynamic`."""
    parts = [str(read_json(folder.path / REPORT).get("precision"))]
    parts += [f"{name} in {' and '.join(types)}" for name, types in quantized_types(folder).items()]
    return ", ".join(parts)


def quantized_types(folder: PipelineFolder) -> dict[str, list[str]]:
    """Return the quantization types of the quantized components of an optimized folder, by component."""
    components = read_json(folder.path / REPORT).get("components")
    entries = components.items() if isinstance(components, Mapping) else ()
    found = {name: entry.get("quantized") for name, entry in entries if isinstance(entry, Mapping)}
    return {name: list(types) for name, types in found.items() if isinstance(types, Mapping) and types}
