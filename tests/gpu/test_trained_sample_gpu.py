"""The trained sample in fp16 on the GPU: images show their captions, and agree with diffusers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from shape_evaluation import generate
from support.diffusers_pipelines import on_cuda
from support.recording import Note

from sdonnx.metrics import psnr
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.shapes.shape_architectures import GUIDANCE_SCALE
from sdonnx.sample.shapes.shape_judge import held_out_captions, score_images, summarize

COUNT, STEPS, SEED = 40, 25, 7


def test_images_show_their_captions(build: Callable[[str], tuple[Path, Path]], note: Note) -> None:
    source, folder = build("shapes")
    captions = held_out_captions(COUNT, SEED)
    reference = on_cuda(source, torch.float32)
    expected = generate(reference, captions, steps=STEPS, guidance_scale=GUIDANCE_SCALE, seed=SEED, batch=COUNT)
    noise = torch.randn(COUNT, 4, 16, 16, generator=torch.Generator("cpu").manual_seed(SEED)).numpy()
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        made = pipeline(
            list(captions), num_inference_steps=STEPS, guidance_scale=GUIDANCE_SCALE, latents=noise, output_type="np"
        ).images
    images = np.round(np.asarray(made) * 255).astype(np.uint8)
    decibels = [psnr(each / 255, other / 255) for each, other in zip(images, expected, strict=True)]
    ours, theirs = (summarize(score_images(each, captions)) for each in (images, expected))
    note("trained sample", {"psnr_db": sorted(decibels), "ours": ours, "torch": theirs})
    assert np.median(decibels) > 35
    assert ours["right"]["right"] >= theirs["right"]["right"] - 1 >= COUNT - 3
