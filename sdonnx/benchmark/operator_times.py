"""Device time by kind of operator."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sdonnx.errors import OptionError

__all__ = [
    "ELEMENT_WISE",
    "IDLE",
    "KINDS",
    "kernel_kind",
    "kernel_times_by_kind",
    "node_times_by_kind",
    "profile_with_onnxruntime",
    "profile_with_torch",
    "profiling_sessions",
    "trace_kernels",
]

ELEMENT_WISE, IDLE = "element-wise", "idle"

# Substrings of the names of kernels, ATen operators and ONNX operators, by kind; the first match counts. The kernels
# come from cuDNN, cuBLAS, CUTLASS, Triton, ONNX Runtime and torch, under their names in a profiler.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("sdpa", "flash", "fmha", "attention")),
    ("convolution", ("implicit_gemm", "fprop", "conv", "addpadding", "init_device_workspace", "cudnn_infer")),
    ("normalization", ("groupnorm", "group_norm", "layernorm", "layer_norm", "simplifiedlayer", "softmax")),
    (
        "matrix product",
        ("nvjet", "gemm", "cutlass", "splitk", "matmul", "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"),
    ),
    (
        "copies",
        (
            "memset", "memcpy", "concat", "aten::cat", "catarray", "copy", "transpose", "reshape", "nchwto", "nhwcto",
            "gather", "slice", "expand", "unsqueeze", "contiguous", "clone", "index_select", "aten::to",
        ),
    ),
)  # fmt: skip


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
    return _ordered(times) | {IDLE: idle}


def node_times_by_kind(nodes: Iterable[tuple[str, float]], wall_ms: float) -> dict[str, float]:
    """Return milliseconds by kind for operators (name, milliseconds), and the remaining wall-clock time as idle."""
    times: dict[str, float] = {}
    for name, milliseconds in nodes:
        kind = kernel_kind(name)
        times[kind] = times.get(kind, 0.0) + milliseconds
    return _ordered(times) | {IDLE: max(wall_ms - sum(times.values()), 0.0)}


def profile_with_torch(generate: Callable[[], Any], device: str) -> tuple[dict[str, float], int, str]:
    """Generate under torch's profiler and return milliseconds by kind, launches, and the profiler's name.

    On a GPU the profiler records every kernel of the process, of any library; on a CPU only torch's operators.

    Raises:
        OptionError: torch is not installed.
    """
    if device == "cuda":
        kernels = trace_kernels(generate)
        return kernel_times_by_kind(kernels), len(kernels), "torch.profiler (CUPTI)"
    profiler, wall_ms = _profiled(generate, device)
    averages = profiler.key_averages()
    nodes = [(event.key, event.self_cpu_time_total / 1e3) for event in averages]
    return node_times_by_kind(nodes, wall_ms), sum(event.count for event in averages), "torch.profiler"


def trace_kernels(generate: Callable[[], Any]) -> list[tuple[str, float, float]]:
    """Generate under torch's profiler and return name, start and end in microseconds of every kernel of the process.

    Raises:
        OptionError: torch is not installed.
    """
    profiler, _ = _profiled(generate, "cuda")
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]


def _profiled(generate: Callable[[], Any], device: str) -> tuple[Any, float]:
    """Generate under torch's profiler and return the profiler and the wall-clock time in ms."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        raise OptionError("--profile without torch", "torch, for its profiler", "pip install torch") from None
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        start = time.perf_counter()
        generate()
        if device == "cuda":
            torch.cuda.synchronize()
        wall_ms = (time.perf_counter() - start) * 1e3
    return profiler, wall_ms


@contextmanager
def profiling_sessions() -> Iterator[tuple[Any, Path]]:
    """Yield session options that enable profiling, and the folder of the profiles."""
    import onnxruntime

    with TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        yield options, Path(folder)


def profile_with_onnxruntime(
    generate: Callable[[], Any], close: Callable[[], None], folder: Path
) -> tuple[dict[str, float], int, str]:
    """Generate with profiling sessions and return milliseconds by kind, number of nodes, and the profiler's name.

    Args:
        generate: generates once.
        close: closes the sessions, which writes their profiles.
        folder: folder of the profiles.
    """
    # Every image runs a session equally often. A capture may add one run, so that the quotient of runs and images,
    # rounded down, is the number of runs per image.
    images, wall_ms = 4, 0.0
    for _ in range(images):
        start = time.perf_counter()
        generate()
        wall_ms = (time.perf_counter() - start) * 1e3
    close()
    nodes: list[tuple[str, float]] = []
    for path in sorted(folder.iterdir()):
        nodes += _nodes_of_last_image(json.loads(path.read_text(encoding="utf-8")), images)
    return node_times_by_kind(nodes, wall_ms), len(nodes), "ONNX Runtime's profile"


def _nodes_of_last_image(events: Sequence[dict[str, Any]], images: int) -> list[tuple[str, float]]:
    """Return (operator, milliseconds) for the nodes of the last image, from a session's profile."""
    runs = sorted(event["ts"] for event in events if event["name"] == "model_run")
    each = len(runs) // images
    if not each:
        return []
    start = runs[-each]
    return [
        (event["args"]["op_name"], event["dur"] / 1e3)
        for event in events
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= start
    ]


def _ordered(times: dict[str, float]) -> dict[str, float]:
    return dict(sorted(times.items(), key=lambda item: -item[1]))
