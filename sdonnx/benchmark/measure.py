"""How an engine is timed: wall clock around whole runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdonnx.benchmark.engine import Engine, Workload
from sdonnx.benchmark.memory import PeakMemory, memory_source

__all__ = ["PROMPTS", "WARM_UPS", "Measurement", "measure_engine"]

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

_WARM_UP_PROMPT = "warm up"


@dataclass(frozen=True)
class Measurement:
    """What was measured of one engine.

    Attributes:
        load_s: importing the library, reading the weights, putting them on the device.
        warm_up_s: each run before the clock counts; the first captures, compiles or searches. Empty where
            the warm-up was skipped.
        latencies_s: each timed run, by prompt and then by repetition.
        peak_bytes: the highest memory in each run, warm-up runs first.
        memory_kind: what was counted there.
        denoiser_calls: in each run.
    """

    load_s: float
    warm_up_s: tuple[float, ...]
    latencies_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    memory_kind: str
    denoiser_calls: int

    @property
    def first_image_s(self) -> float:
        """From the start of loading to the first image."""
        return self.load_s + (*self.warm_up_s, *self.latencies_s)[0]

    @property
    def average_s(self) -> float:
        """The mean of the timed runs."""
        return statistics.fmean(self.latencies_s)

    @property
    def median_s(self) -> float:
        """The median of the timed runs."""
        return statistics.median(self.latencies_s)

    @property
    def first_run_bytes(self) -> int:
        """The peak in the very first run."""
        return self.peak_bytes[0]

    @property
    def second_run_bytes(self) -> int:
        """The peak over the timed runs."""
        return max(self.peak_bytes[len(self.warm_up_s) :])


def measure_engine(
    engine: Engine,
    workload: Workload,
    prompts: Sequence[str],
    batch_count: int,
    *,
    warm_ups: int = WARM_UPS,
    told: Callable[[str], None] = lambda text: None,
) -> Measurement:
    """Load an engine and time it.

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
    engine.load()
    load_s = time.perf_counter() - start
    told(f"{engine.name}: loaded in {load_s:.2f} s")
    seconds: list[float] = []
    peaks: list[int] = []
    runs = [prompt for prompt in prompts for _ in range(batch_count)]
    for index, prompt in enumerate([_WARM_UP_PROMPT] * warm_ups + runs):
        with PeakMemory(source) as memory:
            start = time.perf_counter()
            engine.draw(prompt, workload)
            seconds.append(time.perf_counter() - start)
        peaks.append(memory.peak_bytes)
        what = (
            f"warm-up {index + 1} of {warm_ups}" if index < warm_ups else f"run {index - warm_ups + 1} of {len(runs)}"
        )
        told(f"{engine.name}: {what}: {seconds[-1]:.3f} s")
    return Measurement(
        load_s,
        tuple(seconds[:warm_ups]),
        tuple(seconds[warm_ups:]),
        tuple(peaks),
        source.kind,
        engine.denoiser_calls(workload.steps),
    )
