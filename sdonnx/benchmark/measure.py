"""Time an engine: wall clock around whole runs, in a process that contains only this engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sdonnx.benchmark.engine import Engine
from sdonnx.benchmark.extra_results import Resolution
from sdonnx.benchmark.memory import PeakMemory, host_peak_bytes, memory_source
from sdonnx.benchmark.operator_times import kernel_times_by_kind, trace_kernels
from sdonnx.benchmark.results import Round, quantile
from sdonnx.metrics import MIN_PSNR_DB, psnr
from sdonnx.reference.workload import Workload

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "RARE_RESOLUTIONS",
    "RESOLUTIONS",
    "SCALES",
    "WARM_UPS",
    "differs",
    "measure_kernels",
    "measure_resolutions",
    "measure_round",
    "measure_start",
    "measure_throughput",
    "rare_sizes",
    "step_counts",
    "visited_sizes",
]

WARM_UPS = 3
"""Number of warm-up runs, as in ONNX Runtime's benchmark.py. torch's reduce-overhead needs all of them for the image
decoder, which runs once per image: it compiles, captures and then replays."""

RESOLUTIONS = ((4, 4), (3, 4), (4, 3), (5, 4), (2, 4), (5, 5))
"""Sizes of `--run_multiple_resolutions`, in quarters of the requested height and width; the first is that size."""

RARE_RESOLUTIONS = ((520, 1032), (544, 408), (408, 208), (208, 1048))
"""Sizes of `--run_rare_resolutions`, (height, width): odd multiples of 8, and 544x408 of OneDiff's examples."""

SCALES = (0.1, 0.5, 0.9)
"""Adapter scales of `--run_multiple_resolutions`. A change is expensive for compilers that treat it as a constant."""

_WARM_UP_PROMPT = "warm up"

OnProgress = Callable[[str], None]


def measure_round(
    engine: Engine,
    workload: Workload,
    prompts: Sequence[str],
    batch_count: int,
    *,
    warm_ups: int = WARM_UPS,
    on_progress: OnProgress = lambda text: None,
) -> tuple[Round, list[Image], str | None]:
    """Load an engine, time it, and return the measurement, its images of each prompt, and a fault of the images.

    The time covers the whole call, from the prompt to images in host memory. The timed runs are not monitored: memory
    and clocks are read in the other runs. Between the timed runs the images are compared with the first images of the
    same prompt, which have the same seed.

    Args:
        engine: an engine that is not loaded.
        workload: the workload.
        prompts: the prompts, at least one.
        batch_count: timed runs of each prompt.
        warm_ups: number of warm-up runs.
        on_progress: callback for the time of each run, called between runs.

    Raises:
        SdonnxError: the engine cannot be loaded, or memory cannot be measured on this machine.
    """
    source = memory_source(engine.device)
    start = time.perf_counter()
    engine.load(workload)
    load_s = time.perf_counter() - start
    on_progress(f"loaded in {load_s:.2f} s")
    seconds: list[float] = []
    peaks: list[int] = []
    clocks: list[int] = []
    fault: str | None = None

    def monitored(prompt: str) -> list[Image]:
        with PeakMemory(source, engine.device) as memory:
            images = timed(prompt)
        peaks.append(memory.peak_bytes)
        clocks.extend(memory.clocks_mhz)
        return images

    def timed(prompt: str) -> list[Image]:
        start = time.perf_counter()
        images = engine.generate(prompt, workload)
        seconds.append(time.perf_counter() - start)
        return images

    for index in range(warm_ups):
        monitored(_WARM_UP_PROMPT)
        on_progress(f"warm-up {index + 1} of {warm_ups}: {seconds[-1]:.3f} s")
    engine.after_warm_up()
    first: dict[str, list[Image]] = {}
    runs = [prompt for prompt in prompts for _ in range(batch_count)]
    for index, prompt in enumerate(runs):
        # Without a warm-up the first timed run is monitored, because its memory is reported.
        images = timed(prompt) if peaks else monitored(prompt)
        on_progress(f"run {index + 1} of {len(runs)}: {seconds[-1]:.3f} s")
        if fault is None and differs(images, first.setdefault(prompt, images)):
            fault = f"run {index + 1} generated another image than the first run of the same prompt and seed"
    latencies = tuple(seconds[warm_ups:])
    monitored(prompts[0])
    measured = Round(
        load_s,
        tuple(seconds[:warm_ups]),
        latencies,
        tuple(peaks),
        source.kind,
        engine.allocator_bytes(),
        host_peak_bytes(),
        _range_of(clocks),
        pipeline_load_s=engine.pipeline_load_s,
    )
    return measured, [image for prompt in prompts for image in first[prompt]], fault


