"""Image-to-image and inpainting compared with diffusers' pipelines, and rejected arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support.diffusers_pipelines import in_diffusers, task_of
from support.drawing import MIN_PSNR_DB, USUAL, assert_same_images, generator
from support.inpainting import inpainting_pipeline
from support.pipeline_cache import PipelineCache
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.metrics import psnr
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

HEIGHT, WIDTH = 32, 40
OWN_SIZE: dict[str, Any] = {"height": ..., "width": ...}  # that of the image
SCHEDULERS = [
    "PNDMScheduler",
    "DDIMScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
    "DEISMultistepScheduler",  # no plan follows it: stepped by diffusers on the host
]


def picture(seed: int = 0, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size)


def mask(size: tuple[int, int] = (WIDTH, HEIGHT)) -> Image.Image:
    return Image.fromarray((np.random.default_rng(1).random((4, 5)) < 0.5).astype(np.uint8) * 255).resize(size)


def give(class_name: str, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    theirs.scheduler = getattr(diffusers, class_name).from_config(theirs.scheduler.config)
    ours.scheduler = theirs.scheduler  # the object: a plan follows it where there is one


@pytest.mark.parametrize("strength", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("class_name", SCHEDULERS)
def test_image_to_image(class_name: str, strength: float, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    give(class_name, ours, theirs)
    pipeline = task_of(theirs, "StableDiffusionImg2ImgPipeline")
    assert_same_images(ours, pipeline, image=picture(), strength=strength, num_inference_steps=7, **OWN_SIZE)


@pytest.mark.parametrize("strength", [0.3, 0.99, 1.0])
@pytest.mark.parametrize("class_name", SCHEDULERS)
def test_inpainting_by_blending(class_name: str, strength: float, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    give(class_name, ours, theirs)
    pipeline = task_of(theirs, "StableDiffusionInpaintPipeline")
    assert_same_images(ours, pipeline, image=picture(), mask_image=mask(), strength=strength, num_inference_steps=7)
    # The kept area is unchanged, and a later call without a mask keeps nothing.
    assert_same_images(ours, theirs, num_inference_steps=2)


@pytest.mark.parametrize("class_name", ["DDIMScheduler", "DEISMultistepScheduler"])
@pytest.mark.parametrize(
    "extra", [{"guidance_rescale": 0.7}, {"guidance_rescale": 0.7, "eta": 0.6}, {"guidance_scale": 1.0}]
)
def test_guidance_of_images(class_name: str, extra: dict[str, float], ours: OrtDiffusionPipeline, theirs: Any) -> None:
    """Compare rescaled guidance with a prompt only, since diffusers does not support it with an image."""
    give(class_name, ours, theirs)
    assert_same_images(ours, theirs, **extra)


@pytest.mark.parametrize("listed", [False, True], ids=["one generator", "a list"])
def test_several_images(listed: bool, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    give("DDIMScheduler", ours, theirs)
    pipeline = task_of(theirs, "StableDiffusionImg2ImgPipeline")
    arguments: dict[str, Any] = {"prompt": ["a fox", "an owl"], "image": [picture(0), picture(1)]}
    arguments |= {"num_inference_steps": 4, "strength": 0.6, "eta": 0.4, "output_type": "np"}
    pair = [[generator(3), generator(4)] if listed else generator(3) for _ in range(2)]
    expected = pipeline(**arguments, generator=pair[0]).images
    assert psnr(ours(**arguments, generator=pair[1]).images, expected) > MIN_PSNR_DB


@pytest.mark.filterwarnings("ignore:You have passed 4 text prompts:FutureWarning")
def test_one_image_for_several_prompts(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    give("EulerDiscreteScheduler", ours, theirs)
    pipeline = task_of(theirs, "StableDiffusionImg2ImgPipeline")
    several: dict[str, Any] = {"prompt": ["a fox", "an owl"], "num_images_per_prompt": 2}
    assert_same_images(ours, pipeline, **several, image=picture(), num_inference_steps=3, **OWN_SIZE)


def test_arrays_and_tensors(ours: OrtDiffusionPipeline) -> None:
    arguments: dict[str, Any] = {"prompt": "a fox", "num_inference_steps": 2, "seed": 0, "output_type": "np"}
    expected = ours(**arguments, image=picture()).images
    array = np.asarray(picture(), np.float32) / 255
    tensor = torch.from_numpy(array).permute(2, 0, 1)[None]
    for given in (array, array[None], tensor):
        assert psnr(ours(**arguments, image=given).images, expected) > MIN_PSNR_DB


def test_default_size_is_that_of_the_image(ours: OrtDiffusionPipeline) -> None:
    arguments: dict[str, Any] = {"prompt": "fox", "num_inference_steps": 2}
    assert ours(**arguments, image=picture(size=(45, 38))).images[0].size == (40, 32)
    assert ours(**arguments, image=picture(), height=48, width=24).images[0].size == (24, 48)
    assert ours(**arguments, image=picture(), mask_image=mask()).images[0].size == (128, 128)


@pytest.fixture(scope="module")
def inpainting(pipelines: PipelineCache, micro: Path) -> tuple[Path, Path]:
    """Return an inpainting pipeline, with 9 input channels of the UNet, and its optimized folder."""
    source = inpainting_pipeline(pipelines, micro)
    return source, pipelines.optimized(pipelines.exported(source), provider="cpu")


@pytest.mark.parametrize("strength", [0.6, 1.0])
def test_denoiser_trained_to_inpaint(strength: float, inpainting: tuple[Path, Path]) -> None:
    source, folder = inpainting
    pipeline = in_diffusers(source, "StableDiffusionInpaintPipeline")
    arguments: dict[str, Any] = {"image": picture(), "mask_image": mask(), "strength": strength}
    with OrtDiffusionPipeline.from_pretrained(folder) as ours:
        expected = assert_same_images(ours, pipeline, **arguments)
        rescaled = ours(**USUAL, **arguments, seed=0, guidance_rescale=1e-9).images
        assert psnr(rescaled, expected) > MIN_PSNR_DB
        with refused(OptionError, "trained to inpaint", "image and mask_image"):
            ours("a fox")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mask_image": mask()}, ["mask_image without image"]),
        ({"strength": 0.5}, ["strength without image"]),
        ({"image": picture(), "strength": 1.5}, ["strength is 1.5", "0 to 1"]),
        ({"image": picture(), "strength": float("nan")}, ["strength is nan"]),
        ({"image": picture(), "strength": 0.01}, ["strength 0.01", "at least one step"]),
        ({"image": picture(), "latents": np.zeros((1, 4, 4, 5))}, ["latents and image"]),
        ({"image": [picture()] * 3}, ["3 images", "batch of 1"]),
        ({"image": []}, ["image"]),
        ({"image": "fox.png"}, ["image", "str"]),
        ({"image": picture(), "height": 33}, ["height is 33"]),
        ({"image": picture(), "guidance_rescale": 2}, ["guidance_rescale is 2"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_rejected_arguments(arguments: dict[str, Any], words: list[str], ours: OrtDiffusionPipeline) -> None:
    ran: list[int] = []
    with refused(OptionError, *words):
        ours("fox", num_inference_steps=4, **arguments, callback_on_step_end=lambda _, step, *__: ran.append(step))
    assert ran == []
