"""Measure the latency of `sdonnx serve` under load, what batches and HTTP cost or save, or its memory over time.

python scripts/load_test.py -m shapes-cpu --json docs/results/serve-load-cpu.json
python scripts/load_test.py -m sd15 --compare_batches 1 4 8 --json docs/results/serve-batches.json
python scripts/load_test.py -m shapes-cpu --soak_minutes 60 --json docs/results/serve-soak-cpu.json

The script starts the server on 127.0.0.1. It measures the capacity with clients that each wait for their answer, then
sends requests at random times (a Poisson process) at a share of the capacity. The latency of a request counts from the
time at which it was due, so that a slow server cannot hide its queue by delaying the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import numpy as np

from sdonnx.benchmark.files import append_json, check_writable
from sdonnx.benchmark.record import environment
from sdonnx.errors import OptionError, SdonnxError
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.terminal import console, guarded

_CLIENTS = 16  # enough to fill the batch that runs and those that wait
_UNTIMED = 3  # first images, which capture graphs
_TIMEOUT_S = 300.0
_STOP_S = 60.0
_MEGABYTE = 1024 * 1024
_READY = "ready at "
_RESIDENT = "process_resident_memory_bytes "
_PROMPTS = (
    "a large red circle to the left of a green triangle",
    "a small blue square above a yellow cross",
    "a yellow triangle to the right of a blue circle",
    "a large green cross below a small red square",
)
_SOAK_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"guidance_scale": 1.0},
    {"scheduler": "euler_a"},
    {"n": 2},
    {"stream": True},
)


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
def _server(folder: str, options: list[str]) -> Iterator[tuple[str, float]]:
    """Start a server and yield its address and the seconds until it was ready; it stops at the end."""
    start = time.monotonic()
    command = [sys.executable, "-m", "sdonnx", "serve", "-m", folder, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            line = next((each for each in lines if each.startswith(_READY)), None)
            if line is None:
                raise SdonnxError("the server did not start", "an optimized folder", "read its message above")
            yield line.removeprefix(_READY).partition(",")[0], time.monotonic() - start
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()


class Load:
    """Requests to a server.

    Args:
        client: a client of its address.
        steps: denoising steps of each request.
        seed: seed of the prompts and the times.
    """

    def __init__(self, client: httpx.AsyncClient, steps: int, seed: int) -> None:
        self._client, self._steps, self._random = client, steps, random.Random(seed)

    async def _send(self, answers: Answers, due: float, **fields: Any) -> None:
        body = {"prompt": self._random.choice(_PROMPTS), "num_inference_steps": self._steps, **fields}
        response = await self._client.post("/v1/images/generations", json=body)
        answers.statuses[response.status_code] += 1
        if response.status_code == httpx.codes.OK:
            answers.times_s.append(time.monotonic() - due)

    async def fill(self, seconds: float, kinds: tuple[dict[str, Any], ...] = ({},)) -> tuple[float, Answers]:
        """Send requests as fast as the server answers, and return the requests in a second; see `arrive`."""
        answers, begin = Answers(), time.monotonic()

        async def work() -> None:
            while time.monotonic() < begin + seconds:
                await self._send(answers, time.monotonic(), **self._random.choice(kinds))

        await asyncio.gather(*(work() for _ in range(_CLIENTS)))
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
                tasks.create_task(self._send(answers, due, **self._random.choice(kinds)))
                due += self._random.expovariate(rate)
        return answers

    async def resident_mb(self) -> float:
        """Return the resident memory of the server in MB."""
        lines = (await self._client.get("/metrics")).text.splitlines()
        return round(next(float(line.split()[1]) for line in lines if line.startswith(_RESIDENT)) / _MEGABYTE, 1)


@contextlib.asynccontextmanager
async def _load(url: str, options: argparse.Namespace) -> AsyncIterator[Load]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client:
        yield Load(client, options.steps, options.seed)


async def _measure_capacity(url: str, options: argparse.Namespace, alone: bool) -> dict[str, Any]:
    """Return the requests in a second, and with `alone` the latency of requests one after another."""
    async with _load(url, options) as load:
        single = Answers()
        for _ in range(_UNTIMED + options.single if alone else 0):
            await load._send(single, time.monotonic())
        del single.times_s[:_UNTIMED]
        await load.fill(options.warmup_s)
        capacity, full = await load.fill(options.capacity_s)
    found = {"capacity_per_s": round(capacity, 3), "at_capacity": full.record()}
    return found | ({"one_after_another": single.record()} if alone else {})


def _measure_in_process(options: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of an image without a server, and of its PNG."""
    with OrtDiffusionPipeline.from_pretrained(options.model) as pipeline:
        pipeline.set_progress_bar_config(disable=True)
        images, encodings = list[float](), list[float]()
        for seed in range(_UNTIMED + options.single):
            start = time.monotonic()
            image = pipeline(_PROMPTS[seed % len(_PROMPTS)], num_inference_steps=options.steps, seed=seed).images[0]
            drawn = time.monotonic()
            image.save(io.BytesIO(), "PNG")
            images.append(drawn - start)
            encodings.append(time.monotonic() - drawn)
    return {
        "image_s": round(statistics.median(images[_UNTIMED:]), 4),
        "png_s": round(statistics.median(encodings[_UNTIMED:]), 4),
    }


