"""Device time by kind of operator: what is neither convolution, matrix product nor attention is the next gain."""

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
    "kernels_seen_by_torch",
    "kind_of",
    "profiled_by_onnxruntime",
    "profiled_by_torch",
    "profiling_sessions",
    "times_of_kernels",
    "times_of_nodes",
]

ELEMENT_WISE, IDLE = "element-wise", "idle"

# A kind by what the name of a kernel, an ATen operator or an ONNX operator holds; the first that matches counts.
# CUDA kernels: cuDNN's, cuBLAS', CUTLASS', Triton's, ONNX Runtime's and torch's own, as a profiler names them.
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


def kind_of(name: str) -> str:
    """Return the kind of work that a kernel or an operator of that name does."""
    lowered = name.lower()
    if "split" in lowered and "gelu" not in lowered and "splitk" not in lowered:
        return "copies"
    for kind, marks in KINDS:
        if any(mark in lowered for mark in marks):
            return kind
    return ELEMENT_WISE


def times_of_kernels(kernels: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return milliseconds by kind of kernels (name, start, end in microseconds), and how long none ran.

    Kernels that overlap count each for itself, and idle is what no kernel covers between the first and the last.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    times: dict[str, float] = {}
    idle, end = 0.0, ordered[0][1] if ordered else 0.0
    for name, start, stop in ordered:
        kind = kind_of(name)
        times[kind] = times.get(kind, 0.0) + (stop - start) / 1e3
        idle += max(start - end, 0.0) / 1e3
        end = max(end, stop)
    return _ordered(times) | {IDLE: idle}


def times_of_nodes(nodes: Iterable[tuple[str, float]], wall_ms: float) -> dict[str, float]:
    """Return milliseconds by kind of operators (name, milliseconds), and what of the wall clock is in none."""
    times: dict[str, float] = {}
    for name, milliseconds in nodes:
        kind = kind_of(name)
        times[kind] = times.get(kind, 0.0) + milliseconds
    return _ordered(times) | {IDLE: max(wall_ms - sum(times.values()), 0.0)}


def profiled_by_torch(draw: Callable[[], Any], device: str) -> tuple[dict[str, float], int, str]:
    """Draw under torch's profiler and return milliseconds by kind, launches, and what counted.

    On a GPU every kernel of the process is seen, whichever library launched it; on a CPU torch's operators alone.

    Raises:
        OptionError: torch is not installed.
    """
    if device == "cuda":
        kernels = kernels_seen_by_torch(draw)
        return times_of_kernels(kernels), len(kernels), "torch.profiler (CUPTI)"
    profiler, wall_ms = _profiled(draw, device)
    averages = profiler.key_averages()
    nodes = [(event.key, event.self_cpu_time_total / 1e3) for event in averages]
    return times_of_nodes(nodes, wall_ms), sum(event.count for event in averages), "torch.profiler"


def kernels_seen_by_torch(draw: Callable[[], Any]) -> list[tuple[str, float, float]]:
    """Draw under torch's profiler and return the name, start and end, in microseconds, of every kernel of the process.

    Raises:
        OptionError: torch is not installed.
    """
    profiler, _ = _profiled(draw, "cuda")
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]


def _profiled(draw: Callable[[], Any], device: str) -> tuple[Any, float]:
    """Return torch's profiler, done, and the milliseconds that drawing took."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        raise OptionError("--profile without torch", "torch, whose profiler counts", "pip install torch") from None
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        start = time.perf_counter()
        draw()
        if device == "cuda":
            torch.cuda.synchronize()
        wall_ms = (time.perf_counter() - start) * 1e3
    return profiler, wall_ms


@contextmanager
def profiling_sessions() -> Iterator[tuple[Any, Path]]:
    """Yield options of sessions that write profiles, and the folder where they do."""
    import onnxruntime

    with TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        yield options, Path(folder)


def profiled_by_onnxruntime(
    draw: Callable[[], Any], close: Callable[[], None], folder: Path
) -> tuple[dict[str, float], int, str]:
    """Draw with sessions that write profiles into a folder; return milliseconds by kind, nodes, and what counted.

    Args:
        draw: draws once.
        close: gives the sessions back, which ends their profiles.
        folder: where the profiles are written.
    """
    # Each image runs a session equally often. A capture may have run it once more before: with more images than
    # that, a division without rest tells how often an image does.
    images, wall_ms = 4, 0.0
    for _ in range(images):
        start = time.perf_counter()
        draw()
        wall_ms = (time.perf_counter() - start) * 1e3
    close()
    nodes: list[tuple[str, float]] = []
    for path in sorted(folder.iterdir()):
        nodes += _nodes_of_last_image(json.loads(path.read_text(encoding="utf-8")), images)
    return times_of_nodes(nodes, wall_ms), len(nodes), "ONNX Runtime's profile"


def _nodes_of_last_image(events: Sequence[dict[str, Any]], images: int) -> list[tuple[str, float]]:
    """Return (operator, milliseconds) of the nodes that the last image ran, from a session's profile."""
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
