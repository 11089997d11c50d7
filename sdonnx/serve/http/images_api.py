"""The endpoints of OpenAI's API: images from prompts, edited images, and models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from sdonnx.errors import OptionError
from sdonnx.runtime.inputs.conditioning_images import CONDITIONING_IMAGES, MAX_CONDITIONING_IMAGES
from sdonnx.serve.http.openai_errors import CLIENT_LEFT, ErrorResponse, error_response
from sdonnx.serve.http.request_fields import (
    LISTED_FIELDS,
    LORAS,
    EditFields,
    GenerationFields,
    ImageFields,
    is_lora_field,
    read_lora_form,
)
from sdonnx.serve.http.responses import (
    Encoder,
    EventResponse,
    ImagesResponse,
    LoraCard,
    LoraList,
    ModelCard,
    ModelList,
    images_response,
    stream_events,
)
from sdonnx.serve.http.uploaded_images import read_conditioning, read_upload
from sdonnx.serve.image_request import ImageRequest
from sdonnx.serve.image_service import GeneratedImages, ImageService, ServiceJob
from sdonnx.serve.serve_settings import ServeSettings

__all__ = ["ImagesApi"]

_MAX_FIELD_BYTES = 256 * 1024
_MAX_FIELDS = 80
_MAX_FILES = 12
_DECODERS = 2  # requests of different clients that decode images at the same time
_FILES = ("image", "mask", *CONDITIONING_IMAGES)

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 408, 413, 422, 429, 503)
}
_STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}


def _edit_body() -> dict[str, Any]:
    """Return the description of the form for the OpenAPI document."""
    schema = EditFields.model_json_schema()
    file = {"type": "string", "format": "binary"}
    files = {"type": "array", "items": file, "maxItems": MAX_CONDITIONING_IMAGES}
    schema["properties"] |= {"image": file, "mask": file} | dict.fromkeys(CONDITIONING_IMAGES, files)
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
        self._decoders = asyncio.Semaphore(_DECODERS)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client
        self._started = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        """Add the endpoints to an application."""
        images: dict[str, Any] = {"response_model": ImagesResponse, "responses": {**_ERRORS, 200: _STREAM}}
        app.add_api_route("/v1/images/generations", self.generate, methods=["POST"], **images)
        app.add_api_route("/v1/images/edits", self.edit, methods=["POST"], openapi_extra=_edit_body(), **images)
        app.add_api_route("/v1/models", self.list_models, methods=["GET"], responses={401: _ERRORS[401]})
        app.add_api_route("/v1/loras", self.list_loras, methods=["GET"], responses={401: _ERRORS[401]})
        found: dict[int | str, dict[str, Any]] = {status: _ERRORS[status] for status in (401, 404)}
        app.add_api_route(
            "/v1/models/{model:path}", self.show_model, methods=["GET"], responses=found, response_model=ModelCard
        )

    async def list_models(self) -> ModelList:
        """List the models."""
        return ModelList(data=await asyncio.gather(*(self._card(name) for name in self._pipeline.models)))

    async def list_loras(self) -> LoraList:
        """List the LoRAs that the field `loras` may name."""
        return LoraList(data=[LoraCard(id=name, created=self._started) for name in self._pipeline.loras])

    async def show_model(self, model: str) -> Response:
        """Show a model."""
        if model not in self._pipeline.models:
            return self._unknown_model()
        return JSONResponse((await self._card(model)).model_dump())

    async def generate(self, request: Request, fields: GenerationFields) -> Response:
        """Generate images from a prompt."""
        if (unknown := self._unknown_name(fields)) is not None:
            return unknown
        given = {name: getattr(fields, name) for name in CONDITIONING_IMAGES}
        asked = replace(fields.to_request(), client=request.state.client)
        asked = await self._with_images(asked, {name: each for name, each in given.items() if each})
        return await self._answer(request, fields, asked, "image_generation")

    async def edit(self, request: Request) -> Response:
        """Change an image, or the area of a mask in it, according to a prompt."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise HTTPException(422, "the body is no form; send multipart/form-data with prompt and image")
        async with request.form(max_files=_MAX_FILES, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES) as form:
            fields = _read_fields(form)
            if (unknown := self._unknown_name(fields)) is not None:
                return unknown
            image, mask = _one_file(form, "image"), _one_file(form, "mask")
            if image is None:
                raise OptionError("the form has no image", "a file named image")
            content, hidden = await image.read(), None if mask is None else await mask.read()
            files = {name: [await each.read() for each in _files(form, name)] for name in CONDITIONING_IMAGES}
        asked = replace(fields.to_request(), client=request.state.client)
        size = None if asked.height is None or asked.width is None else (asked.height, asked.width)
        if size is not None:
            self._pipeline.limits.check_size(*size)  # before an image is resized
        asked = await self._with_images(asked, {name: each for name, each in files.items() if each})
        async with self._decoding(asked.client):
            upload = await asyncio.to_thread(read_upload, content, hidden, size, self._settings.max_upload_pixels)
        edited = replace(asked, image=upload.image, mask_image=upload.mask, strength=fields.strength)
        return await self._answer(request, fields, edited, "image_edit")

    @asynccontextmanager
    async def _decoding(self, client: str) -> AsyncIterator[None]:
        """Wait until images of a client may be decoded: one request of each client at a time, in turn."""
        turn = self._turns.setdefault(client, asyncio.Lock())
        async with turn, self._decoders:
            yield

    async def _with_images(self, asked: ImageRequest, files: Mapping[str, Sequence[bytes | str]]) -> ImageRequest:
        """Return a request with its images next to the prompt."""
        if not files:
            return asked
        async with self._decoding(asked.client):
            images: dict[str, Any] = await asyncio.to_thread(read_conditioning, files, self._settings.max_upload_pixels)
        return replace(asked, **images)

    async def _answer(self, request: Request, fields: ImageFields, asked: ImageRequest, kind: str) -> Response:
        if asked.num_images > (limit := self._pipeline.limits.max_images):  # the queue knows it by another name
            raise OptionError(f"n is {asked.num_images}", f"a whole number from 1 to {limit}")
        job = await self._pipeline.accept(asked)
        encoder = Encoder(fields, job, self._pipeline.observer)
        if fields.stream:
            return EventResponse(job, stream_events(job, fields, encoder, kind))
        result = await _images_or_leaving(request, job)
        if result is None:
            return Response(status_code=CLIENT_LEFT)
        answer = await images_response(job, result, encoder)
        # json takes three times as long as pydantic for a megabyte of base64.
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _card(self, name: str) -> ModelCard:
        return ModelCard(id=name, created=self._started, inputs=await self._pipeline.known_inputs(name))

    def _unknown_name(self, fields: ImageFields) -> JSONResponse | None:
        """Return the answer to a request for a model or a LoRA that is unknown; None if both are known."""
        if fields.model is not None and fields.model not in self._pipeline.models:
            return self._unknown_model()
        known = self._pipeline.loras
        for name in fields.loras or ():
            if known and name not in known:  # without any, the pipeline's message is clearer
                return error_response(404, f"the LoRA {name!r} is unknown; expected a name that /v1/loras lists", LORAS)
        return None

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
    texts: dict[str, Any] = {}
    loras: list[tuple[str, str]] = []
    for name, value in form.multi_items():
        field = name.removesuffix("[]")
        if field in _FILES:
            continue
        if isinstance(value, UploadFile):
            raise OptionError(f"{name} is a file", "one text", "send it as text")
        if is_lora_field(name):
            loras.append((name, value))
        elif field in LISTED_FIELDS:
            texts.setdefault(field, []).append(value)
        elif name in texts:
            raise OptionError(f"{name} is twice in the form", "one text")
        else:
            texts[name] = value
    if loras:
        texts[LORAS] = read_lora_form(loras)
    try:
        return EditFields.model_validate(texts)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def _one_file(form: FormData, name: str) -> UploadFile | None:
    parts = _files(form, name)
    if len(parts) > 1:
        expected = "one, since models of this server start from one image"
        raise OptionError(f"the form has {len(parts)} files named {name}", expected)
    return parts[0] if parts else None


def _files(form: FormData, name: str) -> list[UploadFile]:
    """Return the files of a form with a name, which may end with brackets."""
    files = []
    for part in (*form.getlist(name), *form.getlist(f"{name}[]")):
        if not isinstance(part, UploadFile):
            raise OptionError(f"{name} is a text", "a file; addresses are not opened", "send the content of a file")
        files.append(part)
    return files
