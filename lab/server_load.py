"""Servers that scripts start, and requests to them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from sdonnx.errors import SdonnxError

CLIENTS = 16  # enough to fill the batch that runs and those that wait
TIMEOUT_S = 300.0
PATH = "/v1/images/generations"
PROMPTS = (
    "a large red circle to the left of a green triangle",
    "a small blue square above a yellow cross",
    "a yellow triangle to the right of a blue circle",
    "a large green cross below a small red square",
)

_MEGABYTE = 1024 * 1024
_READ_BYTES = 16 * _MEGABYTE
_STOP_S = 60.0
_READY = "ready at "
_RESIDENT = "process_resident_memory_bytes "


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        url: its address.
        ready_s: seconds from the start of its process until it was ready.
    """

    url: str
    ready_s: float


@dataclass
class Answers:
    """Answers to requests.

    Attributes:
        statuses: number of answers by status.
        times_s: latency of each answer with status 200.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    times_s: list[float] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        quantiles = {name: round(float(np.quantile(self.times_s, share)), 4) for name, share in shares.items()}
        return {"requests": sum(self.statuses.values()), "statuses": dict(self.statuses), "latency_s": quantiles}


@contextlib.contextmanager
def started_server(options: argparse.Namespace, *more: str) -> Iterator[Server]:
    """Start `sdonnx serve` with more options and yield it once all batch sizes are captured; it stops at the end.

    With Ray, only single images are certain to be captured: the HTTP process does not know of more.

    Raises:
        SdonnxError: it ended before it was ready, or does not end its captures.
    """
    # Replicas on Ray have no such option: they are warmed up with the model's own size.
    sizes = [] if options.size is None or "--ray" in more else ["--warmup", options.size]
    command = [sys.executable, "-m", "sdonnx", "serve", "-m", options.model, "--port", "0", *sizes, *more]
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            line = next((each for each in lines if each.startswith(_READY)), None)
            if line is None:
                raise SdonnxError("the server did not start", "an optimized folder", "read its message above")
            server = Server(line.removeprefix(_READY).partition(",")[0], round(time.monotonic() - begin, 3))
            _wait_for_captures(server.url)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()


def _wait_for_captures(url: str) -> None:
    """Wait until the server has captured larger batches, which it does after it is ready."""
    end = time.monotonic() + TIMEOUT_S
    while "\nsdonnx_pending_captures 0.0\n" not in httpx.get(f"{url}/metrics").text:
        if time.monotonic() > end:
            raise SdonnxError("the server does not end its captures", "no pending captures", "read its message above")
        time.sleep(0.1)


class Load:
    """Requests to a server.

    Args:
        client: a client of its address.
        common: fields of each request, without the prompt.
        seed: seed of the prompts and the times.
    """

    def __init__(self, client: httpx.AsyncClient, common: Mapping[str, Any], seed: int) -> None:
        self._client, self._common, self._random = client, common, random.Random(seed)

    async def send(self, answers: Answers, due: float, **fields: Any) -> None:
        """Send a request, and add its answer to `answers`.

        Args:
            answers: what is counted.
            due: when the request was due, in seconds of `time.monotonic`.
            **fields: fields of the request beside the common ones.
        """
        body = {"prompt": self._random.choice(PROMPTS), **self._common, **fields}
        response = await self._client.post(PATH, json=body)
        answers.statuses[response.status_code] += 1
        if response.status_code == httpx.codes.OK:
            answers.times_s.append(time.monotonic() - due)

    async def fill(
        self, seconds: float, kinds: tuple[dict[str, Any], ...] = ({},), clients: int = CLIENTS
    ) -> tuple[float, Answers]:
        """Send requests as fast as the server answers, and return the requests in a second; see `arrive`."""
        answers, begin = Answers(), time.monotonic()

        async def work() -> None:
            while time.monotonic() < begin + seconds:
                await self.send(answers, time.monotonic(), **self._random.choice(kinds))

        await asyncio.gather(*(work() for _ in range(clients)))
        return len(answers.times_s) / (time.monotonic() - begin), answers

    async def arrive(self, rate: float, seconds: float, kinds: tuple[dict[str, Any], ...] = ({},)) -> Answers:
        """Send requests at random times.

        Args:
            rate: mean number of requests in a second.
            seconds: time until the last one is sent.
            kinds: fields of requests, one of which each request has.
        """
        answers, begin = Answers(), time.monotonic()
        due = begin + self._random.expovariate(rate)
        async with asyncio.TaskGroup() as tasks:
            while due < begin + seconds:
                await asyncio.sleep(due - time.monotonic())
                tasks.create_task(self.send(answers, due, **self._random.choice(kinds)))
                due += self._random.expovariate(rate)
        return answers

    async def resident_mb(self) -> float:
        """Return the resident memory of the server in MB."""
        lines = (await self._client.get("/metrics")).text.splitlines()
        return round(next(float(line.split()[1]) for line in lines if line.startswith(_RESIDENT)) / _MEGABYTE, 1)


@contextlib.asynccontextmanager
async def load_of(url: str, options: argparse.Namespace) -> AsyncIterator[Load]:
    """Yield requests to a server that have the size, the steps and the seed of load_test.py's options."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        yield Load(client, common_fields(options), options.seed)


def common_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that all requests have."""
    size = {} if options.size is None else {"size": options.size}
    return {"num_inference_steps": options.steps, **size}


def described(folder: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says about a folder, given its `sdonnx.json`."""
    about = {name: report[name] for name in ("family", "provider", "precision")}
    return {"name": folder.resolve().name, **about}


def read_files(folder: Path) -> None:
    """Read all files of a folder, so that they are in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(_READ_BYTES):
                    pass
