"""Times of stages and of kinds of operators, operations of a denoiser call, and the rate of the device's matmuls."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from sdonnx.benchmark.results import Stages
from sdonnx.errors import OptionError
from sdonnx.models.spec import Role
from sdonnx.reference.diffusers_pipeline import DiffusersPipeline
from sdonnx.reference.workload import Workload

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "DECODE",
    "ELEMENT_WISE",
    "IDLE",
    "KINDS",
    "STAGES",
    "STEP",
    "TEXT",
    "StageClock",
    "generate_and_count_flops",
    "host_clock",
    "kernel_kind",
    "kernel_times_by_kind",
    "matrix_rates",
    "median_stages",
    "trace_kernels",
]

ELEMENT_WISE, IDLE = "element-wise", "idle"

# Substrings of the names of kernels, by kind; the first match counts. The kernels come from cuDNN, cuBLAS, CUTLASS,
# Triton, ONNX Runtime and torch, under their names in a profiler.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("sdpa", "flash", "fmha", "attention")),
    ("convolution", ("implicit_gemm", "fprop", "conv", "addpadding", "init_device_workspace", "cudnn_infer")),
    ("normalization", ("groupnorm", "group_norm", "layernorm", "layer_norm", "simplifiedlayer", "softmax")),
    ("matrix product", ("nvjet", "gemm", "cutlass", "splitk", "matmul")),
    (
        "copies",
        (
            "memset",
            "memcpy",
            "concat",
            "catarray",
            "copy",
            "transpose",
            "nchwto",
            "nhwcto",
            "gather",
            "slice",
            "expand",
        ),
    ),
)


def kernel_kind(name: str) -> str:
    """Return the kind of a kernel or operator by its name."""
    lowered = name.lower()
    if "split" in lowered and "gelu" not in lowered and "splitk" not in lowered:
        return "copies"
    for kind, marks in KINDS:
        if any(mark in lowered for mark in marks):
            return kind
    return ELEMENT_WISE


def kernel_times_by_kind(kernels: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return milliseconds by kind for kernels (name, start, end in microseconds), and the idle time.

    Overlapping kernels count separately. Idle is the time without any kernel between the first and the last.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    times: dict[str, float] = {}
    idle, end = 0.0, ordered[0][1] if ordered else 0.0
    for name, start, stop in ordered:
        kind = kernel_kind(name)
        times[kind] = times.get(kind, 0.0) + (stop - start) / 1e3
        idle += max(start - end, 0.0) / 1e3
        end = max(end, stop)
    return dict(sorted(times.items(), key=lambda item: -item[1])) | {IDLE: idle}


def trace_kernels(generate: Callable[[], Any]) -> list[tuple[str, float, float]]:
    """Generate on a GPU under torch's profiler and return name, start and end in microseconds of every kernel.

    The profiler records the kernels of the whole process, of any library.

    Raises:
        OptionError: torch is not installed.
    """
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        raise OptionError("--profile without torch", "torch, for its profiler", "pip install torch") from None
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        generate()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]


def generate_and_count_flops(source: DiffusersPipeline, prompt: str, workload: Workload) -> tuple[list[Image], int]:
    """Return the images of a loaded pipeline, and the floating-point operations of one denoiser call.

    torch's FlopCounterMode counts two operations for a multiplication and addition in matmuls, convolutions
    and attention. The counted call runs on the meta device, where attention is two matmuls: the counter does
    not support every attention kernel.
    """
    import torch
    from torch.utils import _pytree
    from torch.utils.flop_counter import FlopCounterMode

    denoiser, calls = source.denoiser, list[Any]()
    forward = denoiser.forward

    def on_meta(value: Any) -> Any:
        return value.to("meta") if torch.is_tensor(value) else value

    def recorded(*arguments: Any, **options: Any) -> Any:
        if not calls:
            calls.append(_pytree.tree_map(on_meta, (arguments, options)))
        return forward(*arguments, **options)

    with mock.patch.object(denoiser, "forward", recorded):
        images = source.generate(prompt, workload)
    ((arguments, options),) = calls
    # A copy, because the configuration does not include layers that adapters added. Its weights use no memory.
    weights = [*denoiser.parameters(), *denoiser.buffers()]
    shapes = copy.deepcopy(denoiser, {id(value): value.to("meta") for value in weights})
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        shapes(*arguments, **options)
    return images, int(counter.get_total_flops())


def matrix_rates(device: str) -> dict[str, float]:
    """Return the floating-point operations per second of a large square matmul, by data type.

    The fastest of several batches: an upper bound, which the denoiser's rate is compared with.
    """
    import torch

    size, types = (8192, ("float16", "float32")) if device == "cuda" else (2048, ("float32",))
    rates = {}
    for name in types:
        left = torch.randn(size, size, device=device, dtype=getattr(torch, name))
        best = float("inf")
        for _ in range(6):
            start = time.perf_counter()
            for _ in range(4):
                left @ left
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / 4)
        rates[name] = 2 * size**3 / best
    return rates


TEXT, STEP, DECODE = "text", "step", "decode"

STAGES = {
    Role.TEXT_ENCODER: TEXT,
    Role.TEXT_ENCODER_2: TEXT,
    Role.IMAGE_PROMPT_ENCODER: TEXT,
    Role.IMAGE_PROMPT_ADAPTER: TEXT,
    Role.PRECOMPUTE: TEXT,
    Role.CONTROLNET_PRECOMPUTE: TEXT,
    Role.T2I_ADAPTER: TEXT,
    Role.CONTROLNET: STEP,
    Role.DENOISER: STEP,
    Role.CONTROLLED_DENOISER: STEP,
    Role.IMAGE_DECODER: DECODE,
}
"""The stage of each component."""


def median_stages(stages: Sequence[Stages]) -> Stages:
    """Return the median of each stage over at least one round."""
    text, step, decode = (
        statistics.median(getattr(each, name) for each in stages) for name in ("text_ms", "step_ms", "decode_ms")
    )
    return Stages(text, step, decode, 1e3 / step if step else 0.0, stages[0].denoiser_calls)


class StageClock:
    """Collects the stages of one run.

    Args:
        mark: records a mark after all work that is queued.
        milliseconds: returns the time between two marks.
    """

    def __init__(self, mark: Callable[[], Any], milliseconds: Callable[[Any, Any], float]) -> None:
        self._mark, self._milliseconds = mark, milliseconds
        self._spans: dict[str, list[tuple[Any, Any]]] = {TEXT: [], STEP: [], DECODE: []}

    @contextmanager
    def span(self, stage: str | None) -> Iterator[None]:
        """Measure the work that is queued within a `with` block as part of a stage; None measures nothing."""
        if stage is None:
            yield
            return
        start = self._mark()
        yield
        self._spans[stage].append((start, self._mark()))

    def around(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with each call measured."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self.span(stage):
                return function(*arguments, **options)

        return call

    def stages(self) -> Stages:
        """Wait for the marks and return the stages.

        A step lasts from the end of one denoiser call to the end of the next, so that it includes the sampler and all
        other work between the calls. The first call is not counted; clocks and caches settle during it.
        """
        steps = self._spans[STEP]
        if len(steps) > 1:
            step_ms = self._milliseconds(steps[0][1], steps[-1][1]) / (len(steps) - 1)
        else:
            step_ms = self._sum(STEP)
        rate = 1e3 / step_ms if step_ms else 0.0
        return Stages(self._sum(TEXT), step_ms, self._sum(DECODE), rate, len(steps))

    def _sum(self, stage: str) -> float:
        return sum(self._milliseconds(start, end) for start, end in self._spans[stage])


def host_clock() -> StageClock:
    """Return a clock for work that the caller waits for: on a CPU, or with results on the host."""
    return StageClock(time.perf_counter, lambda start, end: (end - start) * 1e3)
