"""Middleware of Ray's HTTP proxies: if an HTTP replica is lost, its requests get status 503, so that clients retry.

Ray's proxies end such a request without an answer, which uvicorn turns into 500, or answer with 500 and plain text.
Start every node of the cluster with
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=sdonnx.serve.ray_proxy.middlewares`; `sdonnx serve --ray` does.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sdonnx.serve.http.openai_errors import error_content

__all__ = ["CALLBACK_VARIABLE", "LostReplicaAs503", "middlewares"]

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
