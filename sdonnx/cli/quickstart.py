"""`sdonnx quickstart`: generate an image with a sample pipeline and compare with PyTorch.

The steps are sample -> export -> optimize -> image, on the GPU if there is one, otherwise on the CPU.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.metrics import psnr
from sdonnx.sample.shapes.shape_architectures import EXAMPLE_CAPTION, GUIDANCE_SCALE, SHAPES_UNET
from sdonnx.terminal import add_common, add_option, console, step_progress, tensor_progress

__all__ = ["add_arguments", "run"]

_SEED = 0
_REPEATS = 3


@dataclass(frozen=True)
class _Timed:
    """The image of one engine, (H,W,3) from 0 to 1, and its times in seconds."""

    engine: str
    image: npt.NDArray[np.float32]
    load_s: float
    first_s: float
    median_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from sdonnx.sample.write_sample import ARCHITECTURES

    parser.description = "Generate an image with a sample pipeline and compare with PyTorch."
    names = ", ".join(ARCHITECTURES)
    add_option(parser, "--arch", default=SHAPES_UNET, help=f"one of {names} (default: {SHAPES_UNET})")
    add_option(
        parser, "-o", "--output", type=Path, default=Path("quickstart"), help="working folder (default: quickstart)"
    )
    add_option(parser, "-s", "--steps", type=int, default=20, help="denoising steps (default: 20)")
    add_option(parser, "--provider", default=None, help="cuda or cpu (default: cuda if there is a GPU)")
    add_option(parser, "--no_comparison", action="store_true", help="do not generate images with PyTorch")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    import onnxruntime

    from sdonnx.cli.optimize import fusion_table
    from sdonnx.export.export_pipeline import export_pipeline
    from sdonnx.optimize.optimizer import optimize_folder
    from sdonnx.runtime.device.device import device_for
    from sdonnx.sample.write_sample import write_sample

    has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    device = device_for(options.provider or ("cuda" if has_cuda else "cpu"))
    float16 = device.provider == "cuda"
    out, work = console(), options.output
    source, exported, optimized = (work / name for name in ("sample", "onnx", f"optimized-{device.provider}"))
    started = time.perf_counter()
    out.print(f"sample pipeline {options.arch} -> {source}")
    write_sample(options.arch, source, overwrite=True)
    out.print(f"export -> {exported}")
    with tensor_progress() as progress:
        export_pipeline(source, exported, overwrite=True, progress=progress)
    out.print(f"optimize for {device.provider} -> {optimized}")
    with tensor_progress() as progress:
        report = optimize_folder(
            exported, optimized, provider=device.provider, float16=float16, overwrite=True, progress=progress
        )
    images = _REPEATS + 1
    out.print(f"prompt: {EXAMPLE_CAPTION}")
    out.print(f"generate the same image {images} times with each engine, {options.steps} steps each")
    ours = _time_ours(optimized, device.provider, options.steps, work / "image.png")
    types = () if options.no_comparison else (False, True)[: 1 + float16]
    torches = [_time_torch(source, device.provider, half, options.steps) for half in types]
    out.print(fusion_table(report))
    if torches:
        _print_comparison(ours, torches)
    out.print(f"total time: {time.perf_counter() - started:.0f} s")
    return 0


def _timed(
    engine: str,
    load: Callable[[], Callable[[], npt.NDArray[np.float32]]],
    save: Callable[[npt.NDArray[np.float32]], None] = lambda image: None,
) -> _Timed:
    """Load an engine, generate one image, save it, and repeat for the median time."""
    out = console()
    start = time.perf_counter()
    generate = load()
    loaded = time.perf_counter()
    out.print(f"{engine}: loaded in {loaded - start:.1f} s", style="dim")
    image = generate()
    first = time.perf_counter()
    out.print(f"{engine}: image 1 of {_REPEATS + 1}, {first - loaded:.1f} s", style="dim")
    save(image)
    latencies = []
    for repeat in range(_REPEATS):
        begun = time.perf_counter()
        generate()
        latencies.append(time.perf_counter() - begun)
        out.print(f"{engine}: image {repeat + 2} of {_REPEATS + 1}, {latencies[-1]:.1f} s", style="dim")
    return _Timed(engine, image, loaded - start, first - loaded, statistics.median(latencies))


def _time_ours(folder: Path, provider: str, steps: int, path: Path) -> _Timed:
    from PIL import Image

    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    def load() -> Callable[[], npt.NDArray[np.float32]]:
        pipeline = OrtDiffusionPipeline.from_pretrained(folder, provider)
        pipeline.set_progress_bar_config(**step_progress("sdonnx"))
        return lambda: np.asarray(
            pipeline(
                EXAMPLE_CAPTION, num_inference_steps=steps, guidance_scale=GUIDANCE_SCALE, seed=_SEED, output_type="np"
            ).images[0],
            np.float32,
        )

    def save(image: npt.NDArray[np.float32]) -> None:
        Image.fromarray((image * 255).round().astype(np.uint8)).save(path)
        console().print(f"image: {path}")

    return _timed("sdonnx", load, save)


def _time_torch(folder: Path, provider: str, half: bool, steps: int) -> _Timed:
    import torch
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging
    from diffusers.utils.import_utils import is_accelerate_available
    from transformers.utils import logging as transformers_logging

    logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # it logs that an image processor without torchvision is used

    def load() -> Callable[[], npt.NDArray[np.float32]]:
        dtype = torch.float16 if half else torch.float32
        pipeline_class: Any = DiffusionPipeline
        # Without accelerate, diffusers loads a pipeline more slowly, and would log a paragraph about it.
        frugal = is_accelerate_available()
        pipeline: Any = pipeline_class.from_pretrained(folder, dtype=dtype, low_cpu_mem_usage=frugal).to(provider)
        pipeline.set_progress_bar_config(**step_progress("PyTorch"))
        config = (getattr(pipeline, "unet", None) or pipeline.transformer).config
        pixels = config.sample_size * pipeline.vae_scale_factor
        # float32 noise from the CPU, as in this project: torch samples other numbers in half precision.
        shape = (1, config.in_channels, *[config.sample_size] * 2)
        # Pipelines with captions would generate one of the sizes of a table, which small models do not have.
        known = inspect.signature(pipeline.__call__).parameters
        options = {name: False for name in ("clean_caption", "use_resolution_binning") if name in known}

        def generate() -> npt.NDArray[np.float32]:
            noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(_SEED))
            images = pipeline(
                EXAMPLE_CAPTION,
                height=pixels,
                width=pixels,
                num_inference_steps=steps,
                guidance_scale=GUIDANCE_SCALE,
                latents=noise.to(provider, dtype),
                output_type="np",
                **options,
            ).images
            return np.asarray(images[0], np.float32)

        return generate

    return _timed(f"PyTorch {'fp16' if half else 'fp32'}", load)


def _print_comparison(ours: _Timed, torches: list[_Timed]) -> None:
    from rich.table import Table

    table = Table(title="one image")
    for title in ("engine", "load s", "first image s", f"median of {_REPEATS} s", "PSNR to PyTorch fp32 dB"):
        table.add_column(title, justify="left" if title == "engine" else "right")
    for timed in [ours, *torches]:
        agreement = "" if timed is torches[0] else f"{psnr(timed.image, torches[0].image):.1f}"
        seconds = [f"{value:.3f}" for value in (timed.load_s, timed.first_s, timed.median_s)]
        table.add_row(timed.engine, *seconds, agreement)
    console().print(table)
