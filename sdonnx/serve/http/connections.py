"""Connections of clients: those that send no request, or read no answer, are closed."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from sdonnx.serve.http.openai_errors import error_content

__all__ = ["MAX_CONNECTIONS", "Connection", "ConnectionState"]

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
