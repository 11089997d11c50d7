"""How an engine is timed: wall clock around whole runs, in a process that holds this engine alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sdonnx.benchmark.engine import Engine
from sdonnx.benchmark.memory import PeakMemory, clock_mhz, host_peak_bytes, memory_source
from sdonnx.benchmark.results import Resolution, Round, Workload
from sdonnx.benchmark.statistics import quantile

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "PROMPTS",
    "RESOLUTIONS",
    "WARM_UPS",
    "measure_kernels",
    "measure_resolutions",
    "measure_round",
    "measure_throughput",
    "step_counts",
    "visited_sizes",
]

PROMPTS = (
    "a photograph of an old lighthouse in a storm, waves breaking over the rocks",
    "a red fox asleep in fresh snow, oil painting",
    "the inside of a watchmaker's workshop, warm light, highly detailed",
    "a bowl of lemons on a blue tablecloth, still life",
    "a mountain village at dusk seen from above, lights in the windows",
    "portrait of an elderly fisherman in a yellow raincoat, 85 mm photograph",
    "a steam locomotive crossing a stone viaduct in autumn, watercolour",
    "an astronaut tending a garden in a glass dome on the moon, digital art",
    "macro photograph of a dragonfly on a blade of grass, morning dew",
    "a narrow street of bookshops after rain, reflections, film photograph",
)
"""What is drawn. Time does not depend on the words: every prompt is padded to the same length."""

WARM_UPS = 3
"""Runs before the clock counts, as many as ONNX Runtime's benchmark.py has. torch's reduce-overhead needs
them all for the image decoder, which runs once an image: it compiles, records, and then replays."""

RESOLUTIONS = ((4, 4), (3, 4), (4, 3), (5, 4), (2, 4), (5, 5))
"""What `--run_multiple_resolutions` visits: quarters (of the height, of the width) of the asked size, itself first."""

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
) -> tuple[Round, list[Image]]:
    """Load an engine, time it, and return what was measured and its images of the first prompt.

    The clock runs around the whole call, from the words to images in the host's memory.

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
    images: list[Image] = []
    runs = [prompt for prompt in prompts for _ in range(batch_count)]
    for index, prompt in enumerate([_WARM_UP_PROMPT] * warm_ups + runs):
        with PeakMemory(source) as memory:
            start = time.perf_counter()
            drawn = engine.draw(prompt, workload)
            seconds.append(time.perf_counter() - start)
        peaks.append(memory.peak_bytes)
        clocks += clock_mhz(engine.device)
        if index == warm_ups:
            images = drawn
        what = (
            f"warm-up {index + 1} of {warm_ups}" if index < warm_ups else f"run {index - warm_ups + 1} of {len(runs)}"
        )
        told(f"{what}: {seconds[-1]:.3f} s")
    measured = Round(
        load_s,
        tuple(seconds[:warm_ups]),
        tuple(seconds[warm_ups:]),
        tuple(peaks),
        source.kind,
        engine.allocator_bytes(),
        host_peak_bytes(),
        tuple(clocks),
    )
    return measured, images


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


def measure_resolutions(engine: Engine, workload: Workload, prompt: str, multiple: int, told: Told) -> list[Resolution]:
    """Load an engine, warm it up at its first size, and time the first and the second image of each other one."""
    engine.load(workload)
    visited = []
    for index, (height, width) in enumerate(visited_sizes(workload, multiple)):
        size = replace(workload, height=height, width=width)
        if index == 0:
            for _ in range(WARM_UPS):
                engine.draw(prompt, size)
        first, *later = [_timed(engine, prompt, size) for _ in range(4)]
        # A compiled engine may record in its second image as well: the best of the later ones is the warm one.
        visited.append(Resolution(height, width, first, min(later)))
        told(f"{height}x{width}: first {first:.3f} s, then {min(later):.3f} s")
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
