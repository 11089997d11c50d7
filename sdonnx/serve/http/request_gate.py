"""Middleware that refuses requests before they are read: API keys, size and time of the body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sdonnx.serve.http.openai_errors import error_response
from sdonnx.serve.http.serve_settings import ServeSettings
from sdonnx.serve.prometheus_metrics import PrometheusMetrics

__all__ = ["RequestGate"]

_PROTECTED = "/v1/"
_PATHS = (
    "/", "/try.css", "/try.js", "/openapi.json", "/health/live", "/health/ready", "/metrics",
    "/v1/models", "/v1/loras", "/v1/images/generations", "/v1/images/edits",
)  # fmt: skip


class RequestGate:
    """ASGI middleware that checks API keys, and limits the bodies of requests.

    Args:
        app: the application behind it.
        settings: the server's settings.
        metrics: counts the responses.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: PrometheusMetrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._digests = [_digest(key.encode()) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = path if path in _PATHS else "other"  # clients must not make up metrics
                self._metrics.responded(known, message["status"])
            await send(message)

        refused = self._refusal(path, dict(scope["headers"]))
        if refused is not None:
            await refused(scope, receive, counted)
            return
        await self._app(scope, self._limited(receive), counted)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Any:
        if self._digests and path.startswith(_PROTECTED) and not self._is_known(headers.get(b"authorization", b"")):
            message = "the API key is missing or wrong; expected the header Authorization: Bearer KEY"
            return error_response(401, message, headers={"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._settings.max_body_bytes:
            return error_response(413, self._too_large)
        return None

    @property
    def _too_large(self) -> str:
        return f"the body has more than {self._settings.max_body_bytes} bytes; send less"

    def _is_known(self, header: bytes) -> bool:
        """Return whether the header names a key; the time does not depend on how much of a key is right."""
        scheme, _, key = header.partition(b" ")
        given = _digest(key.strip())
        return _any_true(hmac.compare_digest(given, each) for each in self._digests) and scheme.lower() == b"bearer"

    def _limited(self, receive: Receive) -> Receive:
        """Return `receive` with the limits of a body, which end with it: the next message is the client's leaving."""
        size, is_complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._settings.body_timeout_s

        async def limited() -> Message:
            nonlocal size, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                seconds = self._settings.body_timeout_s
                raise HTTPException(408, f"the body did not arrive in {seconds:g} s", {"Connection": "close"}) from None
            size += len(message.get("body", b""))
            is_complete = message["type"] != "http.request" or not message.get("more_body", False)
            if size > self._settings.max_body_bytes:
                raise HTTPException(413, self._too_large, {"Connection": "close"})
            return message

        return limited


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _any_true(values: Iterable[bool]) -> bool:
    """Return whether any is true, after looking at all of them."""
    return sum(list(values)) > 0
