"""Measure the latency of `sdonnx serve` under load, its memory over time, or the gain of its batches.

python scripts/load_test.py -m shapes-cpu --json docs/results/serve-load-cpu.json
python scripts/load_test.py -m shapes-cpu --soak_minutes 60 --json docs/results/serve-soak-cpu.json
python scripts/load_test.py -m fast --compare_batching 1 4 8 --json serve-batching.json

The script starts the server on 127.0.0.1. It measures the capacity with clients that each wait for their answer, then
sends requests at random times (a Poisson process) at a share of the capacity. The latency of a request counts from the
time at which it was due, so that a slow server cannot hide its queue by delaying the clients.

--compare_batching starts a server for each largest batch, one after another. For each it measures

- the seconds from the start of the process until it prints that it is ready, with the folder in the page cache and a
  verdict on the kernels;
- the capacity, in images of PNG answers, with the same number of clients, prompts and steps;
- requests that are sent one at a time, each followed by the same image with `OrtDiffusionPipeline` in this process and
  by its PNG in base64. The latency that HTTP and the queue add is the median time of the requests without the medians
  of the other two. It contains the wait for companions, which a server with the largest batch 1 does not have.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import http.client
import io
import json
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from sdonnx.benchmark.files import append_json, check_writable
from sdonnx.benchmark.record import environment
from sdonnx.errors import OptionError, SdonnxError
from sdonnx.folder.version import read_report
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.kernel_workarounds import check_now
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.serve.http.image_encoding import QUALITY, encode_base64
from sdonnx.serve.serve_limits import ServeLimits
from sdonnx.terminal import console, guarded

_CLIENTS = 16  # enough to fill the batch that runs and those that wait
_TIMEOUT_S = 300.0
_STOP_S = 60.0
_MEGABYTE = 1024 * 1024
_WARM_UPS = 2  # requests that are not counted before those that are sent one at a time
_PATH = "/v1/images/generations"
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

P = ParamSpec("P")
Found = TypeVar("Found")


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
def _server(options: argparse.Namespace, *more: str) -> Iterator[Server]:
    """Start a server with more options and yield it; it stops at the end."""
    sizes = [] if options.size is None else ["--warmup", options.size]
    command = [sys.executable, "-m", "sdonnx", "serve", "-m", options.model, "--port", "0", *sizes, *more]
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            line = next((each for each in lines if each.startswith(_READY)), None)
            if line is None:
                raise SdonnxError("the server did not start", "an optimized folder", "read its message above")
            yield Server(line.removeprefix(_READY).partition(",")[0], round(time.monotonic() - begin, 3))
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()


class Load:
    """Requests to a server.

    Args:
        client: a client of its address.
        common: fields of each request, without the prompt.
        seed: seed of the prompts and the times.
    """

    def __init__(self, client: httpx.AsyncClient, common: Mapping[str, Any], seed: int) -> None:
        self._client, self._common, self._random = client, common, random.Random(seed)

    async def _send(self, answers: Answers, due: float, **fields: Any) -> None:
        body = {"prompt": self._random.choice(_PROMPTS), **self._common, **fields}
        response = await self._client.post(_PATH, json=body)
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
        yield Load(client, _common_fields(options), options.seed)


def _common_fields(options: argparse.Namespace) -> dict[str, Any]:
    size = {} if options.size is None else {"size": options.size}
    return {"num_inference_steps": options.steps, **size}


def _measure_latency(options: argparse.Namespace) -> dict[str, Any]:
    with _server(options) as server:
        return asyncio.run(_latency(server.url, options))


async def _latency(url: str, options: argparse.Namespace) -> dict[str, Any]:
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


def _measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    with _server(options) as server:
        return asyncio.run(_memory(server.url, options))


async def _memory(url: str, options: argparse.Namespace) -> dict[str, Any]:
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


def _measure_batching(options: argparse.Namespace) -> dict[str, Any]:
    report = read_report(Path(options.model))
    check_now(device_for(str(report["provider"])))  # a verdict, so that no server checks the kernels while it is timed
    with OrtDiffusionPipeline.from_pretrained(options.model) as pipeline:
        pipeline.set_progress_bar_config(disable=True)
        _read_files(Path(options.model))
        servers = [_measure_server(size, pipeline, options) for size in options.compare_batching]
        width, height = _pixels(options) or (pipeline.default_size, pipeline.default_size)
    for server in servers:
        server["ratio"] = round(server["capacity_per_s"] / servers[0]["capacity_per_s"], 3)
    about = {name: report[name] for name in ("family", "provider", "precision")}
    return {
        "model": {"name": Path(options.model).resolve().name, **about},
        "size": f"{width}x{height}",
        "clients_at_capacity": _CLIENTS,
        "batch_wait_ms": ServeLimits().batch_wait_ms,
        "servers": servers,
    }


def _measure_server(max_batch_size: int, pipeline: OrtDiffusionPipeline, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a server with a largest batch: its start, capacity, and the latency of single requests."""
    more = ["--max_batch_size", str(max_batch_size)]
    ready = []
    for _ in range(options.starts - 1):
        with _server(options, *more) as server:
            ready.append(server.ready_s)
    with _server(options, *more) as server:
        ready.append(server.ready_s)
        console().print(f"largest batch {max_batch_size}: ready after {ready} s", markup=False)
        alone = _one_at_a_time(server.url, pipeline, options)
        capacity = asyncio.run(_capacity(server.url, options))
    return {"max_batch_size": max_batch_size, "ready_s": ready, **capacity, "one_at_a_time": alone}


