"""The endpoints of OpenAI's API: images from prompts, edited images, and models."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from sdonnx.errors import OptionError
from sdonnx.serve.http.openai_errors import ErrorResponse, error_response
from sdonnx.serve.http.request_fields import EditFields, GenerationFields, ImageFields
from sdonnx.serve.http.responses import (
    Encoder,
    EventResponse,
    ImagesResponse,
    ModelCard,
    ModelList,
    images_response,
    stream_events,
)
from sdonnx.serve.http.serve_settings import ServeSettings
from sdonnx.serve.http.uploaded_images import read_upload
from sdonnx.serve.image_job import GeneratedImages
from sdonnx.serve.image_request import ImageRequest
from sdonnx.serve.image_service import ImageService, ServiceJob

__all__ = ["ImagesApi"]

_MAX_FIELD_BYTES = 256 * 1024
_MAX_FIELDS = 40
_MAX_FILES = 4
_DECODERS = 2  # images that are decoded at once
_CLIENT_CLOSED = 499  # as nginx logs a client that left

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 408, 413, 422, 429, 503)
}
_STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}


def _edit_body() -> dict[str, Any]:
    """Return the description of the form for the OpenAPI document."""
    schema = EditFields.model_json_schema()
    file = {"type": "string", "format": "binary"}
    schema["properties"] |= {"image": file, "mask": file}
    schema["required"] = [*schema["required"], "image"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


class ImagesApi:
    """The endpoints below /v1.

    Args:
        pipeline: generates the images.
        settings: the server's settings.
    """

    def __init__(self, pipeline: ImageService, settings: ServeSettings) -> None:
        self._pipeline, self._settings = pipeline, settings
        self._decoding = asyncio.Semaphore(_DECODERS)
        self._started = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        """Add the endpoints to an application."""
        images: dict[str, Any] = {"response_model": ImagesResponse, "responses": {**_ERRORS, 200: _STREAM}}
        app.add_api_route("/v1/images/generations", self.generate, methods=["POST"], **images)
        app.add_api_route("/v1/images/edits", self.edit, methods=["POST"], openapi_extra=_edit_body(), **images)
        app.add_api_route("/v1/models", self.list_models, methods=["GET"], responses={401: _ERRORS[401]})
        found: dict[int | str, dict[str, Any]] = {status: _ERRORS[status] for status in (401, 404)}
        app.add_api_route(
            "/v1/models/{model:path}", self.show_model, methods=["GET"], responses=found, response_model=ModelCard
        )

    async def list_models(self) -> ModelList:
        """List the models."""
        return ModelList(data=[self._card(name) for name in self._pipeline.models])

    async def show_model(self, model: str) -> Response:
        """Show a model."""
        if model not in self._pipeline.models:
            return self._unknown_model()
        return JSONResponse(self._card(model).model_dump())

    async def generate(self, request: Request, fields: GenerationFields) -> Response:
        """Generate images from a prompt."""
        if fields.model is not None and fields.model not in self._pipeline.models:
            return self._unknown_model()
        return await self._answer(request, fields, fields.to_request(), "image_generation")

    async def edit(self, request: Request) -> Response:
        """Change an image, or the area of a mask in it, according to a prompt."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise HTTPException(422, "the body is no form; send multipart/form-data with prompt and image")
        async with request.form(max_files=_MAX_FILES, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES) as form:
            fields = _read_fields(form)
            if fields.model is not None and fields.model not in self._pipeline.models:
                return self._unknown_model()
            image, mask = _one_file(form, "image"), _one_file(form, "mask")
            if image is None:
                raise OptionError("the form has no image", "a file named image", "add one")
            content, hidden = await image.read(), None if mask is None else await mask.read()
        asked = fields.to_request()
        size = None if asked.height is None or asked.width is None else (asked.height, asked.width)
        if size is not None and size[0] * size[1] > self._pipeline.limits.max_pixels:
            size = None  # refused below
        async with self._decoding:
            upload = await asyncio.to_thread(read_upload, content, hidden, size, self._settings.max_upload_pixels)
        edited = ImageRequest(
            **{**vars(asked), "image": upload.image, "mask_image": upload.mask, "strength": fields.strength}
        )
        return await self._answer(request, fields, edited, "image_edit")

    async def _answer(self, request: Request, fields: ImageFields, asked: ImageRequest, kind: str) -> Response:
        job = await self._pipeline.accept(asked)
        encoder = Encoder(fields, job, self._pipeline.observer)
        if fields.stream:
            return EventResponse(job, stream_events(job, fields, encoder, kind))
        result = await _images_or_leaving(request, job)
        if result is None:
            return Response(status_code=_CLIENT_CLOSED)
        return JSONResponse((await images_response(job, result, encoder)).model_dump())

    def _card(self, name: str) -> ModelCard:
        return ModelCard(id=name, created=self._started)

    def _unknown_model(self) -> JSONResponse:
        names = ", ".join(self._pipeline.models)
        return error_response(404, f"the model is unknown; expected one of {names}", "model")


async def _images_or_leaving(request: Request, job: ServiceJob) -> GeneratedImages | None:
    """Wait for the images, and cancel them if the client leaves; then return None."""
    images, leaving = asyncio.ensure_future(job), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({images, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return images.result() if images.done() else None
    finally:
        leaving.cancel()
        if not images.done():
            job.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _read_fields(form: FormData) -> EditFields:
    """Return the fields of a form.

    Raises:
        RequestValidationError: a field cannot be used.
    """
    texts: dict[str, str] = {}
    for name, value in form.multi_items():
        if name in ("image", "image[]", "mask"):
            continue
        if name in texts or isinstance(value, UploadFile):
            found = "a file" if isinstance(value, UploadFile) else "twice in the form"
            raise OptionError(f"{name} is {found}", "one text", "send it once, as text")
        texts[name] = value
    try:
        return EditFields.model_validate(texts)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def _one_file(form: FormData, name: str) -> UploadFile | None:
    parts = [*form.getlist(name), *form.getlist(f"{name}[]")]
    if len(parts) > 1:
        raise OptionError(f"the form has {len(parts)} parts named {name}", "one", "send one")
    for part in parts:
        if isinstance(part, UploadFile):
            return part
        raise OptionError(f"{name} is a text", "a file; addresses are not opened", "send the content of a file")
    return None
