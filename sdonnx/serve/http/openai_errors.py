"""Errors in the form of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from sdonnx.errors import DeviceMemoryError, QueueFullError, SdonnxError, UnavailableError

__all__ = [
    "CLIENT_LEFT",
    "ErrorResponse",
    "error_content",
    "error_response",
    "on_http_error",
    "on_invalid",
    "on_left",
    "on_sdonnx_error",
]

CLIENT_LEFT = 499
"""Status of a request after its client left, as in nginx's log."""

_MAX_CHARACTERS = 300  # of a message
_MAX_NAME = 60  # characters of a parameter's name, which the client chooses

# Status -> (type, code), as OpenAI names them.
_TYPES = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "unavailable"),
}

# Messages of pydantic that are shorter or clearer in our words.
_MESSAGES = {
    "extra_forbidden": "is not a parameter of this request",
    "missing": "is required",
    # curl -d without this header sends a form.
    "model_attributes_type": "is no JSON object; send one with the header content-type: application/json",
}

# What to send for a parameter that OpenAI's API has in another form.
_OF_PARAMETERS = {
    "response_format": "images are in the answer as b64_json, since the server keeps no files; leave the field out",
}


class ErrorFields(BaseModel):
    """An error: one sentence, its type, and the parameter that it is about."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of a response that is not successful."""

    error: ErrorFields


def error_content(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error.

    Args:
        status: HTTP status.
        message: one sentence; control characters are escaped, and its length is limited.
        param: the request's parameter that caused it.
    """
    kind, code = _TYPES.get(status, ("invalid_request_error", None))
    param = None if param is None else _shown(param)
    return {"error": {"message": _shown(message), "type": kind, "param": param, "code": code}}


def error_response(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return the response of an error; see `error_content`."""
    return JSONResponse(error_content(status, message, param), status, dict(headers or {}))


def status_of(error: SdonnxError) -> int:
    """Return the HTTP status of an error of the pipeline."""
    if isinstance(error, QueueFullError):
        return 429
    return 503 if isinstance(error, UnavailableError | DeviceMemoryError) else 422


async def on_sdonnx_error(_: Request, error: Exception) -> JSONResponse:
    """Return the response of an error of the pipeline or the queue."""
    assert isinstance(error, SdonnxError)
    status = status_of(error)
    headers = {}
    if status in (429, 503):
        seconds = error.retry_after_s if isinstance(error, QueueFullError) else 5
        headers["Retry-After"] = str(math.ceil(seconds))
    return error_response(status, str(error), headers=headers)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Return the response of an error of the framework, such as an unknown path."""
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = (
            f"{request.method} {request.url.path} is not part of this server; "
            "expected POST /v1/images/generations or /v1/images/edits; /openapi.json lists all paths"
        )
    return error_response(error.status_code, message, headers=error.headers)


async def on_left(_: Request, error: Exception) -> Response:
    """Return a response that nobody receives, for a client that left while it sent its request."""
    del error
    return Response(status_code=CLIENT_LEFT)


async def on_invalid(_: Request, error: Exception) -> JSONResponse:
    """Return the response of a body that does not have the required fields."""
    assert isinstance(error, RequestValidationError | ValidationError)
    errors: Sequence[Any] = error.errors()
    first = errors[0]
    if first["type"] == "json_invalid":
        return error_response(400, "the body is no valid JSON")
    place = [str(part)[:_MAX_NAME] for part in first["loc"] if part != "body"]
    param = place[0] if place else None
    message = _MESSAGES.get(first["type"], first["msg"][:1].lower() + first["msg"][1:])
    if first["type"] == "literal_error":
        message = _OF_PARAMETERS.get(param or "", message)
    subject = f"{'.'.join(place)}:" if place else "the body" if first["type"] in _MESSAGES else "the body:"
    return error_response(422, f"{subject} {message}", param)


def _shown(text: str) -> str:
    """Return text on one line, shortened, with characters escaped that cannot be printed."""
    text = " ".join(text[: 10 * _MAX_CHARACTERS].split())
    text = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