async def _capacity(url: str, options: argparse.Namespace) -> dict[str, Any]:
    async with _load(url, options) as load:
        await load.fill(options.warmup_s)
        before = _histograms(url)
        capacity, full = await load.fill(options.capacity_s)
        means = _means(before, _histograms(url))
    return {"capacity_per_s": round(capacity, 3), "images_per_batch": means.pop("images"), "at_capacity": full.record()}


def _one_at_a_time(url: str, pipeline: OrtDiffusionPipeline, options: argparse.Namespace) -> dict[str, Any]:
    """Time requests one after another, and the same images and their PNG files in this process."""
    times: dict[str, list[float]] = {"http_s": [], "pipeline_s": [], "png_s": []}
    difference, before = 0, {}
    width, height = _pixels(options) or (None, None)
    # httpx takes milliseconds to read a megabyte.
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)) as connection:
        for seed in range(-_WARM_UPS, options.single):
            if seed == 0:
                times, before = {name: [] for name in times}, _histograms(url)
            asked = {"prompt": _PROMPTS[seed % len(_PROMPTS)], "seed": seed % options.single}
            body = {**asked, **_common_fields(options)}
            # Alternately, so that both have the same clocks of the device and the same load of the machine.
            answer = _timed(times["http_s"], _answer, connection, body)
            call = {**asked, "height": height, "width": width, "num_inference_steps": options.steps}
            image = _timed(times["pipeline_s"], pipeline, **call).images[0]
            _timed(times["png_s"], encode_base64, image, "png", QUALITY)
            difference = max(difference, _difference(answer, image))
        means = _means(before, _histograms(url))
    asked_s, direct_s, png_s = (float(np.median(each)) for each in times.values())
    return {
        "requests": options.single,
        **{name: _spread(each) for name, each in times.items()},
        "added_ms": round((asked_s - direct_s - png_s) * 1e3, 2),
        "added_with_png_ms": round((asked_s - direct_s) * 1e3, 2),
        "max_difference_of_255": difference,
        "server_mean_s": {name: mean for name, mean in means.items() if name != "images"},
    }


def _timed(times: list[float], call: Callable[P, Found], *args: P.args, **options: P.kwargs) -> Found:
    """Return the result of a call, and append its seconds to `times`."""
    begin = time.perf_counter()
    found = call(*args, **options)
    times.append(time.perf_counter() - begin)
    return found


def _spread(times: Sequence[float]) -> dict[str, float]:
    return {name: round(float(each(times)), 5) for name, each in (("median", np.median), ("min", min), ("max", max))}


