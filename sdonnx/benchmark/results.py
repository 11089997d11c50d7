"""What a comparison holds: for each engine and workload the rounds, what they sum up to, and what was noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sdonnx.benchmark.statistics import Line, Summary, summary_of

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "REFERENCE",
    "Agreement",
    "Comparison",
    "Kernels",
    "Resolution",
    "Resolutions",
    "Result",
    "Round",
    "Stages",
    "Throughput",
    "Workload",
    "plain",
]

REFERENCE = "torch fp32"
"""What every image is compared with."""

LARGE_SPREAD = 0.1
"""A row whose spread is larger says so."""

_OTHER_START = 1.5

LEAST_PSNR_DB = 30.0
"""Engines with the same weights, noise and sampler are above 45 dB in fp16 (docs/results); other weights, another
sampler or other noise are below 20."""


@dataclass(frozen=True)
class Workload:
    """What one run draws, alike for every engine.

    Attributes:
        batch_size: images drawn together, of one prompt.
        height: in pixels.
        width: in pixels.
        steps: denoising steps.
        seed: of the noise, the same in every run.
        guidance_scale: weight of the prompt; 7.5 is what ONNX Runtime's benchmark.py draws with.
        scheduler: the sampler's class or short name; None for the folder's.
        negative_prompt: what to draw away from.
        image: the file that image to image starts from; None to start from noise.
        strength: how far from that image to go.
        ip_adapter_scale: weight of every IP-Adapter; None where there are none.
        ip_adapter_image: the file that every adapter is shown; None for a drawn picture.
    """

    batch_size: int = 1
    height: int = 512
    width: int = 512
    steps: int = 50
    seed: int = 0
    guidance_scale: float = 7.5
    scheduler: str | None = None
    negative_prompt: str | None = None
    image: str | None = None
    strength: float = 0.8
    ip_adapter_scale: float | None = None
    ip_adapter_image: str | None = None

    @property
    def title(self) -> str:
        """The size, as a heading calls it."""
        adapted = "" if self.ip_adapter_scale is None else f", IP-Adapter {self.ip_adapter_scale:g}"
        return f"{self.height}x{self.width}, batch {self.batch_size}, {self.steps} steps{adapted}"


@dataclass(frozen=True)
class Round:
    """One process of an engine, from its start to its last image.

    Attributes:
        load_s: importing the library, reading the weights, putting them on the device.
        warm_up_s: each run before the clock counts; the first captures, compiles or searches. Empty where
            the warm-up was skipped.
        latencies_s: each timed run, by prompt and then by repetition.
        peak_bytes: the highest memory in each warm-up run (without any, in the first timed one), and in one more run
            after the timed ones, which nothing watches.
        memory_kind: what was counted there.
        allocator_bytes: the peak by the library's own allocator; None where it does not tell.
        host_peak_bytes: the highest resident memory of the process.
        clocks_mhz: of the GPU's multiprocessors, least, median and highest while it drew; empty on a CPU.
        position: its place in the round's order, from 0 on.
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

    @property
    def first_image_s(self) -> float:
        """From the start of loading to the first image."""
        return self.load_s + (*self.warm_up_s, *self.latencies_s)[0]

    @property
    def first_run_bytes(self) -> int:
        """The peak in the very first run."""
        return self.peak_bytes[0]

    @property
    def second_run_bytes(self) -> int:
        """The peak in the run after the timed ones."""
        return self.peak_bytes[-1]


@dataclass(frozen=True)
class Stages:
    """Where the time of a run goes, on the device's own clock.

    Attributes:
        text_ms: prompts to hidden states.
        step_ms: one call of the denoiser, with guidance and what the sampler does; Heun has two in a step.
        decode_ms: latents to pixels.
        iterations_per_second: denoiser calls in a second, the first one left out.
        denoiser_calls: in a run.
    """

    text_ms: float
    step_ms: float
    decode_ms: float
    iterations_per_second: float
    denoiser_calls: int


@dataclass(frozen=True)
class Agreement:
    """How an engine's images compare with `REFERENCE`, over all images of a batch.

    Attributes:
        psnr_db: peak signal-to-noise ratio; None where the pixels are the same.
        ssim: structural similarity, 1 where they are the same.
        differing: share of the pixels' values that are another.
        lpips: perceptual distance, 0 where they are the same; None where the package lpips is not there.
    """

    psnr_db: float | None
    ssim: float
    differing: float
    lpips: float | None = None


