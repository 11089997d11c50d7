"""`python -m sdonnx.quickstart`: the main job on a sample pipeline, and how it compares with PyTorch.

sample -> export -> optimize -> image, on the GPU where there is one, else on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.parity import psnr
from sdonnx.terminal import add_debug, console, guarded, tensor_progress

__all__ = ["main"]

_PROMPT = "a red fox in the snow, oil painting"
_SEED = 0
_REPEATS = 3


@dataclass(frozen=True)
class _Drawn:
    """One engine's image (H,W,3) from 0 to 1, and its times in seconds."""

    engine: str
    image: npt.NDArray[np.float32]
    load_s: float
    first_s: float
    median_s: float


def _parser() -> argparse.ArgumentParser:
    from sdonnx.sample import ARCHITECTURES

    parser = argparse.ArgumentParser(prog="python -m sdonnx.quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="tiny", help=f"one of {', '.join(ARCHITECTURES)} (default tiny)")
    parser.add_argument("-o", "--output", type=Path, default=Path("quickstart"), help="working folder")
    parser.add_argument("-s", "--steps", type=int, default=20, help="denoising steps (default 20)")
    parser.add_argument("--provider", default=None, help="cuda or cpu; default: cuda where there is a GPU")
    add_debug(parser)
    return parser


def _run(options: argparse.Namespace) -> int:
    import onnxruntime

    from sdonnx.export.pipeline import export_pipeline
    from sdonnx.optimize import optimize_folder
    from sdonnx.optimize_pipeline import fusion_table
    from sdonnx.runtime.device import device_for
    from sdonnx.sample import write_sample

    has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    device = device_for(options.provider or ("cuda" if has_cuda else "cpu"))
    float16 = device.provider == "cuda"
    out, work = console(), options.output
    source, exported, optimized = (work / name for name in ("sample", "onnx", f"optimized-{device.provider}"))
    started = time.perf_counter()
    out.print(f"sample pipeline {options.arch} -> {source}")
    write_sample(options.arch, source, overwrite=True)
    out.print(f"export -> {exported}")
    with tensor_progress() as told:
        export_pipeline(source, exported, overwrite=True, progress=told)
    out.print(f"optimize for {device.provider} -> {optimized}")
    with tensor_progress() as told:
        report = optimize_folder(
            exported, optimized, provider=device.provider, float16=float16, overwrite=True, progress=told
        )
    ours = _draw_ours(optimized, device.provider, options.steps, work / "image.png")
    torches = [_draw_torch(source, device.provider, half, options.steps) for half in ((False, True)[: 1 + float16])]
    out.print(fusion_table(report))
    _print_comparison(ours, torches)
    out.print(f"image: {work / 'image.png'}")
    out.print(f"all in {time.perf_counter() - started:.0f} s")
    return 0


def _timed(engine: str, load: Callable[[], Callable[[], npt.NDArray[np.float32]]]) -> _Drawn:
    """Load an engine, draw once, and draw again for the median."""
    start = time.perf_counter()
    draw = load()
    loaded = time.perf_counter()
    image = draw()
    first = time.perf_counter()
    latencies = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        draw()
        latencies.append(time.perf_counter() - begun)
    return _Drawn(engine, image, loaded - start, first - loaded, statistics.median(latencies))


def _draw_ours(folder: Path, provider: str, steps: int, path: Path) -> _Drawn:
    from PIL import Image

    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    def load() -> Callable[[], npt.NDArray[np.float32]]:
        pipeline = OrtDiffusionPipeline.from_pretrained(folder, provider)
        return lambda: np.asarray(
            pipeline(_PROMPT, num_inference_steps=steps, seed=_SEED, output_type="np").images[0], np.float32
        )

    drawn = _timed("sdonnx", load)
    Image.fromarray((drawn.image * 255).round().astype(np.uint8)).save(path)
    return drawn


def _draw_torch(folder: Path, provider: str, half: bool, steps: int) -> _Drawn:
    import torch
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging
    from transformers.utils import logging as transformers_logging

    logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()

    def load() -> Callable[[], npt.NDArray[np.float32]]:
        dtype = torch.float16 if half else torch.float32
        pipeline_class: Any = DiffusionPipeline
        pipeline: Any = pipeline_class.from_pretrained(folder, dtype=dtype).to(provider)
        pipeline.set_progress_bar_config(disable=True)
        pixels = pipeline.unet.config.sample_size * pipeline.vae_scale_factor
        # float32 noise on the CPU, as ours: in half precision torch draws another stream.
        shape = (1, pipeline.unet.config.in_channels, *[pipeline.unet.config.sample_size] * 2)

        def draw() -> npt.NDArray[np.float32]:
            noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(_SEED))
            images = pipeline(
                _PROMPT,
                pixels,
                pixels,
                num_inference_steps=steps,
                latents=noise.to(provider, dtype),
                output_type="np",
            ).images
            return np.asarray(images[0], np.float32)

        return draw

    return _timed(f"PyTorch {'fp16' if half else 'fp32'}", load)


def _print_comparison(ours: _Drawn, torches: list[_Drawn]) -> None:
    from rich.table import Table

    table = Table(title="one image")
    for title in ("engine", "load s", "first image s", f"median of {_REPEATS} s", "PSNR to PyTorch fp32 dB"):
        table.add_column(title, justify="left" if title == "engine" else "right")
    for drawn in [ours, *torches]:
        agreement = "" if drawn is torches[0] else f"{psnr(drawn.image, torches[0].image):.1f}"
        seconds = [f"{value:.3f}" for value in (drawn.load_s, drawn.first_s, drawn.median_s)]
        table.add_row(drawn.engine, *seconds, agreement)
    console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return guarded(_run, _parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