def _answer(connection: http.client.HTTPConnection, body: Mapping[str, Any]) -> bytes:
    connection.request("POST", _PATH, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    if response.status != httpx.codes.OK:
        raise SdonnxError(f"an answer has status {response.status}", "200", f"see {content[:200]!r}")
    return content


def _difference(answer: bytes, image: Image.Image) -> int:
    """Return the largest difference of a pixel between an answer and an image, of 255 levels."""
    answered = Image.open(io.BytesIO(base64.b64decode(json.loads(answer)["data"][0]["b64_json"])))
    return int(np.abs(np.asarray(answered).astype(int) - np.asarray(image).astype(int)).max())


def _histograms(url: str) -> dict[str, tuple[float, float]]:
    """Return the sum and the count of a server's histograms: images of a batch, seconds of the queue and of stages."""
    names = {"sdonnx_batch_images": "images", "sdonnx_queue_seconds": "queue", "sdonnx_stage_seconds": None}
    found: dict[str, tuple[float, float]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        if family.name not in names:
            continue
        sums, counts = (
            {names[family.name] or each.labels["stage"]: each.value for each in family.samples if each.name == name}
            for name in (f"{family.name}_sum", f"{family.name}_count")
        )
        found |= {name: (total, counts[name]) for name, total in sums.items()}
    return found


def _means(before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the mean of each histogram's values between two readings."""
    means = {}
    for name, (total, count) in after.items():
        earlier, fewer = before.get(name, (0.0, 0.0))
        if count > fewer:
            means[name] = round((total - earlier) / (count - fewer), 5)
    return means


def _pixels(options: argparse.Namespace) -> tuple[int, int] | None:
    """Return the width and the height of the option --size; None for the model's own."""
    if options.size is None:
        return None
    width, _, height = options.size.partition("x")
    return int(width), int(height)


def _read_files(folder: Path) -> None:
    """Read all files of a folder, so that they are in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(16 * _MEGABYTE):
                    pass


def _check_options(options: argparse.Namespace) -> None:
    if not 0 < options.share < 1:
        raise OptionError(f"--share is {options.share:g}", "a number between 0 and 1", "pass for example 0.8")
    if options.size is not None and not re.fullmatch(r"[0-9]+x[0-9]+", options.size):
        raise OptionError(f"--size is {options.size!r}", "WIDTHxHEIGHT", "pass for example 512x512")
    for name in ("single", "starts"):
        if getattr(options, name) < 1:
            raise OptionError(f"--{name} is {getattr(options, name)}", "a number from 1 on", "pass another number")
    if options.compare_batching and options.soak_minutes:
        raise OptionError("--compare_batching with --soak_minutes", "one of them", "leave out one")
    if options.json is not None:
        check_writable(options.json)


def _run(options: argparse.Namespace) -> int:
    _check_options(options)
    kind, measure = "serve load", _measure_latency
    if options.compare_batching:
        kind, measure = "serve batching", _measure_batching
    elif options.soak_minutes:
        kind, measure = "serve soak", _measure_memory
    surroundings = environment()
    found = measure(options)
    record = {
        "benchmark": kind,
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
    parser = argparse.ArgumentParser(description="Measure a server's latency, memory or batches.")
    add = parser.add_argument
    add("-m", "--model", required=True, help="optimized folder")
    add("--share", type=float, default=0.8, help="share of the capacity at which requests arrive (%(default)s)")
    add("--steps", type=int, default=20, help="denoising steps of a request (%(default)s)")
    add("--warmup_s", type=float, default=5, help="seconds before the capacity is measured (%(default)s)")
    add("--capacity_s", type=float, default=20, help="seconds to measure the capacity (%(default)s)")
    add("--seconds", type=float, default=120, help="seconds in which requests arrive (%(default)s)")
    add("--single", type=int, default=10, help="requests that are sent one after another (%(default)s)")
    add("--size", default=None, metavar="WxH", help="size of the images (default: the model's own)")
    batches = "measure servers with these largest batches instead, the first for comparison; for example 1 4 8"
    add("--compare_batching", type=int, nargs="+", default=None, metavar="N", help=batches)
    add("--starts", type=int, default=2, help="with --compare_batching: starts of each server (%(default)s)")
    add("--soak_minutes", type=int, default=0, help="measure the memory for so many minutes instead")
    add("--seed", type=int, default=0, help="seed of the prompts and the times (%(default)s)")
    add("--json", type=Path, default=None, help="append the measurement to this file")
    add("--debug", action="store_true", help="show a traceback on errors")
    return guarded(_run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
