"""Parts of the server on Ray Serve that do not import Ray: its options, and the middleware of Ray's HTTP proxies.

The proxies end a request of a lost HTTP replica without an answer, which uvicorn turns into 500, or answer with 500 and
plain text. The middleware answers with 503, so that clients retry. Start every node of the cluster with
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=sdonnx.serve.ray_proxy.middlewares`; `sdonnx serve --ray` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sdonnx.errors import OptionError
from sdonnx.lora.lora_folder import list_loras
from sdonnx.serve.http.openai_errors import error_content
from sdonnx.serve.serve_settings import ServeLimits

__all__ = ["CALLBACK_VARIABLE", "LostReplicaAs503", "RayOptions", "middlewares"]

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


CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


class LostReplicaAs503:
    """Replaces missing answers, and the proxy's own ones with status 500; the application's ones are JSON and stay.

    Args:
        app: the proxy.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        has_started = is_replaced = False

        async def replacing(message: Message) -> None:
            nonlocal has_started, is_replaced
            if message["type"] == "http.response.start":
                has_started = True
                kind = dict(message.get("headers", [])).get(b"content-type", b"")
                is_replaced = message["status"] == 500 and not kind.startswith(b"application/json")
                if is_replaced:
                    await _send_unavailable(send)
            if not is_replaced:
                await send(message)

        await self._app(scope, receive, replacing)
        if scope["type"] == "http" and not has_started:
            await _send_unavailable(send)


def middlewares() -> list[Any]:
    """Return the middleware; Ray calls this in each proxy."""
    return [Middleware(LostReplicaAs503)]


async def _send_unavailable(send: Send) -> None:
    content = error_content(503, "the process that served the request was lost; try again")
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"1"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
