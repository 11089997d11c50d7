"""How an engine is timed: wall clock around whole runs, in a process that holds this engine alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sdonnx.benchmark.engine import Engine
from sdonnx.benchmark.memory import PeakMemory, host_peak_bytes, memory_source
from sdonnx.benchmark.results import LEAST_PSNR_DB, Resolution, Round, Workload
from sdonnx.benchmark.statistics import quantile
from sdonnx.parity import psnr

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "RESOLUTIONS",
    "SCALES",
    "WARM_UPS",
    "differs",
    "measure_kernels",
    "measure_resolutions",
    "measure_round",
    "measure_throughput",
    "step_counts",
    "visited_sizes",
]

WARM_UPS = 3
"""Runs before the clock counts, as many as ONNX Runtime's benchmark.py has. torch's reduce-overhead needs
them all for the image decoder, which runs once an image: it compiles, records, and then replays."""

RESOLUTIONS = ((4, 4), (3, 4), (4, 3), (5, 4), (2, 4), (5, 5))
"""What `--run_multiple_resolutions` visits: quarters (of the height, of the width) of the asked size, itself first."""

SCALES = (0.1, 0.5, 0.9)
"""Weights of IP-Adapters that it goes through then: changes that cost a compiler that writes them into its code."""

_WARM_UP_PROMPT = "warm up"

Told = Callable[[str], None]


def measure_round(
    engine: Engine,
    workload: Workload,
    prompts: Sequence[str],
    batch_count: int,
    *,
    warm_ups: int = WARM_UPS,
    told: Told = lambda text: None,
) -> tuple[Round, list[Image], str | None]:
    """Load an engine, time it, and return what was measured, its images of each prompt, and what is wrong with them.

    The clock runs around the whole call, from the words to images in the host's memory. Nothing watches the timed
    runs: memory and clocks are read in the others. Between the timed runs images are compared with the first ones of
    their prompt, which have the same seed.

    Args:
        engine: not loaded yet.
        workload: what one run draws.
        prompts: what to draw, one at least.
        batch_count: how often each.
        warm_ups: runs before the clock counts.
        told: told what was measured, between runs.

    Raises:
        SdonnxError: the engine cannot be loaded, or memory cannot be measured here.
    """
    source = memory_source(engine.device)
    start = time.perf_counter()
    engine.load(workload)
    load_s = time.perf_counter() - start
    told(f"loaded in {load_s:.2f} s")
    seconds: list[float] = []
    peaks: list[int] = []
    clocks: list[int] = []
    fault: str | None = None

    def watched(prompt: str) -> list[Image]:
        with PeakMemory(source, engine.device) as memory:
            drawn = timed(prompt)
        peaks.append(memory.peak_bytes)
        clocks.extend(memory.clocks_mhz)
        return drawn

    def timed(prompt: str) -> list[Image]:
        start = time.perf_counter()
        drawn = engine.draw(prompt, workload)
        seconds.append(time.perf_counter() - start)
        return drawn

    for index in range(warm_ups):
        watched(_WARM_UP_PROMPT)
        told(f"warm-up {index + 1} of {warm_ups}: {seconds[-1]:.3f} s")
    engine.warmed_up()
    first: dict[str, list[Image]] = {}
    runs = [prompt for prompt in prompts for _ in range(batch_count)]
    for index, prompt in enumerate(runs):
        # Without a warm-up this is the first run of all, whose memory is wanted.
        drawn = timed(prompt) if peaks else watched(prompt)
        told(f"run {index + 1} of {len(runs)}: {seconds[-1]:.3f} s")
        if fault is None and differs(drawn, first.setdefault(prompt, drawn)):
            fault = f"run {index + 1} drew another image than the first of the same prompt and seed"
    latencies = tuple(seconds[warm_ups:])
    watched(prompts[0])
    measured = Round(
        load_s,
        tuple(seconds[:warm_ups]),
        latencies,
        tuple(peaks),
        source.kind,
        engine.allocator_bytes(),
        host_peak_bytes(),
        _range_of(clocks),
    )
    return measured, [image for prompt in prompts for image in first[prompt]], fault


def differs(images: Sequence[Image], others: Sequence[Image]) -> bool:
    """Tell whether images are others than those of the same prompt and seed: below `LEAST_PSNR_DB`."""
    one, other = (np.stack([np.asarray(image, np.float32) for image in each]) / 255 for each in (images, others))
    return one.shape != other.shape or psnr(one, other) < LEAST_PSNR_DB


def _range_of(clocks: Sequence[int]) -> tuple[int, ...]:
    return (min(clocks), round(quantile(clocks, 0.5)), max(clocks)) if clocks else ()


def step_counts(most: int) -> list[int]:
    """Return the numbers of steps that `--throughput` draws with: five from a fifth of the most on, evenly spaced.

    Raises:
        ValueError: there is one number alone.
    """
    counts = sorted({max(1, round(most * share / 5)) for share in range(1, 6)})
    if len(counts) < 2:
        raise ValueError(f"{most} steps allow no line")
    return counts


def measure_throughput(
    engine: Engine, workload: Workload, prompt: str, batch_count: int, told: Told
) -> list[tuple[int, float]]:
    """Load an engine and return (steps, median latency in seconds); each number is warmed up by one run."""
    engine.load(workload)
    points: list[tuple[int, float]] = []
    for _ in range(WARM_UPS):
        engine.draw(prompt, workload)
    for steps in step_counts(workload.steps):
        fewer = replace(workload, steps=steps)
        engine.draw(prompt, fewer)
        seconds = [_timed(engine, prompt, fewer) for _ in range(batch_count)]
        points.append((steps, quantile(seconds, 0.5)))
        told(f"{steps} steps: {points[-1][1]:.3f} s")
    return points


def visited_sizes(workload: Workload, multiple: int) -> list[tuple[int, int]]:
    """Return the sizes (height, width) that `--run_multiple_resolutions` visits: the workload's own first."""

    def part(pixels: int, quarters: int) -> int:
        return max(multiple, round(pixels * quarters / 4 / multiple) * multiple)

    sizes = [(part(workload.height, height), part(workload.width, width)) for height, width in RESOLUTIONS]
    return list(dict.fromkeys(sizes))


