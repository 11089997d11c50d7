"""Measure the latency of `sdonnx serve` under load, its memory over time, or the gain of batches or of replicas.

python lab/load_test.py -m shapes-cpu --json docs/results/serve-load-cpu.json
python lab/load_test.py -m shapes-cpu --soak_minutes 60 --json docs/results/serve-soak-cpu.json
python lab/load_test.py -m fast --compare_batching 1 4 8 --json serve-batching.json
python lab/load_test.py -m fast --compare_replicas 1 2 --json serve-replicas.json

The script starts the server on 127.0.0.1. It measures the capacity with clients that each wait for their answer, then
sends requests at random times (a Poisson process) at a share of the capacity. The latency of a request counts from the
time at which it was due, so that a slow server cannot hide its queue by delaying the clients.

--compare_batching starts a server for each largest batch, one after another. For each it measures

- the seconds from the start of the process until it prints that it is ready, with the folder in the page cache;
- the capacity, in images of PNG answers, with the same number of clients, prompts and steps;
- requests that are sent one at a time, each followed by the same image with `OrtDiffusionPipeline` in this process and
  by its PNG in base64. The latency that HTTP and the queue add is the median time of the requests minus the medians
  of the other two (`added_ms`), or their mean time minus the means of the server's own stages (`beside_stages_ms`). It
  contains the wait for companions, which a server with the largest batch 1 does not have.

--compare_replicas starts `sdonnx serve --ray` for each number of replicas, and measures the seconds until it is ready,
Ray's own start included, and the capacity, with 16 clients for each replica.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from server_batches import measure_batching
from server_load import CLIENTS, Answers, load_of, started_server
from server_replicas import measure_replicas

from sdonnx.benchmark.files import append_json, check_writable
from sdonnx.environment_record import environment
from sdonnx.errors import OptionError
from sdonnx.serve.serve_settings import ServeLimits
from sdonnx.terminal import console, guarded

_SOAK_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"guidance_scale": 1.0},
    {"scheduler": "euler_a"},
    {"n": 2},
    {"stream": True},
)


def _measure_latency(options: argparse.Namespace) -> dict[str, Any]:
    with started_server(options) as server:
        return asyncio.run(_latency(server.url, options))


async def _latency(url: str, options: argparse.Namespace) -> dict[str, Any]:
    async with load_of(url, options) as load:
        await load.fill(options.warmup_s)
        capacity, full = await load.fill(options.capacity_s)
        rate = options.share * capacity
        answers = await load.arrive(rate, options.seconds)
        alone = Answers()
        for _ in range(options.single):
            await load.send(alone, time.monotonic())
    return {
        "capacity_per_s": round(capacity, 3),
        "clients_at_capacity": CLIENTS,
        "at_capacity": full.record(),
        "share": options.share,
        "rate_per_s": round(rate, 3),
        "seconds": options.seconds,
        "arriving": answers.record(),
        "one_after_another": alone.record(),
    }


def _measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    with started_server(options) as server:
        return asyncio.run(_memory(server.url, options))


async def _memory(url: str, options: argparse.Namespace) -> dict[str, Any]:
    minutes: list[dict[str, Any]] = []
    async with load_of(url, options) as load:
        await load.fill(options.warmup_s, _SOAK_KINDS)
        capacity, _ = await load.fill(options.capacity_s, _SOAK_KINDS)  # kinds share fewer batches than equal requests
        first = await load.resident_mb()
        for minute in range(1, options.soak_minutes + 1):
            answers = await load.arrive(options.share * capacity, 60, _SOAK_KINDS)
            resident = await load.resident_mb()
            minutes.append({"minute": minute, "resident_mb": resident, "statuses": dict(answers.statuses)})
            console().print(f"minute {minute}: {resident:.1f} MB, answers {dict(answers.statuses)}", markup=False)
    return {"share": options.share, "resident_mb_at_start": first, "minutes": minutes}


def _check_options(options: argparse.Namespace) -> None:
    if not 0 < options.share < 1:
        raise OptionError(f"--share is {options.share:g}", "a number between 0 and 1", "pass for example 0.8")
    if options.size is not None and not re.fullmatch(r"[0-9]+x[0-9]+", options.size):
        raise OptionError(f"--size is {options.size!r}", "WIDTHxHEIGHT", "pass for example 512x512")
    for name in ("single", "starts"):
        if getattr(options, name) < 1:
            raise OptionError(f"--{name} is {getattr(options, name)}", "a number from 1 on", "pass another number")
    modes = [f"--{name}" for name in ("compare_batching", "compare_replicas", "soak_minutes") if getattr(options, name)]
    if len(modes) > 1:
        raise OptionError(" with ".join(modes), "one of them", "leave out the others")
    if options.compare_replicas and min(options.compare_replicas) < 1:
        raise OptionError(f"--compare_replicas has {min(options.compare_replicas)}", "numbers from 1 on", "correct it")
    if options.json is not None:
        check_writable(options.json)


def _run(options: argparse.Namespace) -> int:
    _check_options(options)
    kind, measure = "serve load", _measure_latency
    if options.compare_batching:
        kind, measure = "serve batching", measure_batching
    elif options.compare_replicas:
        kind, measure = "serve replicas", measure_replicas
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
    parser = argparse.ArgumentParser(description="Measure a server's latency, memory, batches or replicas.")
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
    replicas = (
        "measure servers on Ray with these numbers of replicas instead, the first for comparison; for example 1 2"
    )
    add("--compare_replicas", type=int, nargs="+", default=None, metavar="N", help=replicas)
    wait = "with --compare_batching: milliseconds that servers wait for a batch to fill (%(default)g)"
    add("--batch_wait_ms", type=float, default=ServeLimits().batch_wait_ms, metavar="MS", help=wait)
    add("--starts", type=int, default=2, help="with --compare_batching: starts of each server (%(default)s)")
    add("--soak_minutes", type=int, default=0, help="measure the memory for so many minutes instead")
    add("--seed", type=int, default=0, help="seed of the prompts and the times (%(default)s)")
    add("--json", type=Path, default=None, help="append the measurement to this file")
    add("--debug", action="store_true", help="show a traceback on errors")
    return guarded(_run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
