"""The results of a comparison: rounds, summaries and remarks for each engine and workload."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sdonnx.benchmark.extra_results import Kernels, Resolutions, Throughput
from sdonnx.reference.workload import Workload

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "OURS",
    "Agreement",
    "Comparison",
    "Result",
    "Round",
    "Stages",
    "Summary",
    "quantile",
    "shown_name",
    "summarize",
    "with_shown_names",
]

LARGE_SPREAD = 0.1
"""Spread above which a row gets a remark."""

_LARGE_START_RATIO = 1.5


@dataclass(frozen=True)
class Round:
    """One process of an engine, from its start to its last image.

    Attributes:
        load_s: import of the library, and loading of the weights onto the device.
        warm_up_s: each warm-up run; the first includes capture, compilation or kernel search. Empty if the warm-up was
            skipped.
        latencies_s: each timed run, ordered by prompt and then by repetition.
        peak_bytes: peak memory in each warm-up run (without warm-up, in the first timed run), and in an additional
            run after the timed ones, which are not monitored.
        memory_kind: the kind of memory in `peak_bytes`.
        allocator_bytes: peak memory of the library's allocator; None if unknown.
        host_peak_bytes: peak resident memory of the process.
        clocks_mhz: clock of the GPU's multiprocessors during the runs: minimum, median, maximum; empty on a CPU.
        position: position in the order of the round, starting at 0.
        cached: whether the process started with the caches that an earlier process of the engine had filled for this
            workload; False for engines that compile nothing.
        pipeline_load_s: the part of `load_s` in which diffusers' pipeline was loaded; None for engines of graphs.
    """

    load_s: float
    warm_up_s: tuple[float, ...]
    latencies_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    memory_kind: str
    allocator_bytes: int | None = None
    host_peak_bytes: int = 0
    clocks_mhz: tuple[int, ...] = ()
    position: int = 0
    cached: bool = False
    pipeline_load_s: float | None = None

    @property
    def first_image_s(self) -> float:
        """Time from the start of loading to the first image."""
        return self.load_s + (*self.warm_up_s, *self.latencies_s)[0]

    @property
    def first_run_bytes(self) -> int:
        """Peak memory in the first run."""
        return self.peak_bytes[0]

    @property
    def second_run_bytes(self) -> int:
        """Peak memory in the run after the timed ones."""
        return self.peak_bytes[-1]


@dataclass(frozen=True)
class Stages:
    """Durations of the stages of a run, measured with the device's clock.

    Attributes:
        text_ms: prompts to hidden states.
        step_ms: one denoiser call, with guidance and sampler update; Heun has two calls in a step.
        decode_ms: latents to pixels.
        iterations_per_second: denoiser calls per second, without the first call.
        denoiser_calls: number of denoiser calls in a run.
    """

    text_ms: float
    step_ms: float
    decode_ms: float
    iterations_per_second: float
    denoiser_calls: int


@dataclass(frozen=True)
class Agreement:
    """Similarity of an engine's images to `REFERENCE`, over all images of a batch.

    Attributes:
        psnr_db: peak signal-to-noise ratio; None for identical images.
        ssim: structural similarity, 1 for identical images.
        differing: share of the pixel values that differ.
        lpips: perceptual distance, 0 for identical images; None if the package lpips is missing.
    """

    psnr_db: float | None
    ssim: float
    differing: float
    lpips: float | None = None


@dataclass(frozen=True)
class Summary:
    """Statistics over the rounds of an engine.

    Latencies are over the runs of all rounds. For values that occur once in a process it is the median over the
    rounds, and for memory the maximum. `load_s`, `pipeline_load_s`, `first_image_s` and `warm_up_s` come from
    the rounds that start with empty caches.

    Attributes:
        runs: number of timed runs.
        average_s: mean latency; median_s, min_s, p90_s and p99_s are the other statistics.
        spread: (p90 - p10) / median, the relative range of the middle 80 % of the runs, which ignores single slow runs.
        load_s: time to load.
        pipeline_load_s: the part of it in which diffusers' pipeline was loaded; None for engines of graphs.
        first_image_s: time from the start of loading to the first image.
        cached_first_image_s: time from the start of loading to the first image with filled caches; None if it was not
            measured.
        cached_pipeline_load_s: the part of it in which diffusers' pipeline was loaded.
        warm_up_s: total time of the warm-up runs.
        first_run_bytes: peak memory in the first run.
        second_run_bytes: peak memory in the run after the timed ones.
        allocator_bytes: peak memory of the library's allocator; None if unknown.
        host_peak_bytes: peak resident memory.
    """

    runs: int
    average_s: float
    median_s: float
    min_s: float
    p90_s: float
    p99_s: float
    spread: float
    load_s: float
    pipeline_load_s: float | None
    first_image_s: float
    cached_first_image_s: float | None
    cached_pipeline_load_s: float | None
    warm_up_s: float
    first_run_bytes: int
    second_run_bytes: int
    allocator_bytes: int | None
    host_peak_bytes: int


@dataclass
class Result:
    """A row: one engine on one workload.

    Attributes:
        rival: title of the engine, including how it was compiled.
        workload: the workload.
        engine: name, version, device, precision, compile mode, sampler class, folder, family.
        rounds: one entry for each process.
        stages: None if they were not measured.
        agreement: None without a reference.
        flops: floating-point operations of a denoiser call; None if torch is not available to count them.
        matrix_rate: floating-point operations per second of the device's matmul, as measured.
        failure: the reason for a missing or untrusted result; None otherwise.
        unchecked: the reason for a failed reference, because of which the images were not compared.
        unstaged: the reason for missing stages.
        cached_start_s: time from the start of loading to the first image, in a process that starts with filled caches
            and measures nothing else; None if a round started with them, or if the engine compiles nothing.
        cached_pipeline_load_s: the part of it in which diffusers' pipeline was loaded.
    """

    rival: str
    workload: Workload
    engine: dict[str, Any] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    stages: Stages | None = None
    agreement: Agreement | None = None
    flops: float | None = None
    matrix_rate: float | None = None
    failure: str | None = None
    unchecked: str | None = None
    unstaged: str | None = None
    cached_start_s: float | None = None
    cached_pipeline_load_s: float | None = None

    @property
    def summary(self) -> Summary | None:
        """Statistics over the rounds; None without rounds."""
        return summarize(self.rounds, self.cached_start_s, self.cached_pipeline_load_s) if self.rounds else None

    def value(self, path: str) -> Any:
        """Return an attribute of the result or of its parts, such as "stages.text_ms"; None if a part is None."""
        found: Any = self
        for name in path.split("."):
            found = None if found is None else getattr(found, name)
        return found

    @property
    def latencies_s(self) -> list[float]:
        """The timed runs of all rounds."""
        return [latency for each in self.rounds for latency in each.latencies_s]

    @property
    def share_of_matrix_rate(self) -> float | None:
        """Share of the measured matrix rate that the denoiser reaches, 0 to 1."""
        if self.stages is None or not self.flops or not self.matrix_rate or not self.stages.step_ms:
            return None
        return self.flops / (self.stages.step_ms / 1e3) / self.matrix_rate

    @property
    def remarks(self) -> list[str]:
        """Remarks on the row, starting with the failure."""
        summary = self.summary
        remarks = [self.failure] if self.failure else []
        if self.unchecked:
            remarks.append(f"images not compared: {self.unchecked}")
        if self.unstaged:
            remarks.append(f"stages not measured: {self.unstaged}")
        if summary is not None and summary.spread > LARGE_SPREAD:
            remarks.append(f"spread of {summary.spread:.0%}")
        for cached in (False, True):
            first = [each.first_image_s for each in self.rounds if each.cached == cached]
            if first and max(first) > _LARGE_START_RATIO * min(first) and max(first) - min(first) > 1:
                # Another process was busy, or files were not yet in the page cache.
                remarks.append(f"first image after {min(first):.1f} to {max(first):.1f} s, depending on the round")
        return remarks


@dataclass
class Comparison:
    """All measurements of one command.

    Attributes:
        command: the command line.
        environment: packages, commit, machine (`sdonnx.environment_record.environment`).
        results: the rows.
        throughput: latency by number of steps.
        resolutions: latency by image size.
        kernels: device time by kind of operator.
        images: the first image of each engine, and of `REFERENCE`, for each workload.
        model: a label of the model: `-v`, the name of `--arch`, or the name of the folder.
        time: when it was measured, in ISO 8601.
    """

    command: str
    environment: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    throughput: list[Throughput] = field(default_factory=list)
    resolutions: list[Resolutions] = field(default_factory=list)
    kernels: list[Kernels] = field(default_factory=list)
    images: dict[tuple[str, Workload], Image] = field(default_factory=dict)
    model: str = ""
    time: str = ""

    @property
    def failed(self) -> bool:
        """Whether a result is missing, untrusted or, because the reference failed, unchecked."""
        return any(result.failure or result.unchecked for result in self.results)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of the values, with linear interpolation."""
    return float(np.quantile(np.asarray(values, np.float64), share))


