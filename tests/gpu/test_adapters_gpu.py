"""IP-Adapters on a GPU: float16 against torch, and scales and images that change without a new capture."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from sdonnx.metrics import psnr
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.architecture import ADAPTER_FILES

Build = Callable[[str], tuple[Path, Path]]

# Each follows a different call: a replay that reads captured inputs instead of new ones would repeat the call before.
CASES: list[tuple[Any, tuple[int, int]]] = [
    ([1.0, 0.0], (0, 1)),
    ([0.3, 0.7], (0, 1)),
    ([0.3, 0.7], (2, 1)),
    ([0.0, 0.0], (2, 1)),
    ([{"up": 1.0}, {"down": 0.5, "mid": 0.5}], (2, 1)),
    ([1.0, 0.0], (0, 1)),
]


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((300, 260), Image.Resampling.BICUBIC)


FULL = [pytest.param(f"{name}-ip-adapter", marks=pytest.mark.weekly) for name in ("sd15", "sdxl")]


@pytest.mark.parametrize("arch", ["tiny-ip-adapter", "sdxl-tiny-ip-adapter", *FULL])
def test_images_agree_and_nothing_is_captured_again(arch: str, build: Build, note: Any) -> None:
    source, folder = build(arch)
    pipeline_class: Any = diffusers.DiffusionPipeline
    theirs: dict[str, list[Any]] = {}
    steps: dict[str, Any] = {"num_inference_steps": 10}
    for name, dtype in (("float32", torch.float32), ("float16", torch.float16)):
        reference = pipeline_class.from_pretrained(source, dtype=dtype).to("cuda")
        reference.set_progress_bar_config(disable=True)
        reference.load_ip_adapter(str(source), subfolder="ip_adapter", weight_name=list(ADAPTER_FILES))
        pixels = reference.unet.config.sample_size * reference.vae_scale_factor
        shape = (1, 4, pixels // 8, pixels // 8)
        theirs[name] = []
        for scale, images in CASES:
            reference.set_ip_adapter_scale(scale)
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to("cuda", dtype)
            given: dict[str, Any] = {
                "ip_adapter_image": [picture(seed) for seed in images],
                "latents": noise,
                "output_type": "np",
            }
            theirs[name].append(reference("a red fox", **steps, **given).images)
        del reference
        torch.cuda.empty_cache()
    with OrtDiffusionPipeline.from_pretrained(folder) as ours:
        for index, (scale, images) in enumerate(CASES):
            start = time.perf_counter()
            given = {"ip_adapter_image": [picture(seed) for seed in images], "ip_adapter_scale": scale}
            generated = ours("a red fox", **steps, **given, seed=3, output_type="np").images
            row: dict[str, Any] = {"pipeline": arch, "case": index, "seconds": time.perf_counter() - start}
            row["psnr_db"] = psnr(generated, theirs["float32"][index])
            row["torch_fp16_psnr_db"] = psnr(theirs["float16"][index], theirs["float32"][index])
            note("adapters", row)
            assert np.std(generated) > 0.02
            assert row["psnr_db"] > min(45.0, row["torch_fp16_psnr_db"] - 6), row
        assert len(ours.captured_sizes) == 1