class Visit(NamedTuple):
    """What is drawn next by one process, and the weight of the IP-Adapters where that is what is new."""

    workload: Workload
    scale: float | None


def measure_resolutions(engine: Engine, workload: Workload, prompt: str, multiple: int, told: Told) -> list[Resolution]:
    """Load an engine, warm it up at its first size, and time the first and the second image of each other one.

    With IP-Adapters it then goes back to the first size and draws with other weights.
    """
    engine.load(workload)
    visited = []
    visits = [
        Visit(replace(workload, height=height, width=width), None)
        for height, width in visited_sizes(workload, multiple)
    ]
    if workload.ip_adapter_scale is not None:
        back = replace(workload, height=visits[0].workload.height, width=visits[0].workload.width)
        visits += [Visit(replace(back, ip_adapter_scale=scale), scale) for scale in SCALES]
    for index, (drawn, scale) in enumerate(visits):
        if index == 0:
            for _ in range(WARM_UPS):
                engine.draw(prompt, drawn)
        first, second, *later = [_timed(engine, prompt, drawn) for _ in range(5)]
        visited.append(Resolution(drawn.height, drawn.width, first, second, min(later), scale))
        told(f"{visited[-1].title}: first {first:.3f} s, second {second:.3f} s, then {min(later):.3f} s")
    return visited


def measure_kernels(engine: Engine, workload: Workload, prompt: str) -> tuple[dict[str, float], int, str]:
    """Load an engine, warm it up, and look at one image with a profiler: see `Engine.kernels`."""
    engine.load(workload)
    for _ in range(WARM_UPS):
        engine.draw(prompt, workload)
    return engine.kernels(prompt, workload)


def _timed(engine: Engine, prompt: str, workload: Workload) -> float:
    start = time.perf_counter()
    engine.draw(prompt, workload)
    return time.perf_counter() - start
