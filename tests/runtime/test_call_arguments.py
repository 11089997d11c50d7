"""Arguments and results that a call shares with diffusers' pipelines: schedules, seeds, callbacks, tuples, tensors."""

from __future__ import annotations

import importlib.util
from typing import Any

import diffusers
import pytest
import torch
from support.drawing import MIN_PSNR_DB, assert_same_images, generator, switch
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.metrics import psnr
from sdonnx.runtime.pipeline import ImageOutput, OrtDiffusionPipeline

SIZE: dict[str, Any] = {"height": 32, "width": 40, "num_inference_steps": 2}
ALIGNED_STEPS = [999, 850, 545, 233, 24]  # of Align Your Steps, arXiv:2404.14507


@pytest.mark.parametrize(
    ("scheduler", "schedule"),
    [
        ("DPMSolverMultistepScheduler", {"timesteps": ALIGNED_STEPS}),
        ("EulerDiscreteScheduler", {"sigmas": [14.0, 3.0, 0.9, 0.2, 0.0]}),
    ],
)
def test_custom_schedules_agree(
    scheduler: str, schedule: dict[str, Any], ours: OrtDiffusionPipeline, theirs: Any
) -> None:
    switch(ours, theirs, scheduler)
    assert_same_images(ours, theirs, **schedule)


def test_scheduler_object_follows_custom_timesteps(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    scheduler = diffusers.LMSDiscreteScheduler.from_config(theirs.scheduler.config)
    ours.scheduler = scheduler
    with refused(OptionError, "timesteps given", "LMSDiscreteScheduler"):
        ours("a fox", **SIZE, timesteps=ALIGNED_STEPS)
    for pipeline in (ours, theirs):
        pipeline.scheduler = diffusers.DDPMScheduler.from_config(theirs.scheduler.config, variance_type="fixed_small")
    assert_same_images(ours, theirs, timesteps=ALIGNED_STEPS)


def test_default_scheduler_refuses_custom_timesteps(ours: OrtDiffusionPipeline) -> None:
    with refused(OptionError, "timesteps given", "DPMSolverMultistepScheduler"):
        ours("a fox", **SIZE, timesteps=ALIGNED_STEPS)
    with refused(OptionError, "timesteps and sigmas"):
        ours("a fox", **SIZE, timesteps=ALIGNED_STEPS, sigmas=[1.0, 0.0])


def test_tuple(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    expected = theirs("a fox", **SIZE, return_dict=False, generator=generator(), output_type="np")
    found: Any = ours("a fox", **SIZE, return_dict=False, seed=0, output_type="np")
    assert isinstance(found, tuple)
    assert len(found) == len(expected) == 2
    assert found[1] is expected[1] is None
    assert psnr(found[0], expected[0]) > MIN_PSNR_DB


@pytest.mark.parametrize("flags", [None, [False]])
def test_output_is_a_mapping_as_in_diffusers(flags: list[bool] | None) -> None:
    from diffusers.pipelines.stable_diffusion.pipeline_output import StableDiffusionPipelineOutput

    images: Any = ["an image"]
    theirs: Any = StableDiffusionPipelineOutput(images=images, nsfw_content_detected=flags)
    ours = ImageOutput(images, 7, flags)
    assert list(ours) == list(theirs)
    assert len(ours) == len(theirs)
    assert dict(ours) == dict(theirs)
    assert ours.to_tuple() == theirs.to_tuple()
    assert ours[0] is theirs[0] is ours["images"] is ours.images
    assert ours[:1] == theirs[:1]
    assert ours[-1] == theirs[-1]
    assert [*ours.keys()] == [*theirs.keys()]
    for output in (ours, theirs):
        with pytest.raises(KeyError):
            output["seed"]
        with pytest.raises(IndexError):
            output[2]


def test_tensors(ours: OrtDiffusionPipeline, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = theirs("a fox", **SIZE, generator=generator(), output_type="pt").images
    found = ours("a fox", **SIZE, seed=0, output_type="pt").images
    assert isinstance(found, torch.Tensor)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert psnr(found.numpy(), expected.numpy()) > MIN_PSNR_DB
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused(OptionError, "torch is not installed"):
        ours("a fox", **SIZE, output_type="pt")


def test_seed_for_each_image(ours: OrtDiffusionPipeline) -> None:
    arguments: dict[str, Any] = {"prompt": ["a fox", "an owl"], **SIZE, "output_type": "np"}
    output = ours(**arguments, seed=[3, 4])
    assert output.seed == [3, 4]
    expected = ours(**arguments, generator=[generator(3), generator(4)]).images
    assert psnr(output.images, expected) > MIN_PSNR_DB
    refusals: list[tuple[Any, str]] = [([3], "1 seeds"), ([3, "x"], "'x'"), ([], "0 seeds")]
    for seeds, word in refusals:
        with refused(OptionError, word):
            ours(**arguments, seed=seeds)
    with refused(OptionError, "both a seed and a generator"):
        ours(**arguments, seed=[3, 4], generator=[generator(3), generator(4)])


@pytest.mark.parametrize("names", [["add_time_ids"], ["latents", "mask"], "latents", None, [5]])
def test_other_tensors_are_refused(names: Any, ours: OrtDiffusionPipeline) -> None:
    with refused(OptionError, "callback_on_step_end_tensor_inputs", "'latents', 'negative_prompt_embeds'"):
        ours("a fox", **SIZE, callback_on_step_end_tensor_inputs=names)


def test_cross_attention_kwargs(ours: OrtDiffusionPipeline) -> None:
    ours("a fox", **SIZE, cross_attention_kwargs=None)
    ours("a fox", **SIZE, cross_attention_kwargs={})
    with refused(OptionError, "LoRA", "set_adapters"):
        ours("a fox", **SIZE, cross_attention_kwargs={"scale": 0.5})
    with refused(OptionError, "cross_attention_kwargs is {'gligen'"):
        ours("a fox", **SIZE, cross_attention_kwargs={"gligen": {}})