def _compare_batches(options: argparse.Namespace) -> dict[str, Any]:
    """Return the capacity with each size of batches, the first of which is without, and what HTTP and the queue add."""
    servers = {}
    for index, size in enumerate(options.compare_batches):
        with _server(options.model, ["--max_batch_size", str(size)]) as (url, ready_s):
            found = asyncio.run(_measure_capacity(url, options, not index))
        servers[str(size)] = {"ready_s": round(ready_s, 3), **found}
    first = servers[str(options.compare_batches[0])]
    alone = _measure_in_process(options)
    added = first["one_after_another"]["latency_s"]["p50"] - alone["image_s"] - alone["png_s"]
    return {
        "clients_at_capacity": _CLIENTS,
        "by_max_batch_size": servers,
        "speedup": {size: round(each["capacity_per_s"] / first["capacity_per_s"], 3) for size, each in servers.items()},
        "in_process": alone,
        "added_by_server_s": round(added, 4),
    }


async def _measure_latency(url: str, options: argparse.Namespace) -> dict[str, Any]:
    async with _load(url, options) as load:
        await load.fill(options.warmup_s)
        capacity, full = await load.fill(options.capacity_s)
        rate = options.share * capacity
        answers = await load.arrive(rate, options.seconds)
        alone = Answers()
        for _ in range(options.single):
            await load._send(alone, time.monotonic())
    return {
        "capacity_per_s": round(capacity, 3),
        "clients_at_capacity": _CLIENTS,
        "at_capacity": full.record(),
        "share": options.share,
        "rate_per_s": round(rate, 3),
        "seconds": options.seconds,
        "arriving": answers.record(),
        "one_after_another": alone.record(),
    }


async def _measure_memory(url: str, options: argparse.Namespace) -> dict[str, Any]:
    minutes: list[dict[str, Any]] = []
    async with _load(url, options) as load:
        await load.fill(options.warmup_s, _SOAK_KINDS)
        capacity, _ = await load.fill(options.capacity_s, _SOAK_KINDS)  # kinds share fewer batches than equal requests
        first = await load.resident_mb()
        for minute in range(1, options.soak_minutes + 1):
            answers = await load.arrive(options.share * capacity, 60, _SOAK_KINDS)
            resident = await load.resident_mb()
            minutes.append({"minute": minute, "resident_mb": resident, "statuses": dict(answers.statuses)})
            console().print(f"minute {minute}: {resident:.1f} MB, answers {dict(answers.statuses)}", markup=False)
    return {"share": options.share, "resident_mb_at_start": first, "minutes": minutes}


def _run(options: argparse.Namespace) -> int:
    if not 0 < options.share < 1:
        raise OptionError(f"--share is {options.share:g}", "a number between 0 and 1", "pass for example 0.8")
    if options.json is not None:
        check_writable(options.json)
    surroundings = environment()
    name, measure = ("soak", _measure_memory) if options.soak_minutes else ("load", _measure_latency)
    if options.compare_batches:
        name, found = "batches", _compare_batches(options)
    else:
        with _server(options.model, []) as (url, _):
            found = asyncio.run(measure(url, options))
    record = {
        "benchmark": f"serve {name}",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python {shlex.join(sys.argv)}",
        "environment": surroundings,
        "steps": options.steps,
        **found,
    }
    if options.json is not None:
        append_json(options.json, record)
    console().print(str({name: value for name, value in found.items() if name != "minutes"}), markup=False)
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure a server's latency under load, or its memory over time.")
    add = parser.add_argument
    add("-m", "--model", required=True, help="optimized folder")
    add("--share", type=float, default=0.8, help="share of the capacity at which requests arrive (%(default)s)")
    add("--steps", type=int, default=20, help="denoising steps of a request (%(default)s)")
    add("--warmup_s", type=float, default=5, help="seconds before the capacity is measured (%(default)s)")
    add("--capacity_s", type=float, default=20, help="seconds to measure the capacity (%(default)s)")
    add("--seconds", type=float, default=120, help="seconds in which requests arrive (%(default)s)")
    add("--single", type=int, default=10, help="requests that are sent one after another (%(default)s)")
    add("--compare_batches", type=int, nargs="+", help="measure the capacity with these sizes of batches instead")
    add("--soak_minutes", type=int, default=0, help="measure the memory for so many minutes instead")
    add("--seed", type=int, default=0, help="seed of the prompts and the times (%(default)s)")
    add("--json", type=Path, default=None, help="append the measurement to this file")
    add("--debug", action="store_true", help="show a traceback on errors")
    return guarded(_run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
