"""`python -m sdonnx.benchmark.denoiser`: time one denoiser call of ONNX Runtime and of torch.

The engines have the same weights and inputs and are timed in turn in one process, so that clocks and temperature are
the same for all. Requires a GPU and torch.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sdonnx.benchmark.files import append_json, check_writable
from sdonnx.benchmark.operator_times import IDLE, kernel_times_by_kind
from sdonnx.benchmark.record import environment
from sdonnx.benchmark.statistics import quantile
from sdonnx.errors import OptionError
from sdonnx.terminal import add_common, console, guarded

__all__ = ["ENGINES", "main"]

ENGINES = ("onnxruntime", "torch", "torch-compile")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sdonnx.benchmark.denoiser", description=__doc__.splitlines()[0])
    parser.add_argument("-p", "--pipeline", required=True, type=Path, help="the diffusers folder")
    parser.add_argument("-m", "--optimized", required=True, type=Path, help="the folder optimized from it")
    parser.add_argument("-e", "--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument(
        "-b", "--batch_size", type=int, default=1, help="number of images; the denoiser's batch is twice that"
    )
    parser.add_argument("--height", type=int, default=512, help="pixels")
    parser.add_argument("--width", type=int, default=512, help="pixels")
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds, in each of which every engine is timed"
    )
    parser.add_argument("--calls", type=int, default=40, help="calls of an engine in a round")
    parser.add_argument("--json", type=Path, required=True, help="append the record to this file")
    add_common(parser)
    return parser


class _Case:
    """The inputs of one call, on the GPU, and torch's output in float32."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from diffusers import UNet2DConditionModel

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.source = options.pipeline / "unet"
        wide: Any = UNet2DConditionModel.from_pretrained(self.source).to("cuda").eval()
        generator = torch.Generator("cuda").manual_seed(0)
        batch = 2 * options.batch_size
        latents = (batch, wide.config.in_channels, options.height // 8, options.width // 8)
        prompts = (batch, 77, wide.config.cross_attention_dim)
        sample = torch.randn(latents, device="cuda", generator=generator)
        prompt = torch.randn(prompts, device="cuda", generator=generator)
        self.timestep = torch.tensor([481.0], device="cuda")
        with torch.inference_mode():
            self.reference = wide(sample, self.timestep, prompt).sample.double()
        self.sample, self.prompt = sample.half(), prompt.half()

    def error(self, prediction: Any) -> float:
        """Return the relative error of a prediction against float32."""
        return float((prediction.double() - self.reference).norm() / self.reference.norm())


def _load_onnxruntime(options: argparse.Namespace, case: _Case) -> Callable[[], Any]:
    import torch

    from sdonnx.runtime.device.device import device_for
    from sdonnx.runtime.device.session import Graph

    device = device_for("cuda")
    graph = Graph(options.optimized / "unet" / "model.onnx", device, capture=True)
    prediction = device.empty(case.sample.shape, np.float16)
    run = graph.bind(
        {
            "sample": device.upload(case.sample.cpu().numpy()),
            "timestep": device.upload(case.timestep.cpu().numpy()),
            "encoder_hidden_states": device.upload(case.prompt.cpu().numpy()),
            "out_sample": prediction,
        }
    )
    run.capture()

    def call() -> Any:
        run()
        return prediction

    call.result = lambda: torch.from_numpy(prediction.numpy()).to("cuda")  # type: ignore[attr-defined]
    return call


def _load_torch(case: _Case, compiled: bool) -> Callable[[], Any]:
    import torch
    from diffusers import UNet2DConditionModel

    unet: Any = UNet2DConditionModel.from_pretrained(case.source, dtype=torch.float16).to("cuda").eval()
    sample = case.sample
    if compiled:
        # Source: diffusers' documentation, "Accelerate inference", torch.compile.
        unet.fuse_qkv_projections()
        unet = unet.to(memory_format=torch.channels_last)
        sample = sample.to(memory_format=torch.channels_last)
        unet = torch.compile(unet, mode="reduce-overhead", fullgraph=True)

    def call() -> Any:
        with torch.inference_mode():
            return unet(sample, case.timestep, case.prompt, return_dict=False)[0]

    for _ in range(3):  # compilation, warm-up and the capture of the CUDA graph
        call()
    torch.cuda.synchronize()
    return call


def _time(call: Callable[[], Any], calls: int) -> list[float]:
    """Return the latencies of single calls in ms, with an idle GPU before and after each call."""
    import torch

    latencies = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        latencies.append((time.perf_counter() - start) * 1e3)
    return latencies


def _kernels(call: Callable[[], Any], calls: int = 5) -> dict[str, Any]:
    """Return the GPU time of one call in ms by kind of kernel, and the number of launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    times = {kind: milliseconds / calls for kind, milliseconds in kernel_times_by_kind(kernels).items()}
    return {
        "kernels_ms": {kind: round(value, 4) for kind, value in times.items()},
        "total_ms": round(sum(value for kind, value in times.items() if kind != IDLE), 4),
        "launches": len(kernels) // calls,
    }


def _run(options: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        raise OptionError(
            "torch finds no GPU on this machine", "an NVIDIA GPU", "run the command on a machine with a GPU"
        )
    check_writable(options.json)
    torch.backends.cudnn.benchmark = True  # as in the pipeline's benchmark
    case = _Case(options)
    calls: dict[str, Callable[[], Any]] = {}
    records: dict[str, dict[str, Any]] = {}
    for engine in options.engines:
        start = time.perf_counter()
        if engine == "onnxruntime":
            calls[engine] = _load_onnxruntime(options, case)
        else:
            calls[engine] = _load_torch(case, compiled=engine == "torch-compile")
        records[engine] = {"ready_s": round(time.perf_counter() - start, 3)}
        result = getattr(calls[engine], "result", None)
        prediction = calls[engine]()
        records[engine]["relative_error"] = case.error(result() if result else prediction)
    latencies: dict[str, list[list[float]]] = {engine: [] for engine in calls}
    for turn in range(options.rounds):
        order = list(calls) if turn % 2 == 0 else list(calls)[::-1]
        for engine in order:
            _time(calls[engine], 3)
            latencies[engine].append(_time(calls[engine], options.calls))
    for engine, rounds in latencies.items():
        medians = [statistics.median(turn) for turn in rounds]
        everything = sorted(latency for turn in rounds for latency in turn)
        records[engine] |= {
            "median_ms": round(statistics.median(everything), 4),
            "min_ms": round(everything[0], 4),
            "p99_ms": round(quantile(everything, 0.99), 4),
            "round_medians_ms": [round(median, 4) for median in medians],
        }
        records[engine] |= _kernels(calls[engine])
    record = {
        "benchmark": "denoiser",
        "command": shlex.join(sys.orig_argv),
        "case": {"batch": 2 * options.batch_size, "height": options.height, "width": options.width},
        "engines": records,
        "environment": environment(),
    }
    append_json(options.json, record)
    _print(records)
    return 0


def _print(records: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="one denoiser call")
    for title in ("engine", "ready s", "median ms", "min ms", "p99 ms", "kernels ms", "launches", "error to fp32"):
        table.add_column(title, justify="left" if title == "engine" else "right")
    for engine, record in records.items():
        table.add_row(
            engine,
            f"{record['ready_s']:.1f}",
            *(f"{record[key]:.3f}" for key in ("median_ms", "min_ms", "p99_ms", "total_ms")),
            str(record["launches"]),
            f"{record['relative_error']:.2e}",
        )
    console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return guarded(_run, _parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
