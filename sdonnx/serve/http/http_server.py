"""Run the application with uvicorn in this process."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from sdonnx.errors import OptionError
from sdonnx.serve.http.connections import MAX_CONNECTIONS, Connection, ConnectionState

__all__ = ["Server", "bind", "serve"]

_BACKLOG = 2048
_MAX_PORT = 65535
_NEVER_S = 24 * 3600
_OPEN_FILES = 2 * MAX_CONNECTIONS  # with uploads that wait in files
_ANSWER_S = 2.0  # for clients to receive the end of their requests when the server stops at once


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


class Server(uvicorn.Server):
    """A server that finishes running requests at the first SIGINT or SIGTERM, and ends them at the second.

    Args:
        app: the application.
        end_requests: ends all requests with an error; called when they may not be finished.
        grace_s: seconds after the first signal after which running requests are ended; None to wait for all.
        log_level: level of uvicorn's messages.
        on_ready: called once the server listens.

    Attributes:
        forced_by: number of the second signal; None if the server was not forced to stop.
    """

    def __init__(
        self,
        app: FastAPI,
        end_requests: Callable[[], Awaitable[None]],
        *,
        grace_s: float | None = None,
        log_level: str = "warning",
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            log_level=log_level,
            access_log=False,  # the application writes one
            timeout_keep_alive=_NEVER_S,  # the connection has a limit of its own
            server_header=False,
            backlog=_BACKLOG,
            ws="none",
        )
        super().__init__(config)
        self.server_state = ConnectionState()
        self.forced_by: int | None = None
        self._ending: asyncio.Future[None] | None = None
        self._end_requests, self._grace_s, self._on_ready = end_requests, grace_s, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: D102  see uvicorn
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: D102
        watching = asyncio.create_task(self._end_in_time())
        try:
            await super().shutdown(sockets)
        finally:
            watching.cancel()
            if self._ending is not None:
                await self._ending

    async def _end_in_time(self) -> None:
        """End all requests and connections at the second signal, or after the time to finish them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                while self.forced_by is None:
                    await asyncio.sleep(0.1)
        self._ending = asyncio.ensure_future(self._end_requests())
        await asyncio.wait({self._ending})
        await asyncio.sleep(_ANSWER_S)
        for connection in list(self.server_state.connections):  # their clients send or read nothing
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, but do not raise them again after the server has stopped."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _: FrameType | None) -> None:
            if self.should_exit:
                self.forced_by = number
            self.should_exit = True

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    app: FastAPI,
    end_requests: Callable[[], Awaitable[None]],
    bound: socket.socket,
    *,
    grace_s: int | None,
    log_level: str,
    on_ready: Callable[[], None],
) -> int | None:
    """Serve until a signal; accepted requests are finished first. Return the number of a second signal.

    Args:
        app: see `Server`, like the other arguments except `bound`.
        end_requests: see there.
        bound: the socket to listen on.
        grace_s: see there.
        log_level: see there.
        on_ready: see there.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES:
        wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    server = Server(app, end_requests, grace_s=grace_s, log_level=log_level, on_ready=on_ready)
    server.run(sockets=[bound])
    return server.forced_by
