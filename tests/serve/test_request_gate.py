"""Shares of clients in the requests in progress and in the bytes of their bodies, API keys, and the access log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from support.logged_lines import logged_lines

from sdonnx.serve.http.request_gate import RequestGate
from sdonnx.serve.prometheus_metrics import PrometheusMetrics
from sdonnx.serve.serve_settings import ServeSettings

KIB = 1024
SETTINGS = ServeSettings(max_body_bytes=KIB, max_requests=8, body_timeout_s=5)  # 8 KiB of all bodies
PATH = "/v1/images/generations"
STATUS_PATHS = ("/health/live", "/health/ready", "/metrics")


class App:
    """Reads a body, and answers with the client's name once it may."""

    def __init__(self) -> None:
        self.going = asyncio.Event()
        self.in_progress = 0
        self.fails = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.in_progress += 1
        try:
            while (await receive()).get("more_body"):
                pass
            if scope["path"] not in STATUS_PATHS:
                await self.going.wait()
            if self.fails:
                raise RuntimeError
            await PlainTextResponse(scope.get("state", {}).get("client", ""))(scope, receive, send)
        except HTTPException as error:
            await PlainTextResponse(error.detail, error.status_code, error.headers)(scope, receive, send)
        finally:
            self.in_progress -= 1


async def settled() -> None:
    """Let all tasks run until they wait for something else than each other."""
    for _ in range(100):
        await asyncio.sleep(0)


