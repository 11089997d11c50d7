"""Weights of the prompt that differ within a batch, and previews of an image that is being generated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.drawing import MIN_PSNR_DB, generator, switch
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.metrics import psnr

PROMPTS = ("a red fox in the snow", "an owl at night", "a boat")
SCALES = (3.0, 7.5, 12.0)
USUAL: dict[str, Any] = {"height": 32, "width": 40, "num_inference_steps": 4, "output_type": "np"}


@pytest.mark.parametrize("scheduler", ["DDIMScheduler", "EulerAncestralDiscreteScheduler", "UniPCMultistepScheduler"])
def test_each_image_has_its_own_guidance_scale(ours: Any, theirs: Any, scheduler: str) -> None:
    switch(ours, theirs, scheduler)
    images = ours(list(PROMPTS), guidance_scale=list(SCALES), seed=[1, 2, 3], **USUAL).images
    for index, (prompt, scale) in enumerate(zip(PROMPTS, SCALES, strict=True)):
        expected = theirs(prompt, guidance_scale=scale, generator=generator(index + 1), **USUAL).images[0]
        assert psnr(images[index], expected) > MIN_PSNR_DB


def test_equal_scales_run_on_the_device(ours: Any) -> None:
    one = ours(list(PROMPTS), guidance_scale=5.0, seed=0, **USUAL).images
    assert np.array_equal(one, ours(list(PROMPTS), guidance_scale=[5.0] * 3, seed=0, **USUAL).images)
    none = ours(PROMPTS[0], guidance_scale=1.0, seed=0, **USUAL).images
    assert np.array_equal(none, ours(PROMPTS[0], guidance_scale=[0.5], seed=0, **USUAL).images)


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ([7.5], ["list of 1", "each of 2 images"]),
        ([], ["empty list"]),
        ([7.5, float("nan")], ["guidance_scale is nan"]),
        ([7.5, "5"], ["guidance_scale is '5'"]),
        ("75", ["guidance_scale is '75'"]),
    ],
)
def test_guidance_scales_that_cannot_be_used(ours: Any, scales: Any, words: list[str]) -> None:
    with refused(OptionError, *words):
        ours(list(PROMPTS[:2]), guidance_scale=scales, **USUAL)


@pytest.mark.parametrize("scales", [7.5, [5.0, 7.5]])
def test_previews_leave_the_image_as_it_is(ours: Any, scales: Any) -> None:
    arguments = {**USUAL, "output_type": "pil", "seed": 0, "guidance_scale": scales}
    expected = ours(list(PROMPTS[:2]), **arguments).images
    previews = []

    def callback(pipeline: Any, step: int, timestep: float, tensors: dict[str, Any]) -> None:
        previews.append(pipeline.preview(tensors["latents"]))

    images = ours(list(PROMPTS[:2]), callback_on_step_end=callback, **arguments).images
    assert np.array_equal(np.stack(images), np.stack(expected))
    assert [len(each) for each in previews] == [2] * ours.num_timesteps
    assert not np.array_equal(np.asarray(previews[0][0]), np.asarray(images[0]))
    for last, image in zip(previews[-1], images, strict=True):  # the last preview is the image
        assert np.array_equal(np.asarray(last), np.asarray(image))


def test_previews_are_only_for_callbacks(ours: Any) -> None:
    with refused(OptionError, "outside of a callback"):
        ours.preview(np.zeros((1, 4, 8, 8), np.float32))
