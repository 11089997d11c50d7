"""Stable Diffusion XL on a GPU: fp16 against torch's float32 and fp16, replay after replay."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from sdonnx.metrics import psnr
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

Build = Callable[[str], tuple[Path, Path]]

# Each follows a different call: a replay that reads captured inputs instead of new ones would repeat the call before.
CASES: list[dict[str, Any]] = [
    {"prompt": "a red fox in the snow"},
    {"prompt": "an old castle", "negative_prompt": "blurred"},
    {"prompt": "an old castle", "negative_prompt": "blurred", "clip_skip": 1},
    {"prompt": "an old castle", "original_size": (300, 211), "crops_coords_top_left": (90, 500)},
    {"prompt": "a red fox in the snow", "prompt_2": "an owl"},
    {"prompt": "a red fox in the snow"},
]


@pytest.mark.parametrize("arch", ["sdxl-tiny", pytest.param("sdxl", marks=pytest.mark.weekly)])
def test_images_agree(arch: str, build: Build, note: Any) -> None:
    source, folder = build(arch)
    pipeline_class: Any = diffusers.StableDiffusionXLPipeline
    theirs: dict[str, list[Any]] = {}
    steps: dict[str, Any] = {"num_inference_steps": 10}
    for name, dtype in (("float32", torch.float32), ("float16", torch.float16)):
        reference = pipeline_class.from_pretrained(source, dtype=dtype).to("cuda")
        reference.set_progress_bar_config(disable=True)
        pixels = reference.unet.config.sample_size * reference.vae_scale_factor
        shape = (1, 4, pixels // 8, pixels // 8)
        theirs[name] = []
        for case in CASES:
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to("cuda", dtype)
            theirs[name].append(reference(**case, **steps, latents=noise, output_type="np").images)
        del reference
        torch.cuda.empty_cache()
    start = time.perf_counter()
    with OrtDiffusionPipeline.from_pretrained(folder) as ours:
        loaded = time.perf_counter() - start
        for index, case in enumerate(CASES):
            start = time.perf_counter()
            generated = ours(**case, **steps, seed=3, output_type="np").images
            row: dict[str, Any] = {
                "pipeline": arch,
                "case": index,
                "seconds": time.perf_counter() - start,
                "load_s": loaded,
            }
            row["psnr_db"] = psnr(generated, theirs["float32"][index])
            row["torch_fp16_psnr_db"] = psnr(theirs["float16"][index], theirs["float32"][index])
            note("xl", row)
            assert np.std(generated) > 0.02
            # Not much farther from float32 than torch's float16.
            assert row["psnr_db"] > min(45.0, row["torch_fp16_psnr_db"] - 6), row
