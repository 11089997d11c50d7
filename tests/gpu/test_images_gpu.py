"""Stable Diffusion XL and IP-Adapters on a GPU: images in float16 against torch's, replay after replay.

A replay that reads captured inputs instead of new ones would repeat the call before, so each case follows another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.diffusers_pipelines import on_cuda

from sdonnx.metrics import psnr
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.architecture import ADAPTER_FILES

PROMPT: dict[str, Any] = {"prompt": "a red fox in the snow"}
CASTLE: dict[str, Any] = {"prompt": "an old castle", "negative_prompt": "blurred"}
OF_XL: list[dict[str, Any]] = [
    PROMPT,
    CASTLE,
    CASTLE | {"clip_skip": 1},
    {"prompt": "an old castle", "original_size": (300, 211), "crops_coords_top_left": (90, 500)},
    PROMPT | {"prompt_2": "an owl"},
    PROMPT,
]


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((300, 260), Image.Resampling.BICUBIC)


OF_ADAPTERS: list[dict[str, Any]] = [
    PROMPT | {"ip_adapter_scale": scale, "ip_adapter_image": [picture(seed) for seed in seeds]}
    for scale, seeds in (
        ([1.0, 0.0], (0, 1)),
        ([0.3, 0.7], (0, 1)),
        ([0.3, 0.7], (2, 1)),
        ([0.0, 0.0], (2, 1)),
        ([{"up": 1.0}, {"down": 0.5, "mid": 0.5}], (2, 1)),
        ([1.0, 0.0], (0, 1)),
    )
]


def images_of_torch(source: Path, dtype: torch.dtype, cases: list[dict[str, Any]]) -> list[Any]:
    pipeline = on_cuda(source, dtype)
    if cases is OF_ADAPTERS:
        pipeline.load_ip_adapter(str(source), subfolder="ip_adapter", weight_name=list(ADAPTER_FILES))
    pixels = pipeline.unet.config.sample_size * pipeline.vae_scale_factor
    images = []
    for case in cases:
        arguments = dict(case)
        if "ip_adapter_scale" in case:
            pipeline.set_ip_adapter_scale(arguments.pop("ip_adapter_scale"))
        noise = torch.randn((1, 4, pixels // 8, pixels // 8), generator=torch.Generator().manual_seed(3))
        noise = noise.to("cuda", dtype)
        images.append(pipeline(**arguments, num_inference_steps=10, latents=noise, output_type="np").images)
    del pipeline
    torch.cuda.empty_cache()
    return images


FULL = [pytest.param(name, marks=pytest.mark.weekly) for name in ("sdxl", "sd15-ip-adapter", "sdxl-ip-adapter")]


@pytest.mark.parametrize("arch", ["sdxl-tiny", "tiny-ip-adapter", "sdxl-tiny-ip-adapter", *FULL])
def test_images_agree_and_nothing_is_captured_again(
    arch: str, build: Callable[[str], tuple[Path, Path]], note: Any
) -> None:
    source, folder = build(arch)
    cases = OF_ADAPTERS if arch.endswith("ip-adapter") else OF_XL
    exact, half = (images_of_torch(source, dtype, cases) for dtype in (torch.float32, torch.float16))
    start = time.perf_counter()
    with OrtDiffusionPipeline.from_pretrained(folder) as ours:
        load_s = time.perf_counter() - start
        for index, case in enumerate(cases):
            start = time.perf_counter()
            generated = ours(**case, num_inference_steps=10, seed=3, output_type="np").images
            row: dict[str, Any] = {"pipeline": arch, "case": index, "seconds": time.perf_counter() - start}
            row |= {"load_s": load_s, "psnr_db": psnr(generated, exact[index])}
            row["torch_fp16_psnr_db"] = psnr(half[index], exact[index])
            note("adapters" if cases is OF_ADAPTERS else "xl", row)
            assert np.std(generated) > 0.02
            # Not much farther from float32 than torch's float16.
            assert row["psnr_db"] > min(45.0, row["torch_fp16_psnr_db"] - 6), row
        assert len(ours.captured_sizes) == 1
