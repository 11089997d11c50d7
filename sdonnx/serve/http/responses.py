"""Successful responses in the form of OpenAI's API, and its server-sent events."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Literal

from fastapi.responses import StreamingResponse
from PIL import Image
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from sdonnx.errors import SdonnxError
from sdonnx.serve.http.openai_errors import error_content, status_of
from sdonnx.serve.http.request_fields import ImageFields
from sdonnx.serve.image_service import GeneratedImages, ServeObserver, ServiceJob, StepProgress

__all__ = [
    "QUALITY",
    "Encoder",
    "EventResponse",
    "ImageData",
    "ImagesResponse",
    "LoraCard",
    "LoraList",
    "ModelCard",
    "ModelList",
    "encode_base64",
    "images_response",
    "stream_events",
]

QUALITY = 95
"""Default quality of JPEG and WebP files, as `sdonnx generate` has it."""


def encode_base64(image: Image.Image, output_format: str, quality: int) -> str:
    """Return the file of an image in base64.

    Args:
        image: the image.
        output_format: "png", "jpeg" or "webp".
        quality: quality of JPEG and WebP, 0 to 100.
    """
    file = io.BytesIO()
    options = {} if output_format == "png" else {"quality": quality}
    image.save(file, output_format, **options)
    return base64.b64encode(file.getvalue()).decode("ascii")


_PING_S = 15.0  # proxies close connections that are silent for a minute or less


class ImageData(BaseModel):
    """One image of a response."""

    b64_json: str
    seed: int
    flagged: bool | None = None


class ImagesResponse(BaseModel):
    """The body of a successful response."""

    created: int
    data: list[ImageData]
    size: str
    output_format: Literal["png", "jpeg", "webp"]
    background: Literal["opaque"] = "opaque"


class ModelCard(BaseModel):
    """A model of the server."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sdonnx"
    inputs: list[str] | None = Field(
        None, description="fields for images next to the prompt that the model accepts; null if they are not known"
    )


class ModelList(BaseModel):
    """The models of the server."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class LoraCard(BaseModel):
    """A LoRA of the server."""

    id: str
    object: Literal["lora"] = "lora"
    created: int
    owned_by: str = "sdonnx"


class LoraList(BaseModel):
    """The LoRAs of the server."""

    object: Literal["list"] = "list"
    data: list[LoraCard]


class Encoder:
    """Encodes the images of one request in threads.

    Args:
        fields: the request.
        job: its job.
        observer: receives the time of each file.
    """

    def __init__(self, fields: ImageFields, job: ServiceJob, observer: ServeObserver) -> None:
        self.output_format = fields.output_format or "png"
        self._quality = QUALITY if fields.output_compression is None else fields.output_compression
        self._model, self._observer = job.model, observer

    async def encode(self, image: Image.Image) -> str:
        """Return the file of an image in base64."""
        start = time.perf_counter()
        text = await asyncio.to_thread(encode_base64, image, self.output_format, self._quality)
        self._observer.stage_ended(self._model, "encode_file", time.perf_counter() - start)
        return text


async def images_response(job: ServiceJob, result: GeneratedImages, encoder: Encoder) -> ImagesResponse:
    """Return the response with the generated images of a request."""
    data = [
        ImageData(b64_json=await encoder.encode(image), seed=seed, flagged=flag)
        for image, seed, flag in _images(result)
    ]
    return ImagesResponse(created=int(time.time()), data=data, size=_size(job), output_format=encoder.output_format)


class EventResponse(StreamingResponse):
    """A response of server-sent events. The request ends with it, even if the client left before the first event.

    Args:
        job: the request.
        events: its events.
    """

    def __init__(self, job: ServiceJob, events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()  # without effect once it has ended


async def stream_events(job: ServiceJob, fields: ImageFields, encoder: Encoder, kind: str) -> AsyncIterator[str]:
    """Yield the server-sent events of a request.

    Args:
        job: the request.
        fields: its fields.
        encoder: encodes previews and images.
        kind: "image_generation" or "image_edit", the prefix of OpenAI's event types.
    """
    event = partial(_event, kind, {"size": _size(job), "output_format": encoder.output_format, "background": "opaque"})
    try:
        previews = [0] * job.num_images
        async for progress in _with_pings(job.progress()):
            if progress is None:
                yield ": waiting\n\n"
                continue
            if fields.stream_progress:
                yield event("progress", image_index=progress.index, step=progress.step, steps=progress.steps)
            if progress.preview is not None:
                image = await encoder.encode(progress.preview)
                number = previews[progress.index]
                previews[progress.index] += 1
                yield event("partial_image", b64_json=image, partial_image_index=number, image_index=progress.index)
        for index, (picture, seed, flag) in enumerate(_images(await job)):
            yield event("completed", b64_json=await encoder.encode(picture), image_index=index, seed=seed, flagged=flag)
    except SdonnxError as error:
        yield f"event: error\ndata: {json.dumps(error_content(status_of(error), str(error)))}\n\n"


def _images(result: GeneratedImages) -> list[tuple[Image.Image, int, bool | None]]:
    flags: list[bool | None] = [None] * len(result.images) if result.flagged is None else [*result.flagged]
    return list(zip(result.images, result.seeds, flags, strict=True))


def _size(job: ServiceJob) -> str:
    height, width = job.size
    return f"{width}x{height}"


def _event(kind: str, common: dict[str, Any], name: str, **values: Any) -> str:
    name = f"{kind}.{name}"
    return f"event: {name}\ndata: {json.dumps({'type': name, 'created_at': int(time.time()), **common, **values})}\n\n"


async def _with_pings(iterator: AsyncIterator[StepProgress]) -> AsyncIterator[StepProgress | None]:
    """Yield the items, and None whenever there was none for a while."""
    while True:
        pending = asyncio.ensure_future(anext(iterator, None))
        try:
            while not (await asyncio.wait({pending}, timeout=_PING_S))[0]:
                yield None
        finally:
            pending.cancel()  # without effect once it is done
        if (progress := pending.result()) is None:
            return
        yield progress
