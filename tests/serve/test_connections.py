"""Connections that send no request, send it slowly, or read no answer: they end, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import httpx
import pytest
from support.fake_service import FakeService, serving_fake
from support.serving import until

from sdonnx.serve.http import http_server
from sdonnx.serve.http.http_server import Server

ADDRESS = "127.0.0.1"
HEALTH = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT_S = 0.3


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, int]]:
    """A server with short times and few connections."""
    monkeypatch.setattr(http_server, "_REQUEST_S", WAIT_S)
    monkeypatch.setattr(http_server, "_READ_S", WAIT_S)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 20)
    with serving_fake(FakeService()) as running:
        yield running


@contextlib.contextmanager
def opened(port: int, count: int = 1) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((ADDRESS, port), 10)) for _ in range(count)]


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(10)
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def health(port: int) -> int:
    return httpx.get(f"http://{ADDRESS}:{port}/health/live", timeout=10).status_code


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"", b""),
        (b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: ", b""),
        (b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: ", b"a"),
        (b"POST /health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", b"a"),  # answered at once
        (HEALTH, b"G"),
    ],
    ids=["idle", "half a header", "a slow header", "a slow body that nobody reads", "a slow second request"],
)
def test_connections_without_a_request_are_closed(served: tuple[Server, int], first: bytes, more: bytes) -> None:
    with opened(served[1]) as (connection,):
        start = time.monotonic()
        connection.sendall(first)
        with contextlib.suppress(OSError):
            while more and time.monotonic() < start + 5:
                time.sleep(WAIT_S / 10)
                connection.sendall(more)
        assert is_closed(connection)
        assert WAIT_S / 2 < time.monotonic() - start < 5


def test_the_oldest_idle_connection_makes_room(served: tuple[Server, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 60)
    server, port = served
    with opened(port, 20) as idle:
        until(lambda: len(server.server_state.connections) == 20)
        assert health(port) == 200
        assert is_closed(idle[0])
    with opened(port, 200):
        assert health(port) == 200
        assert len(server.server_state.connections) <= 21


def test_a_connection_serves_many_requests(served: tuple[Server, int]) -> None:
    """Requests on one connection are not limited in time together, nor in number."""
    with httpx.Client(base_url=f"http://{ADDRESS}:{served[1]}") as client:
        for _ in range(6):
            time.sleep(WAIT_S / 3)
            answer = client.post("/v1/images/generations", json={"prompt": "a"})
            assert answer.status_code == 200
    with opened(served[1]) as (connection,):
        connection.sendall(HEALTH * 100)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 100:
            answers += connection.recv(65536)


def test_a_client_that_reads_no_answer_is_closed(served: tuple[Server, int]) -> None:
    server, port = served
    with opened(port) as (connection,):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(OSError):
            for _ in range(5000):  # until the answers fill the buffers of both sides
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        until(lambda: not server.server_state.connections, 20)
    assert health(port) == 200


@pytest.mark.parametrize(("read", "is_kept"), [(2 * 64 * 1024, True), (1024, False)])
def test_a_client_that_reads_slowly_gets_all(read: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_READ_S", 0.01)

    class Transport:
        """Sends some bytes of the answer whenever it is asked."""

        left = 2**20
        is_aborted = False

        def get_write_buffer_size(self) -> int:
            self.left -= read
            return self.left

        def abort(self) -> None:
            self.is_aborted = True

    async def body() -> None:
        connection, transport = http_server.Connection.__new__(http_server.Connection), Transport()
        connection.loop, connection.transport = asyncio.get_running_loop(), cast(asyncio.Transport, transport)
        connection._read_timer = None
        connection._expect_reading()
        while not transport.is_aborted and transport.left > 2**18:
            await asyncio.sleep(0.01)
        assert transport.is_aborted is not is_kept

    asyncio.run(body())


def test_what_is_no_http_is_answered_in_json(served: tuple[Server, int]) -> None:
    with opened(served[1]) as (connection,):
        connection.sendall(b"NONSENSE\r\n\r\n")
        head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert "not valid HTTP" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(("sent", "client"), [({}, "127.0.0.1"), ({"X-Forwarded-For": "9.9.9.9"}, "9.9.9.9")])
def test_a_proxy_on_this_machine_names_the_client(sent: dict[str, str], client: str) -> None:
    service = FakeService()
    with serving_fake(service) as (_, port):
        url = f"http://{ADDRESS}:{port}/v1/images/generations"
        assert httpx.post(url, json={"prompt": "a"}, headers=sent).status_code == 200
    assert service.accepted[0].client == f"address {client}"


# The end of the server


def test_a_second_signal_answers_running_requests_with_503() -> None:
    service = FakeService(holds=True)
    with (
        serving_fake(service) as (server, port),
        httpx.Client(base_url=f"http://{ADDRESS}:{port}", timeout=60) as client,
        opened(port) as (parked,),
        ThreadPoolExecutor(2) as pool,
    ):
        parked.sendall(b"POST /v1/images/edits HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\nabc")
        path, fields = "/v1/images/generations", {"prompt": "a"}
        plain = pool.submit(client.post, path, json=fields)
        streamed = pool.submit(client.post, path, json={**fields, "stream": True})
        until(lambda: len(service.jobs) == 2)
        server.should_exit = True
        time.sleep(0.3)
        assert not plain.done()
        server.forced_by = 2
        answer = plain.result(60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "Retry-After" in answer.headers
        assert streamed.result(60).text.startswith("event: error\n")
        assert is_closed(parked)


def test_the_grace_ends_requests() -> None:
    service = FakeService(holds=True)
    with serving_fake(service, grace_s=0.2) as (server, port):
        with ThreadPoolExecutor(1) as pool:
            url = f"http://{ADDRESS}:{port}/v1/images/generations"
            running = pool.submit(httpx.post, url, json={"prompt": "a"}, timeout=60)
            until(lambda: len(service.jobs) == 1)
            server.should_exit = True
            assert running.result(30).status_code == 503
        assert server.forced_by is None
