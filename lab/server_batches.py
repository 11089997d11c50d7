"""The gain of a server's batches, and the time that it adds to an image: `load_test.py --compare_batching`."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import http.client
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import httpx
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from server_load import CLIENTS, PATH, PROMPTS, TIMEOUT_S, common_fields, described, load_of, read_files, started_server

from sdonnx.errors import SdonnxError
from sdonnx.folder.folder_version import read_report
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.serve.http.responses import QUALITY, encode_base64
from sdonnx.terminal import console

_WARM_UPS = 2  # requests that are not counted before those that are sent one at a time
_STAGES = ("denoise", "decode", "encode_file")

P = ParamSpec("P")
Found = TypeVar("Found")


def measure_batching(options: argparse.Namespace) -> dict[str, Any]:
    """Measure servers with different largest batches.

    Args:
        options: options of load_test.py; `compare_batching` has the numbers.

    Returns:
        For each number, seconds until the server was ready, images a second and their ratio to the first server, and
        the time of requests one after another.

    Raises:
        SdonnxError: the folder cannot be read, a server does not start, or a request is not answered with 200.
    """
    report = read_report(Path(options.model))
    with OrtDiffusionPipeline.from_pretrained(options.model) as pipeline:
        pipeline.set_progress_bar_config(disable=True)
        read_files(Path(options.model))
        servers = [_measure_server(size, pipeline, options) for size in options.compare_batching]
        width, height = _pixels(options) or (pipeline.default_size, pipeline.default_size)
    for server in servers:
        server["ratio"] = round(server["capacity_per_s"] / servers[0]["capacity_per_s"], 3)
    return {
        "model": described(Path(options.model), report),
        "size": f"{width}x{height}",
        "clients_at_capacity": CLIENTS,
        "batch_wait_ms": options.batch_wait_ms,
        "servers": servers,
    }


def _measure_server(max_batch_size: int, pipeline: OrtDiffusionPipeline, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a server with a largest batch: its start, capacity, and the latency of single requests."""
    more = ["--max_batch_size", str(max_batch_size), "--batch_wait_ms", str(options.batch_wait_ms)]
    ready = []
    for _ in range(options.starts - 1):
        with started_server(options, *more) as server:
            ready.append(server.ready_s)
    with started_server(options, *more) as server:
        ready.append(server.ready_s)
        console().print(f"largest batch {max_batch_size}: ready after {ready} s", markup=False)
        alone = _one_at_a_time(server.url, pipeline, options)
        capacity = asyncio.run(_capacity(server.url, options))
    return {"max_batch_size": max_batch_size, "ready_s": ready, **capacity, "one_at_a_time": alone}


async def _capacity(url: str, options: argparse.Namespace) -> dict[str, Any]:
    async with load_of(url, options) as load:
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
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)) as connection:
        for seed in range(-_WARM_UPS, options.single):
            if seed == 0:
                times, before = {name: [] for name in times}, _histograms(url)
            asked = {"prompt": PROMPTS[seed % len(PROMPTS)], "seed": seed % options.single}
            body = {**asked, **common_fields(options)}
            # Alternately, so that both have the same clocks of the device and the same load of the machine.
            answer = _timed(times["http_s"], _answer, connection, body)
            call = {**asked, "height": height, "width": width, "num_inference_steps": options.steps}
            image = _timed(times["pipeline_s"], pipeline, **call).images[0]
            _timed(times["png_s"], encode_base64, image, "png", QUALITY)
            difference = max(difference, _difference(answer, image))
        means = _means(before, _histograms(url))
    asked_s, direct_s, png_s = (float(np.median(each)) for each in times.values())
    # The server's own stages exclude differences between the two processes, such as the time of a PNG file.
    beside_stages_s = float(np.mean(times["http_s"])) - sum(means[name] for name in _STAGES)
    return {
        "requests": options.single,
        **{name: _spread(each) for name, each in times.items()},
        "added_ms": round((asked_s - direct_s - png_s) * 1e3, 2),
        "added_with_png_ms": round((asked_s - direct_s) * 1e3, 2),
        "beside_stages_ms": round(beside_stages_s * 1e3, 2),
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
    connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
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
