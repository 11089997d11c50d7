"""GPU time by kind of operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sdonnx.errors import OptionError

__all__ = [
    "ELEMENT_WISE",
    "IDLE",
    "KINDS",
    "kernel_kind",
    "kernel_times_by_kind",
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