def measure_start(engine: Engine, workload: Workload) -> tuple[float, float | None]:
    """Load an engine, generate the first images, and return the seconds, also those of loading diffusers' pipeline."""
    start = time.perf_counter()
    engine.load(workload)
    engine.generate(_WARM_UP_PROMPT, workload)
    return time.perf_counter() - start, engine.pipeline_load_s


def differs(images: Sequence[Image], others: Sequence[Image]) -> bool:
    """Return whether images of the same prompt and seed differ: their PSNR is below `MIN_PSNR_DB`."""
    one, other = (np.stack([np.asarray(image, np.float32) for image in each]) / 255 for each in (images, others))
    return one.shape != other.shape or psnr(one, other) < MIN_PSNR_DB


def _range_of(clocks: Sequence[int]) -> tuple[int, ...]:
    return (min(clocks), round(quantile(clocks, 0.5)), max(clocks)) if clocks else ()


def step_counts(maximum: int) -> list[int]:
    """Return the step counts of `--throughput`: five, evenly spaced from a fifth of the maximum to the maximum.

    Raises:
        ValueError: there are fewer than two different counts.
    """
    counts = sorted({max(1, round(maximum * share / 5)) for share in range(1, 6)})
    if len(counts) < 2:
        raise ValueError(f"{maximum} steps are too few to fit a line")
    return counts


def measure_throughput(
    engine: Engine, workload: Workload, prompt: str, batch_count: int, on_progress: OnProgress
) -> list[tuple[int, float]]:
    """Load an engine and return (steps, median latency in seconds), with one warm-up run for each step count."""
    engine.load(workload)
    points: list[tuple[int, float]] = []
    for _ in range(WARM_UPS):
        engine.generate(prompt, workload)
    for steps in step_counts(workload.steps):
        fewer = replace(workload, steps=steps)
        engine.generate(prompt, fewer)
        seconds = [_timed(engine, prompt, fewer) for _ in range(batch_count)]
        points.append((steps, quantile(seconds, 0.5)))
        on_progress(f"{steps} steps: {points[-1][1]:.3f} s")
    return points


def visited_sizes(workload: Workload, multiple: int) -> list[tuple[int, int]]:
    """Return the sizes (height, width) of `--run_multiple_resolutions`, starting with the workload's."""

    def part(pixels: int, quarters: int) -> int:
        return max(multiple, round(pixels * quarters / 4 / multiple) * multiple)

    sizes = [(part(workload.height, height), part(workload.width, width)) for height, width in RESOLUTIONS]
    return list(dict.fromkeys(sizes))


def rare_sizes(multiple: int) -> list[tuple[int, int]]:
    """Return the sizes (height, width) of `--run_rare_resolutions`, rounded up to a multiple of pixels."""
    return [
        (math.ceil(height / multiple) * multiple, math.ceil(width / multiple) * multiple)
        for height, width in RARE_RESOLUTIONS
    ]


def measure_resolutions(
    engine: Engine, workload: Workload, prompt: str, sizes: Sequence[tuple[int, int]], on_progress: OnProgress
) -> list[Resolution]:
    """Load an engine, warm it up at the first size, and time the first images of every size.

    With image-prompt adapters it then returns to the first size and changes their scale.

    Args:
        engine: an engine that is not loaded.
        workload: the workload.
        prompt: the prompt.
        sizes: height and width of the images in pixels.
        on_progress: callback for the times of each size.
    """
    engine.load(workload)
    visited = []
    visits: list[tuple[Workload, float | None]] = []
    visits += [(replace(workload, height=height, width=width), None) for height, width in sizes]
    warm = visits[0][0]
    if workload.ip_adapter_scale is not None:
        visits += [(replace(warm, ip_adapter_scale=scale), scale) for scale in SCALES]
    for _ in range(WARM_UPS):
        engine.generate(prompt, warm)
    for current, scale in visits:
        first, second, *later = [_timed(engine, prompt, current) for _ in range(5)]
        visited.append(Resolution(current.height, current.width, first, second, min(later), scale))
        on_progress(f"{visited[-1].title}: first {first:.3f} s, second {second:.3f} s, then {min(later):.3f} s")
    return visited


def measure_kernels(engine: Engine, workload: Workload, prompt: str) -> tuple[dict[str, float], int, str]:
    """Load an engine on a GPU, warm it up, and generate an image under torch's profiler.

    Returns:
        GPU time in ms by kind of kernel, the number of launches, and the profiler.
    """
    engine.load(workload)
    for _ in range(WARM_UPS):
        engine.generate(prompt, workload)
    kernels = trace_kernels(lambda: engine.generate(prompt, workload))
    return kernel_times_by_kind(kernels), len(kernels), "torch.profiler (CUPTI)"


def _timed(engine: Engine, prompt: str, workload: Workload) -> float:
    start = time.perf_counter()
    engine.generate(prompt, workload)
    return time.perf_counter() - start
