"""Run the application with uvicorn in this process."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from sdonnx.errors import OptionError

__all__ = ["bind", "serve"]

_MAX_CONNECTIONS = 1000
_BACKLOG = 2048
_MAX_PORT = 65535


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound, but does not listen yet; port 0 chooses a free one.

    Raises:
        OptionError: the address cannot be used.
    """
    bound = None
    try:
        if not 0 <= port <= _MAX_PORT:
            raise OverflowError("no port number")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        if bound is not None:
            bound.close()
        raise OptionError(
            f"{host}:{port} cannot be used ({getattr(error, 'strerror', None) or error})",
            "a free port",
            "pass --host or --port",
        ) from error
    return bound


class _Server(uvicorn.Server):
    """A server that finishes running requests at the first SIGINT or SIGTERM, and stops at the second."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, but end with status 0 after a graceful stop."""

        def handle(number: int, _: FrameType | None) -> None:
            self.handle_exit(number, None)

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    app: FastAPI, bound: socket.socket, *, grace_s: int | None, log_level: str, on_ready: Callable[[], None]
) -> None:
    """Serve until a signal; accepted requests are finished first.

    Args:
        app: the application.
        bound: the socket to listen on.
        grace_s: seconds after which running requests are ended; None to wait for all.
        log_level: level of uvicorn's messages.
        on_ready: called once the server listens.
    """
    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=log_level in ("debug", "info"),
        server_header=False,
        limit_concurrency=_MAX_CONNECTIONS,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=grace_s,
        ws="none",
    )
    _Server(config, on_ready).run(sockets=[bound])