class Clients:
    """Clients with addresses of their own."""

    def __init__(self, app: App, settings: ServeSettings) -> None:
        self.app = app
        self._gate = RequestGate(app, settings, PrometheusMetrics())
        self._started: list[asyncio.Task[httpx.Response]] = []

    async def send(self, client: str, content: Any = b"x", path: str = PATH, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(self._gate, client=(client, 1), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as sender:
            return await sender.post(path, content=content, headers=headers)

    async def start(self, client: str, count: int, content: Callable[[], Any] = lambda: b"x") -> int:
        """Start requests, and return how many of them are in progress."""
        before = self.app.in_progress
        self._started += [asyncio.create_task(self.send(client, content())) for _ in range(count)]
        await settled()
        return self.app.in_progress - before

    async def finish(self) -> list[int]:
        self.app.going.set()
        answers = await asyncio.gather(*self._started)
        self._started.clear()
        self.app.going.clear()
        return sorted(each.status_code for each in answers)


def run(body: Callable[[Clients], Awaitable[None]], settings: ServeSettings = SETTINGS) -> None:
    async def with_clients() -> None:
        await body(Clients(App(), settings))

    asyncio.run(with_clients())


def test_a_client_gets_a_share_of_the_requests_in_progress() -> None:
    async def body(clients: Clients) -> None:
        assert await clients.start("1.1.1.1", 20) == 4
        refused = await clients.send("1.1.1.1")
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "1"
        assert "4 requests in progress" in refused.json()["error"]["message"]
        assert await clients.start("2.2.2.2", 20) == 2
        assert await clients.start("3.3.3.3", 20) == 1
        assert await clients.start("4.4.4.4", 1) == 1
        full = await clients.send("5.5.5.5")
        assert (full.status_code, full.headers["Retry-After"]) == (503, "1")
        assert full.json()["error"]["code"] == "unavailable"
        assert (await clients.finish()).count(200) == 8
        assert await clients.start("1.1.1.1", 20) == 4  # all places are free again

    run(body)


def test_status_paths_are_answered_while_everything_is_taken() -> None:
    async def body(clients: Clients) -> None:
        for number in range(8):
            assert await clients.start(f"1.1.1.{number}", 1) == 1
        assert (await clients.send("2.2.2.2")).status_code == 503
        for path in STATUS_PATHS:
            assert (await clients.send("2.2.2.2", path=path)).status_code == 200
        await clients.finish()

    run(body)


@pytest.mark.parametrize("chunked", [False, True])
def test_the_bytes_of_all_bodies_are_bounded(chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield bytes(KIB // 4)

    def content() -> Any:
        return parts() if chunked else bytes(KIB)

    async def started(clients: Clients, address: str, count: int) -> int:
        return sum([await clients.start(address, 1, content) for _ in range(count)])

    async def body(clients: Clients) -> None:
        for _ in range(2):  # all places are given back
            assert await started(clients, "1.1.1.1", 8) == 3
            refused = await clients.send("1.1.1.1", content())
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert await started(clients, "2.2.2.2", 8) == 2
            assert await started(clients, "3.3.3.3", 8) == 1
            if not chunked:  # the size of others is not known before their first part
                assert await started(clients, "4.4.4.4", 1) == await started(clients, "6.6.6.6", 1) == 1
                full = await clients.send("5.5.5.5", content())
                assert (full.status_code, full.headers["Retry-After"]) == (503, "1")
            assert (await clients.finish()).count(200) == (6 if chunked else 8)

    run(body, ServeSettings(max_body_bytes=KIB, max_requests=100))


def test_places_are_given_back_after_a_failure() -> None:
    async def body(clients: Clients) -> None:
        clients.app.fails = True
        for _ in range(20):
            await clients.start("1.1.1.1", 3, lambda: bytes(KIB))
            assert await clients.finish() == [500] * 3
        for _ in range(20):
            assert (await clients.send("1.1.1.1", bytes(KIB + 1))).status_code == 413
        clients.app.fails = False
        assert await clients.start("1.1.1.1", 3, lambda: bytes(KIB)) == 3
        assert await clients.finish() == [200] * 3

    run(body)


def test_a_body_that_stops_times_out_and_gives_its_place_back() -> None:
    async def parked() -> AsyncIterator[bytes]:
        yield bytes(KIB // 2)
        await asyncio.sleep(60)
        yield b""

    async def body(clients: Clients) -> None:
        for _ in range(3):
            await clients.start("1.1.1.1", 4, parked)
            assert await clients.finish() == [408] * 4

    run(body, ServeSettings(max_body_bytes=KIB, max_requests=8, body_timeout_s=0.05))


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),  # a network assigns these to one client
        ("testclient", "testclient"),
    ],
)
def test_a_client_is_its_address(address: str, name: str) -> None:
    async def body(clients: Clients) -> None:
        clients.app.going.set()
        assert (await clients.send(address)).text == f"address {name}"

    run(body)


def test_with_keys_a_client_is_its_key() -> None:
    async def body(clients: Clients) -> None:
        assert (await clients.send("1.1.1.1", bytes(KIB), Authorization="Bearer wrong")).status_code == 401
        sent = [clients.send(f"1.1.1.{index}", Authorization="Bearer one") for index in range(20)]
        tasks = [asyncio.create_task(each) for each in sent]
        await settled()
        assert clients.app.in_progress == 4
        other = asyncio.create_task(clients.send("1.1.1.1", Authorization="Bearer two"))
        await settled()
        clients.app.going.set()
        names = {each.text for each in await asyncio.gather(*tasks) if each.status_code == 200}
        assert names == {"key 0"}
        assert (await other).text == "key 1"
        assert (await clients.send("1.1.1.1", path="/openapi.json")).text == "address 1.1.1.1"

    run(body, ServeSettings(api_keys=("one", "two"), max_requests=8))


def test_access_log() -> None:
    async def body(clients: Clients) -> None:
        clients.app.going.set()
        await clients.send("1.1.1.1")
        await clients.send("2.2.2.2", bytes(KIB + 1))
        await clients.send("1.1.1.1", path="/health/live")
        await clients.send("1.1.1.1", path="/a%0Ab")

    with logged_lines(logging.INFO) as lines:
        run(body)
    assert [line.rsplit(" ", 2)[0] for line in lines] == [
        f"1.1.1.1 POST {PATH} 200",
        f"2.2.2.2 POST {PATH} 413",
        "1.1.1.1 POST /a\\nb 200",
    ]
    assert all(line.endswith(" s") and 0 <= float(line.split()[-2]) < 60 for line in lines)
