"""Middleware that refuses requests before they are read: API keys, shares of clients, size and time of the body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sdonnx.serve.fair_queue import SharedPlaces
from sdonnx.serve.http.openai_errors import error_response
from sdonnx.serve.prometheus_metrics import PrometheusMetrics
from sdonnx.serve.serve_settings import ServeSettings

__all__ = ["RequestGate"]

_LOG = logging.getLogger("sdonnx")

_PROTECTED = "/v1/"
_STATUS_PATHS = ("/health/live", "/health/ready", "/metrics")
"""Always answered. They read no body, and successful requests for them are not logged."""

_PATHS = (
    "/", "/try.css", "/try.js", "/openapi.json", *_STATUS_PATHS,
    "/v1/models", "/v1/loras", "/v1/images/generations", "/v1/images/edits",
)  # fmt: skip

_IPV6_CLIENT = 64  # bits of an address that a network assigns to one client


class RequestGate:
    """ASGI middleware that checks API keys, and limits the requests in progress and their bodies.

    The client is the API key, or without keys the address; its name is in the request's state. It gets a share of
    the requests in progress and of the bytes of all bodies, which counts until the answer is complete.

    Args:
        app: the application behind it.
        settings: the server's settings.
        metrics: counts the responses.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: PrometheusMetrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._digests = [_digest(key.encode()) for key in settings.api_keys]
        self._requests = SharedPlaces(settings.max_requests)
        self._bytes = SharedPlaces(settings.max_bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, start, status = scope["path"], time.perf_counter(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                known = path if path in _PATHS else "other"  # clients must not make up metrics
                self._metrics.responded(known, status)
            await send(message)

        try:
            await self._answer(scope, receive, counted)
        finally:
            if path not in _STATUS_PATHS or status >= 400:
                address, method = (scope.get("client") or ("-",))[0], scope["method"]
                seconds = time.perf_counter() - start
                _LOG.info("%s %s %s %s %.3f s", address, method, ascii(path)[1:-1], status or "left", seconds)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _STATUS_PATHS:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"])
        client = self._client(scope, given)
        if client is None:
            message = "the API key is missing or wrong; expected the header Authorization: Bearer KEY"
            await error_response(401, message, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        scope.setdefault("state", {})["client"] = client
        try:
            with self._place(client), self._body(client, receive, given.get(b"content-length", b"")) as limited:
                await self._app(scope, limited, send)
        except HTTPException as error:  # before the application was called
            # The connection stays open, and drops the body: a client that is still sending receives the answer.
            headers = {name: value for name, value in (error.headers or {}).items() if name != "Connection"}
            await error_response(error.status_code, error.detail, headers=headers)(scope, receive, send)

    def _client(self, scope: Scope, headers: dict[bytes, bytes]) -> str | None:
        """Return the name of a request's client, "" if it is not known; None if it needs a key and has none."""
        if self._digests and scope["path"].startswith(_PROTECTED):
            key = self._known_key(headers.get(b"authorization", b""))
            return None if key is None else f"key {key}"
        address = (scope.get("client") or ("",))[0]
        try:
            if ipaddress.ip_address(address).version == 6:
                address = str(ipaddress.ip_network((address, _IPV6_CLIENT), strict=False))
        except ValueError:  # a Unix socket, or a server that names none
            pass
        return f"address {address}" if address else ""

    def _known_key(self, header: bytes) -> int | None:
        """Return the number of the key in a header; the time does not depend on how much of a key is right."""
        scheme, _, key = header.partition(b" ")
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, each) for each in self._digests]
        return known.index(True) if any(known) and scheme.lower() == b"bearer" else None

    @contextmanager
    def _place(self, client: str) -> Iterator[None]:
        """Count a request in progress.

        Raises:
            HTTPException: the client or the server has too many.
        """
        if not self._requests.take(client, 1):
            raise _refusal(self._requests, client, 1, "requests in progress")
        try:
            yield
        finally:
            self._requests.give_back(client, 1)

    @contextmanager
    def _body(self, client: str, receive: Receive, length: bytes) -> Iterator[Receive]:
        """Return `receive` with the limits of a body, which end with it: the next message is the client's leaving.

        Args:
            client: name of the client.
            receive: returns the body's parts.
            length: value of the header Content-Length; these bytes are counted at once.

        Raises:
            HTTPException: the body is too large, or the client or the server has too many bytes in progress.
        """
        received, counted, is_complete = 0, 0, False
        deadline = asyncio.get_running_loop().time() + self._settings.body_timeout_s

        def count(size: int) -> None:
            nonlocal counted
            if size > self._settings.max_body_bytes:
                message = f"the body has more than {self._settings.max_body_bytes} bytes; send less"
                raise HTTPException(413, message, {"Connection": "close"})
            more = max(0, size - counted)
            if more and not self._bytes.take(client, more):
                raise _refusal(self._bytes, client, more, "bytes of bodies in progress")
            counted += more

        async def limited() -> Message:
            nonlocal received, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                seconds = self._settings.body_timeout_s
                raise HTTPException(408, f"the body did not arrive in {seconds:g} s", {"Connection": "close"}) from None
            received += len(message.get("body", b""))
            is_complete = message["type"] != "http.request" or not message.get("more_body", False)
            count(received)
            return message

        try:
            count(int(length[:20]) if length.isdigit() else 0)
            yield limited
        finally:
            if counted:
                self._bytes.give_back(client, counted)


def _refusal(places: SharedPlaces, client: str, amount: int, unit: str) -> HTTPException:
    """Return the answer to a client for which there is no place."""
    headers = {"Retry-After": "1", "Connection": "close"}
    if places.is_full(amount):
        return HTTPException(503, f"the server has no room for more {unit} (at most {places.capacity})", headers)
    found = f"this client has {places.held(client)} {unit}"
    return HTTPException(429, f"{found}; expected as many at most as it leaves to others; try again later", headers)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