@dataclass
class Result:
    """A row: one engine on one workload.

    Attributes:
        rival: what the table calls the engine, with how it was compiled.
        workload: what was drawn.
        engine: name, version, device, precision, compile mode, sampler's class, folder, family.
        rounds: one for each process.
        stages: None where they were not measured.
        agreement: None where there was no reference.
        flops: floating-point operations of a denoiser call; None where torch is not there to count them.
        matrix_rate: floating-point operations a second that the chip's matrix product was measured to reach.
        failure: why there is no result, or why it must not be trusted; None where all is well.
        unchecked: why its images were compared with nothing although they should have been.
        unstaged: why its stages were not measured.
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

    @property
    def summary(self) -> Summary | None:
        """What the rounds sum up to; None where nothing was measured."""
        return summary_of(self.rounds) if self.rounds else None

    @property
    def share_of_matrix_rate(self) -> float | None:
        """How much of the measured matrix rate the denoiser reaches, 0 to 1."""
        if self.stages is None or not self.flops or not self.matrix_rate or not self.stages.step_ms:
            return None
        return self.flops / (self.stages.step_ms / 1e3) / self.matrix_rate

    @property
    def remarks(self) -> list[str]:
        """What a reader must know of the row."""
        summary = self.summary
        remarks = [self.failure] if self.failure else []
        if self.unchecked:
            remarks.append(f"compared with nothing: {self.unchecked}")
        if self.unstaged:
            remarks.append(f"stages not measured: {self.unstaged}")
        if summary is not None and summary.spread > LARGE_SPREAD:
            remarks.append(f"spread of {summary.spread:.0%}")
        first = [each.first_image_s for each in self.rounds]
        if first and max(first) > _OTHER_START * min(first) and max(first) - min(first) > 1:
            # A compiler that finds its work of the round before on the disk, or files that were not yet in memory.
            remarks.append(f"first image after {min(first):.1f} to {max(first):.1f} s, by round")
        return remarks


@dataclass(frozen=True)
class Throughput:
    """Latency against steps, and the line through it.

    Attributes:
        rival: the engine.
        workload: what was drawn; its steps are the most.
        points: (steps, median latency in seconds).
        line: time = slope * steps + offset.
    """

    rival: str
    workload: Workload
    points: tuple[tuple[int, float], ...]
    line: Line


@dataclass(frozen=True)
class Resolution:
    """A size that was visited, or another weight of the IP-Adapters at the first one.

    Attributes:
        height: in pixels.
        width: in pixels.
        first_s: seconds of its first image.
        second_s: of its second.
        settled_s: of the best after that.
        ip_adapter_scale: the weight, where it is another.
    """

    height: int
    width: int
    first_s: float
    second_s: float
    settled_s: float
    ip_adapter_scale: float | None = None

    @property
    def title(self) -> str:
        """What a table calls it."""
        return (
            f"{self.height}x{self.width}" if self.ip_adapter_scale is None else f"IP-Adapter {self.ip_adapter_scale:g}"
        )

    @property
    def stall_s(self) -> float:
        """What the first two images of the size cost more than a later one; some compilers record in the second."""
        return sum(max(seconds - self.settled_s, 0.0) for seconds in (self.first_s, self.second_s))


@dataclass(frozen=True)
class Resolutions:
    """Sizes visited one after another by one process that was warm at its first size."""

    rival: str
    workload: Workload
    visited: tuple[Resolution, ...]


@dataclass(frozen=True)
class Kernels:
    """Device time of one image by kind of operator.

    Attributes:
        rival: the engine.
        workload: what was drawn.
        milliseconds: by kind, the most expensive first; "idle" is when nothing ran.
        launches: kernels, or nodes on a CPU.
        source: what counted.
    """

    rival: str
    workload: Workload
    milliseconds: dict[str, float]
    launches: int
    source: str


@dataclass
class Comparison:
    """Everything that one command measured.

    Attributes:
        command: as it was typed.
        environment: packages, commit, machine (`sdonnx.benchmark.record.environment`).
        results: the rows.
        images: the first image of each engine, and of `REFERENCE`, for each workload.
    """

    command: str
    environment: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    throughput: list[Throughput] = field(default_factory=list)
    resolutions: list[Resolutions] = field(default_factory=list)
    kernels: list[Kernels] = field(default_factory=list)
    images: dict[tuple[str, Workload], Image] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a row has no result, or one that must not be trusted, or was not checked as it should have been."""
        return any(result.failure or result.unchecked for result in self.results)


def plain(value: Any) -> Any:
    """Return a dataclass as dictionaries and lists, ready for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    return value