def summarize(
    rounds: Sequence[Round], cached_start_s: float | None = None, cached_pipeline_load_s: float | None = None
) -> Summary:
    """Return statistics over rounds.

    Args:
        rounds: at least one round that starts with empty caches; each has at least one timed run.
        cached_start_s: time to the first image with filled caches, if no round started with them.
        cached_pipeline_load_s: the part of it in which diffusers' pipeline was loaded.
    """
    latencies = [latency for each in rounds for latency in each.latencies_s]
    allocated = [each.allocator_bytes for each in rounds if each.allocator_bytes is not None]

    def median(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    fresh = [each for each in rounds if not each.cached]
    cached = [each for each in rounds if each.cached]
    if cached:
        cached_start_s = statistics.median(each.first_image_s for each in cached)
        cached_pipeline_load_s = median(each.pipeline_load_s for each in cached)
    return Summary(
        runs=len(latencies),
        average_s=statistics.fmean(latencies),
        median_s=statistics.median(latencies),
        min_s=min(latencies),
        p90_s=quantile(latencies, 0.9),
        p99_s=quantile(latencies, 0.99),
        spread=(quantile(latencies, 0.9) - quantile(latencies, 0.1)) / quantile(latencies, 0.5),
        load_s=statistics.median(each.load_s for each in fresh),
        pipeline_load_s=median(each.pipeline_load_s for each in fresh),
        first_image_s=statistics.median(each.first_image_s for each in fresh),
        cached_first_image_s=cached_start_s,
        cached_pipeline_load_s=cached_pipeline_load_s,
        warm_up_s=statistics.median(sum(each.warm_up_s) for each in fresh),
        first_run_bytes=max(each.first_run_bytes for each in rounds),
        second_run_bytes=max(each.second_run_bytes for each in rounds),
        allocator_bytes=max(allocated, default=None),
        host_peak_bytes=max(each.host_peak_bytes for each in rounds),
    )


OURS = "sdonnx"
"""The name of this project's engine, `-e onnxruntime`."""

_ENGINES = {
    "onnxruntime": OURS,
    "onnxruntime-plain": "plain ONNX Runtime",
    "torch": "torch eager",
    "torch-xformers": "torch eager, xformers",
    "sdonnx-compile": "sdonnx.compile_pipe",
}

# (prefix of a title, shown name, mode that the name omits: the default of `parse_rivals`)
_COMPILED = (
    ("torch-compile:", "torch.compile", "reduce-overhead"),
    ("torch-regional:", "torch.compile of blocks", "default"),
)


def shown_name(title: str) -> str:
    """Return an engine's name for people: "sdonnx" for "onnxruntime", "torch.compile" for "torch-compile:MODE".

    A name includes the mode of torch.compile unless it is the default. Other titles are returned unchanged.
    """
    for prefix, name, usual in _COMPILED:
        if title.startswith(prefix):
            mode = title.removeprefix(prefix)
            return name if mode == usual else f"{name}, {mode}"
    return _ENGINES.get(title, title)


def with_shown_names(comparison: Comparison) -> Comparison:
    """Return the comparison with `shown_name` as the name of each engine."""

    def renamed(parts: list[Any]) -> list[Any]:
        return [replace(each, rival=shown_name(each.rival)) for each in parts]

    return replace(
        comparison,
        results=renamed(comparison.results),
        throughput=renamed(comparison.throughput),
        resolutions=renamed(comparison.resolutions),
        kernels=renamed(comparison.kernels),
        images={(shown_name(name), workload): image for (name, workload), image in comparison.images.items()},
    )
