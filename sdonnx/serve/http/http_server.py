"""Run the application with uvicorn in this process.

Connections of clients that send no request, or read no answer, are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from sdonnx.errors import OptionError
from sdonnx.serve.http.openai_errors import error_content

__all__ = ["MAX_CONNECTIONS", "Connection", "ConnectionState", "Server", "bind", "serve"]

MAX_CONNECTIONS = 1100
"""Number of connections above which those that wait for a request are closed, the oldest first."""

_REQUEST_S = 10.0  # for the headers of the first request, or of the next one
_READ_S, _READ_BYTES = 60.0, 64 * 1024  # of an answer that a client reads in this time at least


class ConnectionState(ServerState):
    """State that all connections share.

    Attributes:
        waiting: connections without a request in progress, the oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[Connection, None] = {}


class Connection(H11Protocol):
    """uvicorn's connection, with limits of time and number; uvicorn itself only limits the time between two requests.

    Data that is not a whole request, such as a slow header, or a body that nobody reads, does not extend the time.
    """

    # Overridden methods: see uvicorn and asyncio.Protocol.
    # ruff: noqa: D102

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._shared = cast(ConnectionState, self.server_state)
        self._request_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            idle = (each for each in self._shared.waiting if not each.transport.get_write_buffer_size())
            if (oldest := next(idle, None)) is not None:
                oldest._stop_waiting()  # before the loop tells it that it is lost
                oldest.transport.abort()
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_reading()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reading()
        self._follow()

    def send_400_response(self, msg: str) -> None:
        content = json.dumps(error_content(400, f"the request is not valid HTTP ({msg})")).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(content))), ("connection", "close")]
        events = (h11.Response(status_code=400, headers=headers), h11.Data(data=content), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    def _follow(self) -> None:
        """Start or stop the timers after the state may have changed."""
        if self.transport.is_closing():
            self._stop_waiting()
            self._expect_reading()
        elif self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._request_timer is None:
            self._shared.waiting[self] = None
            self._request_timer = self.loop.call_later(_REQUEST_S, self._end_waiting)

    def _end_waiting(self) -> None:
        self.transport.close()  # sends the rest of the last answer first
        self._follow()

    def _stop_waiting(self) -> None:
        self._shared.waiting.pop(self, None)
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _expect_reading(self) -> None:
        """Close the connection unless the client reads enough of what is unread, or all of it, in time."""
        unread = self.transport.get_write_buffer_size()
        if unread and self._read_timer is None:
            self._read_timer = self.loop.call_later(_READ_S, self._check_reading, unread)

    def _check_reading(self, before: int) -> None:
        self._read_timer = None
        unread = self.transport.get_write_buffer_size()
        if unread and before - unread < min(_READ_BYTES, before):
            self.transport.abort()
        else:
            self._expect_reading()

    def _stop_reading(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
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
    """Serve on a bound socket until a signal; accepted requests are finished first. Return the number of a second one.

    The arguments are those of `Server`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES:
        wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    server = Server(app, end_requests, grace_s=grace_s, log_level=log_level, on_ready=on_ready)
    server.run(sockets=[bound])
    return server.forced_by
