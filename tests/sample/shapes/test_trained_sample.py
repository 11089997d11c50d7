"""The trained sample `shapes`: images of captions by diffusers and by the optimized folder, judged by rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from shape_evaluation import generate
from support.diffusers_pipelines import in_diffusers

from sdonnx.__main__ import main
from sdonnx.metrics import psnr
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.shapes.shape_architectures import EXAMPLE_CAPTION, GUIDANCE_SCALE
from sdonnx.sample.shapes.shape_judge import score_images, summarize
from sdonnx.sample.shapes.shape_scenes import PHRASES, is_held_out, read_caption

# One of each relation. None of these drawings was part of the training.
CAPTIONS = (
    EXAMPLE_CAPTION,
    "a small yellow triangle to the right of a small blue square",
    "a small green triangle over a purple circle",
    "a yellow cross below a small black triangle",
    "a red cross in a purple square",
    "a purple square around a small black circle",
)
STEPS, SEED = 15, 0


@pytest.fixture(scope="module")
def images(shapes: Path) -> npt.NDArray[np.uint8]:
    """An image (H,W,3) of each caption by diffusers in float32."""
    return generate(
        in_diffusers(shapes), CAPTIONS, steps=STEPS, guidance_scale=GUIDANCE_SCALE, seed=SEED, batch=len(CAPTIONS)
    )


def test_captions_are_of_every_relation() -> None:
    scenes = [read_caption(text) for text in CAPTIONS]
    assert [scene.relation for scene in scenes] == list(PHRASES)
    assert all(map(is_held_out, scenes))


def test_images_show_their_captions(images: npt.NDArray[np.uint8]) -> None:
    assert images.shape == (len(CAPTIONS), 64, 64, 3)
    scores = summarize(score_images(images, CAPTIONS))
    assert {measure: each["right"] for measure, each in scores.items()} == {
        measure: each["count"] for measure, each in scores.items()
    }
    # Each is wrong for the caption of another image.
    other = summarize(score_images(np.roll(images, 1, axis=0), CAPTIONS))
    assert other["right"]["right"] == 0


@pytest.mark.weekly
def test_the_optimized_folder_generates_the_same_images(images: npt.NDArray[np.uint8], shapes_cpu: Path) -> None:
    noise = torch.randn(len(CAPTIONS), 4, 16, 16, generator=torch.Generator("cpu").manual_seed(SEED)).numpy()
    with OrtDiffusionPipeline.from_pretrained(shapes_cpu) as pipeline:
        ours = pipeline(
            list(CAPTIONS), num_inference_steps=STEPS, guidance_scale=GUIDANCE_SCALE, latents=noise, output_type="np"
        ).images
    pixels = np.round(np.asarray(ours) * 255).astype(np.uint8)
    assert min(psnr(each / 255, image / 255) for each, image in zip(pixels, images, strict=True)) > 60
    assert summarize(score_images(pixels, CAPTIONS))["right"]["right"] == len(CAPTIONS)


def test_a_seed_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["sample", "--arch", "shapes", "-o", str(tmp_path / "out"), "--seed", "1"]) == 2
    assert "the seed 1 for shapes, whose weights are trained; expected no seed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
