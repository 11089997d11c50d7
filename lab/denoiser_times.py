"""`python lab/denoiser_times.py`: time one denoiser call of ONNX Runtime and of torch.

The engines have the same weights and sizes and are timed in turn in one process, so that clocks and temperature are
the same for all. Requires a GPU and torch. `sustained_ms` is the time of a call among many without a pause. For
`sdonnx` and `sdonnx-plain` a call is a step of a pipeline, which contains the arithmetic of guidance and of the
scheduler as well. `sdonnx-plain` uses no operators of our own, and `sdonnx-quantized` the folder of --quantized.
`relative_error` compares the prediction of one call, in each engine's fp16, with torch's in float32.
"""

from __future__ import annotations

import argparse
import copy
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from denoiser_graph import predict

from sdonnx.benchmark.files import append_json, check_writable
from sdonnx.benchmark.operator_times import IDLE, kernel_times_by_kind
from sdonnx.benchmark.results import quantile
from sdonnx.doctor.kernel_library import KERNEL_LIBRARY
from sdonnx.environment_record import environment
from sdonnx.errors import OptionError
from sdonnx.folder.pipeline_folder import REPORT, read_json
from sdonnx.terminal import add_common, console, guarded

__all__ = ["ENGINES", "main"]

ENGINES = ("sdonnx-plain", "sdonnx", "sdonnx-quantized", "torch", "torch-compile")

