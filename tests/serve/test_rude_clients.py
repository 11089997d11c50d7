"""A server process beside parked bodies, JPEG bombs, idle connections and a flood, all at the same time."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image
from support.serving import until

ADDRESS, PARKER, BOMBER, FLOODER, OTHER = (f"127.0.0.{number}" for number in range(1, 6))  # of the server and clients
PARKED, BOMBS, IDLE, FLOOD = 60, 2, 1000, 12
FIELDS = {"prompt": "a circle", "num_inference_steps": 6, "size": "64x64"}
BODY = 8 * 2**20


def bomb() -> bytes:
    """Return a JPEG file of 1 MB that takes minutes to decode."""
    file = io.BytesIO()
    Image.new("L", (4096, 4096)).save(file, "JPEG", progressive=True, quality=1)
    content = file.getvalue()
    return content[:-2] + content[content.rfind(b"\xff\xda") : -2] * 30_000 + b"\xff\xd9"


@pytest.fixture(scope="module", autouse=True)
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard) if hard > 0 else max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def server(micro_cpu: Path) -> Iterator[tuple[psutil.Process, int]]:
    """The process and the port of a server."""
    with socket.create_server((ADDRESS, 0)) as free:
        port = free.getsockname()[1]
    options = ["-q", "-m", str(micro_cpu), "--port", str(port), "--max_body", "8"]
    command = [sys.executable, "-W", "error", "-m", "sdonnx", "serve", *options]
    environment = {name: value for name, value in os.environ.items() if name != "SDONNX_API_KEYS"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: is_ready(port), 300)
            yield psutil.Process(process.pid), port
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, "")
        finally:
            process.kill()


def is_ready(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://{ADDRESS}:{port}/health/ready").status_code == 200
    return False


def client_at(address: str, port: int) -> httpx.Client:
    transport = httpx.HTTPTransport(local_address=address, limits=httpx.Limits(max_connections=FLOOD))
    return httpx.Client(base_url=f"http://{ADDRESS}:{port}", transport=transport, timeout=300)


def connected(port: int) -> socket.socket:
    return socket.create_connection((ADDRESS, port), 10, source_address=(PARKER, 0))


def times_of(client: httpx.Client, count: int) -> list[float]:
    """Return the seconds of requests, one after another; each must be answered."""
    times = []
    for seed in range(count):
        start = time.monotonic()
        answer = client.post("/v1/images/generations", json={**FIELDS, "seed": seed})
        assert answer.status_code == 200, answer.text
        times.append(time.monotonic() - start)
    return times


def parked(port: int) -> socket.socket:
    """Send most of a body, and stop; the server may have refused it."""
    connection = connected(port)
    head = f"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY}\r\n\r\n"
    with contextlib.suppress(OSError):
        connection.sendall(head.encode() + b"a" * (BODY - 1000))
    return connection


def flood(client: httpx.Client, stopping: threading.Event, answers: list[int]) -> None:
    """Send requests of one client, which tries again long before it is told to."""
    for seed in itertools.count():
        answers.append(client.post("/v1/images/generations", json={**FIELDS, "n": 4, "seed": seed}).status_code)
        if stopping.wait(0.2 if answers[-1] == 429 else 0):
            return


@contextlib.contextmanager
def threads(count: int, work: Callable[[], Any], stopping: threading.Event) -> Iterator[None]:
    running = [threading.Thread(target=work) for _ in range(count)]
    for each in running:
        each.start()
    try:
        yield
    finally:
        stopping.set()
        for each in running:
            each.join()


def outcomes(client: httpx.Client) -> Counter[str]:
    """Return the number of ended requests by outcome."""
    counted: Counter[str] = Counter()
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("sdonnx_requests_total{"):
            counted[line.split('outcome="')[1].split('"')[0]] += int(float(line.rpartition(" ")[2]))
    return counted


def test_others_are_served_beside_rude_clients(server: tuple[psutil.Process, int]) -> None:
    process, port = server
    answers: list[int] = []
    bombs: list[int] = []
    files = {"image": ("a.jpg", bomb())}
    stopping = threading.Event()
    with contextlib.ExitStack() as stack:
        addresses = (OTHER, FLOODER, BOMBER)
        other, flooder, bomber = (stack.enter_context(client_at(address, port)) for address in addresses)
        times_of(other, 2)
        usual = statistics.median(times_of(other, 5))
        before, memory = outcomes(other), process.memory_info().rss
        for _ in range(IDLE):
            stack.enter_context(connected(port))
        for _ in range(PARKED):
            stack.enter_context(parked(port))

        def throw() -> None:
            bombs.append(bomber.post("/v1/images/edits", data={"prompt": "a"}, files=files).status_code)

        with threads(FLOOD, lambda: flood(flooder, stopping, answers), stopping), threads(BOMBS, throw, stopping):
            until(lambda: 429 in answers)
            beside = times_of(other, 7)
            for path in ("/health/live", "/health/ready", "/metrics"):
                assert other.get(path).status_code == 200
            used = process.memory_info().rss - memory
        after = outcomes(other)
        usual = max(usual, statistics.median(times_of(other, 5)))  # the machine may be busier now
    assert bombs == [422] * BOMBS
    assert statistics.median(beside) < 3 * usual, (beside, usual)
    assert used < 200 * 2**20
    until(lambda: process.memory_info().rss - memory < 100 * 2**20)
    # Each request was answered, and each that was accepted with its images.
    assert set(answers) == {200, 429}
    ended = after - before
    assert ended == Counter(completed=answers.count(200) + len(beside))