_PLAIN, _OWN, _QUANTIZED = ENGINES[:3]
_OURS = ENGINES[:3]
_PROMPT = "a red fox in the snow " * 20  # fills the prompt
_STEPS = 10  # of the shorter of the two timed images


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python lab/denoiser_times.py", description=__doc__.splitlines()[0])
    parser.add_argument("-p", "--pipeline", required=True, type=Path, help="the diffusers folder")
    parser.add_argument("-m", "--optimized", required=True, type=Path, help="the folder optimized from it")
    parser.add_argument(
        "--quantized", type=Path, help="the folder optimized from it with --quantize, of sdonnx-quantized"
    )
    engines = [engine for engine in ENGINES if engine != _QUANTIZED]
    parser.add_argument("-e", "--engines", nargs="+", default=engines, choices=ENGINES)
    parser.add_argument("--tokens", type=int, default=77, help="length of the prompts for torch")
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
    """The inputs of one call, on a device, and torch's output in float32."""

    def __init__(self, options: argparse.Namespace, device: str = "cuda") -> None:
        import torch

        self.device = device
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.source = next(
            folder for name in ("unet", "transformer") if (folder := options.pipeline / name / "config.json").is_file()
        ).parent
        wide = self.model(torch.float32)
        config = wide.config
        generator = torch.Generator(device).manual_seed(0)
        batch = 2 * options.batch_size

        def drawn(*shape: int) -> Any:
            return torch.randn(shape, device=device, generator=generator)

        self.sample = drawn(batch, config.in_channels, options.height // 8, options.width // 8)
        width = config.caption_channels if "caption_channels" in config else config.cross_attention_dim
        self.prompt = drawn(batch, options.tokens, width)
        self.timestep = torch.tensor([481.0], device=device)
        self.more: dict[str, Any] = {}
        if config.get("addition_embed_type") == "text_time":
            numbers = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
            sizes = torch.tensor([[options.height, options.width, 0, 0, options.height, options.width]])
            added = {"text_embeds": drawn(batch, numbers), "time_ids": sizes.to(device, torch.float32).repeat(batch, 1)}
            self.more["added_cond_kwargs"] = added
        if "caption_channels" in config:
            self.timestep = self.timestep.expand(batch).contiguous()
            sizes = torch.tensor([[options.height, options.width]], device=device, dtype=torch.float32)
            added = {"resolution": None, "aspect_ratio": None}
            if wide.use_additional_conditions:
                added = {
                    "resolution": sizes.repeat(batch, 1),
                    "aspect_ratio": (sizes[:, :1] / sizes[:, 1:]).repeat(batch, 1),
                }
            mask = torch.ones(batch, options.tokens, device=device)
            self.more |= {"added_cond_kwargs": added, "encoder_attention_mask": mask}
        with torch.inference_mode():
            self.reference = self.run(wide).double()
        half = methodcaller("half")
        self.sample, self.prompt, self.more = half(self.sample), half(self.prompt), _each(self.more, half)

    def model(self, dtype: Any) -> Any:
        """Return the denoiser as torch's module."""
        network, _ = self._network()
        return network.from_pretrained(self.source, dtype=dtype).to(self.device).eval()

    def _network(self) -> tuple[Any, dict[str, Any]]:
        """Return the class of torch's module, and its configuration."""
        import diffusers

        config = read_json(self.source / "config.json")
        return getattr(diffusers, config["_class_name"]), config

    def limits_ms(self, gpu: str) -> dict[str, float]:
        """Return the shortest time of each kind of operator on a GPU, in ms; nothing for GPUs without known rates."""
        import torch
        from denoiser_limits import PEAKS, limits_ms

        if gpu not in PEAKS:
            return {}
        network, config = self._network()
        with torch.device("meta"):
            model = network.from_config(config).half().eval()
        case, meta = copy.copy(self), methodcaller("to", "meta")
        case.sample, case.prompt, case.timestep = map(meta, (self.sample, self.prompt, self.timestep))
        case.more = _each(self.more, meta)
        return limits_ms(lambda: case.run(model), PEAKS[gpu])

    def run(self, model: Any) -> Any:
        """Return the prediction of a module."""
        return model(
            self.sample, timestep=self.timestep, encoder_hidden_states=self.prompt, **self.more, return_dict=False
        )[0]

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the inputs of the optimized graph by name; it has one timestep and one size for all images."""
        added = {name: each for name, each in self.more.get("added_cond_kwargs", {}).items() if each is not None}
        sizes = {name: each[:1] for name, each in added.items() if name in ("resolution", "aspect_ratio")}
        tensors = {"sample": self.sample, "timestep": self.timestep[:1], "encoder_hidden_states": self.prompt}
        if "encoder_attention_mask" in self.more:
            tensors["encoder_attention_mask"] = self.more["encoder_attention_mask"]
        return {name: each.cpu().numpy() for name, each in (tensors | added | sizes).items()}

    def error(self, prediction: Any) -> float:
        """Return the relative error of a prediction against float32."""
        return float((prediction.double() - self.reference).norm() / self.reference.norm())


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return tensors changed by a function, also those in dictionaries."""
    if isinstance(value, dict):
        return {name: _each(each, change) for name, each in value.items()}
    return None if value is None else change(value)


def _load_torch(case: _Case, compiled: bool) -> Callable[[], Any]:
    import torch

    model = case.model(torch.float16)
    if compiled:
        # Source: diffusers' documentation, "Accelerate inference", torch.compile.
        model.fuse_qkv_projections()
        model = model.to(memory_format=torch.channels_last)
        case.sample = case.sample.to(memory_format=torch.channels_last)
        model = torch.compile(model, mode="reduce-overhead", fullgraph=True)

    def call() -> Any:
        with torch.inference_mode():
            return case.run(model)

    for _ in range(3):  # compilation, warm-up and the capture of the CUDA graph
        call()
    torch.cuda.synchronize()
    return call


def _load_pipeline(options: argparse.Namespace, folder: Path, library: str | None) -> Callable[[int], float]:
    """Return a function that generates an image with some steps and returns its seconds.

    Args:
        options: the command's options.
        folder: the optimized folder.
        library: the value of the environment variable that names our kernels while the pipeline is loaded.
    """
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    with patch.dict(os.environ, {} if library is None else {KERNEL_LIBRARY: library}):
        pipeline = OrtDiffusionPipeline.from_pretrained(folder, "cuda")
    arguments: dict[str, Any] = {"height": options.height, "width": options.width, "seed": 0, "output_type": "latent"}

    def generate(steps: int) -> float:
        start = time.perf_counter()
        pipeline(_PROMPT, num_inference_steps=steps, num_images_per_prompt=options.batch_size, **arguments)
        return time.perf_counter() - start

    generate(2)  # captures
    return generate


def _sustained_step(generate: Callable[[int], float], steps: int) -> float:
    """Return the milliseconds of a step: the difference of two images leaves out what is not a step."""
    return (generate(_STEPS + steps) - generate(_STEPS)) / steps * 1e3


def _sustained_call(call: Callable[[], Any], calls: int) -> float:
    """Return the milliseconds of a call among `calls` without a pause."""
    import torch

    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e3


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


def _kernels(call: Callable[[], Any], calls: int = 5, steps: int = 1) -> dict[str, Any]:
    """Return the GPU time in ms by kind of kernel, and the number of launches, divided by the calls and their steps.

    For steps of an image, the text encoders and the copies of the image are shared among the steps.
    """
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
    times = {kind: milliseconds / (calls * steps) for kind, milliseconds in kernel_times_by_kind(kernels).items()}
    return {
        "kernels_ms": {kind: round(value, 4) for kind, value in times.items()},
        "total_ms": round(sum(value for kind, value in times.items() if kind != IDLE), 4),
        "launches": len(kernels) // (calls * steps),
    }


def _run(options: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        raise OptionError(
            "torch finds no GPU on this machine", "an NVIDIA GPU", "run the command on a machine with a GPU"
        )
    if _QUANTIZED in options.engines and options.quantized is None:
        raise OptionError(
            f"{_QUANTIZED} without --quantized", "the folder that it reads", "name it, or omit the engine"
        )
    check_writable(options.json)
    torch.backends.cudnn.benchmark = True  # as in the pipeline's benchmark
    case = _Case(options)
    calls: dict[str, Callable[[], Any]] = {}
    images: dict[str, Callable[[int], float]] = {}
    records: dict[str, dict[str, Any]] = {}
    for engine in options.engines:
        start = time.perf_counter()
        folder = options.quantized if engine == _QUANTIZED else options.optimized
        if engine in _OURS:
            images[engine] = _load_pipeline(options, folder, "0" if engine == _PLAIN else None)
        else:
            calls[engine] = _load_torch(case, compiled=engine == "torch-compile")
        records[engine] = {"ready_s": round(time.perf_counter() - start, 3)}
        if engine in calls:
            prediction = calls[engine]()
        else:
            values = predict(folder / case.source.name, case.arrays(), own=engine != _PLAIN)
            prediction = torch.from_numpy(values).to(case.device)
        records[engine]["relative_error"] = case.error(prediction)
    latencies: dict[str, list[list[float]]] = {engine: [] for engine in calls}
    sustained: dict[str, list[float]] = {engine: [] for engine in records}
    for turn in range(options.rounds):
        order = list(records) if turn % 2 == 0 else list(records)[::-1]
        for engine in order:
            if engine in images:
                sustained[engine].append(round(_sustained_step(images[engine], options.calls), 4))
            else:
                sustained[engine].append(round(_sustained_call(calls[engine], options.calls), 4))
                latencies[engine].append(_time(calls[engine], options.calls))
    for engine, rounds in sustained.items():
        records[engine] |= {"sustained_ms": rounds, "median_sustained_ms": statistics.median(rounds)}
    for engine, turns in latencies.items():
        everything = sorted(latency for turn in turns for latency in turn)
        records[engine] |= {
            "median_ms": round(statistics.median(everything), 4),
            "min_ms": round(everything[0], 4),
            "p99_ms": round(quantile(everything, 0.99), 4),
            "round_medians_ms": [round(statistics.median(turn), 4) for turn in turns],
        }
        records[engine] |= _kernels(calls[engine])
    for engine, generate in images.items():
        records[engine] |= _kernels(partial(generate, _STEPS), 1, _STEPS)
    record = {
        "benchmark": "denoiser",
        "command": shlex.join(sys.orig_argv),
        "case": {name: getattr(options, name) for name in ("batch_size", "height", "width", "tokens")},
        "model": options.pipeline.name,
        "quantization": None if _QUANTIZED not in records else _quantization(options.quantized),
        "engines": records,
        "limits_ms": case.limits_ms(torch.cuda.get_device_name()),
        "environment": environment(),
    }
    append_json(options.json, record)
    _print(records)
    return 0


def _quantization(folder: Path) -> Any:
    """Return how an optimized folder was quantized, from its report."""
    return read_json(folder / REPORT)["options"].get("quantize")


def _print(records: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="one denoiser call")
    titles = {
        "ready_s": "ready, s",
        "median_sustained_ms": "sustained, ms",
        "median_ms": "median, ms",
        "p99_ms": "p99, ms",
        "total_ms": "kernels, ms",
        "launches": "launches",
        "relative_error": "error to fp32",
    }
    table.add_column("engine")
    for title in titles.values():
        table.add_column(title, justify="right")
    for engine, record in records.items():
        table.add_row(engine, *(f"{record[key]:.4g}" if key in record else "" for key in titles))
    console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return guarded(_run, _parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
