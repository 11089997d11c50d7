"""Callbacks that change the prompt or the guidance part way, compared with diffusers' Stable Diffusion pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.diffusers_pipelines import task_of
from support.drawing import MIN_PSNR_DB, USUAL, generator, switch
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.metrics import psnr
from sdonnx.models import abi
from sdonnx.runtime.cuda_graph_cache import CapturedShape
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

Callback = Callable[..., dict[str, Any]]
Change = Callable[[Any, Any], Any]


@pytest.fixture(scope="module")
def owl(micro_torch: Any) -> Any:
    """Hidden states (1,77,D) of another prompt."""
    with torch.inference_mode():
        return micro_torch.encode_prompt("an owl at night", "cpu", 1, False)[0]


def changing(change: Change, step: int = 1) -> Callback:
    """Return a callback that replaces `prompt_embeds` after a step by what `change(pipeline, embeds)` returns."""

    def callback(pipeline: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == step:
            tensors["prompt_embeds"] = change(pipeline, tensors["prompt_embeds"])
        return tensors

    return callback


def off(pipeline: Any, embeds: Any) -> Any:
    """Turn guidance off, as diffusers' guide to callbacks does."""
    pipeline._guidance_scale = 0.0
    return embeds[len(embeds) // 2 :]


def weaker(pipeline: Any, embeds: Any) -> Any:
    assert pipeline.do_classifier_free_guidance
    assert pipeline.guidance_scale == 7.5
    assert pipeline.num_timesteps >= 4
    pipeline._guidance_scale = 2.5
    return embeds


def assert_same(ours: OrtDiffusionPipeline, theirs: Any, callback: Callback, **arguments: Any) -> None:
    """Compare images with the callback; it has to change them."""
    tensors: dict[str, Any] = {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    arguments = USUAL | tensors | arguments
    expected = theirs(**arguments, callback_on_step_end=callback, generator=generator()).images
    found = ours(**arguments, callback_on_step_end=callback, seed=0).images
    assert psnr(found, expected) > MIN_PSNR_DB
    assert psnr(found, ours(**arguments, seed=0).images) < 80


# The last of them steps on the host.
@pytest.mark.parametrize(
    "scheduler", ["PNDMScheduler", "EulerDiscreteScheduler", "HeunDiscreteScheduler", "LMSDiscreteScheduler"]
)
def test_guidance_is_turned_off(scheduler: str, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    switch(ours, theirs, scheduler)
    assert_same(ours, theirs, changing(off))


@pytest.mark.parametrize("scheduler", ["DPMSolverMultistepScheduler", "LMSDiscreteScheduler"])
def test_prompt_changes(scheduler: str, owl: Any, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    switch(ours, theirs, scheduler)

    def change(_: Any, embeds: Any) -> Any:
        if isinstance(embeds, np.ndarray):
            return np.concatenate([embeds[:1], owl.numpy()])
        return torch.cat([embeds[:1], owl])

    assert_same(ours, theirs, changing(change))


def test_tensors_of_torch_and_other_lengths(owl: Any, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    """The graphs for prompts of 154 tokens continue."""
    assert_same(ours, theirs, changing(lambda *_: torch.cat([owl, owl], 1).repeat(2, 1, 1)))


def test_guidance_changes_with_rescaling(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    for change, rescale in ((weaker, 0.0), (weaker, 0.7), (off, 0.7)):
        assert_same(ours, theirs, changing(change), guidance_rescale=rescale)


def test_guidance_is_turned_on(owl: Any, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    def on(pipeline: Any, embeds: Any) -> Any:
        pipeline._guidance_scale = 5.0
        return torch.cat([owl, torch.as_tensor(embeds)])

    assert_same(ours, theirs, changing(on), guidance_scale=1.0)


def test_several_images_and_a_mask(ours: OrtDiffusionPipeline, micro_torch: Any) -> None:
    """The kept area, its noise and the order of images survive the change."""
    inpaint = task_of(micro_torch, "StableDiffusionInpaintPipeline")
    image = np.random.default_rng(0).random((32, 40, 3)).astype(np.float32)
    mask = np.zeros((32, 40), np.float32)
    mask[:, 20:] = 1
    given: dict[str, Any] = {
        "image": image[None].transpose(0, 3, 1, 2),
        "mask_image": mask[None, None],
        "strength": 0.9,
    }
    tensors: dict[str, Any] = {
        name: torch.from_numpy(values) if name != "strength" else values for name, values in given.items()
    }
    common: dict[str, Any] = {**USUAL, "prompt": ["a red fox", "an owl"], "num_images_per_prompt": 2}

    def off_with_mask(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """In diffusers, the callback also has to drop rows of the mask."""
        if step == 1:
            pipeline._guidance_scale = 0.0
            return {name: values[len(values) // 2 :] for name, values in tensors.items()}
        return tensors

    names = ["prompt_embeds", "mask"]
    options: dict[str, Any] = {"callback_on_step_end": off_with_mask, "callback_on_step_end_tensor_inputs": names}
    expected = inpaint(**common, **tensors, **options, generator=generator()).images
    options = {"callback_on_step_end": changing(off), "callback_on_step_end_tensor_inputs": names[:1]}
    found = ours(**common, **options, **(given | {"image": image, "mask_image": mask}), seed=0).images
    assert psnr(found, expected) > MIN_PSNR_DB


@pytest.mark.parametrize("options", [{"max_sizes": 1}, {"low_memory": "offload"}])
def test_few_captured_sizes_and_offloading(
    options: dict[str, Any], micro_cpu: Path, ours: OrtDiffusionPipeline
) -> None:
    arguments = {**USUAL, "callback_on_step_end_tensor_inputs": ["prompt_embeds"], "seed": 0}
    expected = ours(**arguments, callback_on_step_end=changing(off)).images
    with OrtDiffusionPipeline.from_pretrained(micro_cpu, **options) as pipeline:
        for _ in range(2):
            np.testing.assert_array_equal(pipeline(**arguments, callback_on_step_end=changing(off)).images, expected)
        with pytest.raises(ArithmeticError):
            pipeline(**arguments, callback_on_step_end=failing_later)
        np.testing.assert_array_equal(pipeline(**arguments, callback_on_step_end=changing(off)).images, expected)


def failing_later(pipeline: Any, step: int, timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 2:
        raise ArithmeticError
    return changing(off)(pipeline, step, timestep, tensors)


def test_tensors_are_copies_that_may_be_returned(
    ours: OrtDiffusionPipeline, theirs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    names = list(theirs._callback_tensor_inputs)
    received: list[dict[str, Any]] = []

    def callback(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        received.append({name: np.array(values) for name, values in tensors.items()})
        return tensors

    arguments = {**USUAL, "callback_on_step_end_tensor_inputs": names}
    expected = theirs(**arguments, callback_on_step_end=callback, generator=generator()).images
    count = len(received)
    found = ours(**arguments, callback_on_step_end=callback, seed=0).images
    assert psnr(found, expected) > MIN_PSNR_DB
    assert len(received) == 2 * count
    for mine, reference in zip(received[count:], received[:count], strict=True):
        assert list(mine) == list(reference) == names
        for name in names:
            assert psnr(mine[name], reference[name]) > MIN_PSNR_DB

    def scribble(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        negative = tensors.pop("negative_prompt_embeds")
        for values in tensors.values():
            values[:] = 0  # copies, that are not returned
        return {"negative_prompt_embeds": negative + 1}

    assert caplog.messages == []
    again = ours(**arguments, callback_on_step_end=scribble, seed=0).images
    np.testing.assert_array_equal(again, found)
    assert "negative_prompt_embeds from a callback has no effect" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _, embeds: embeds[1:], ["1 rows of encoder_hidden_states", "2 with guidance", "_guidance_scale = 0.0"]),
        (lambda _, embeds: embeds[:, :, 1:], ["prompt_embeds of shape (2, 77, 63)", "(2, 77, 64)"]),
        (lambda _, embeds: embeds[0], ["prompt_embeds of shape (77, 64)"]),
        (lambda _, embeds: embeds * np.nan, ["NaN"]),
        (lambda _, embeds: np.concatenate([embeds, embeds]), ["4 rows of encoder_hidden_states"]),
        (lambda *_: "x", ["prompt_embeds"]),
    ],
)
def test_changes_that_cannot_be_used(change: Change, words: list[str], ours: OrtDiffusionPipeline) -> None:
    tensors: dict[str, Any] = {"callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    with refused(OptionError, *words):
        ours(**USUAL, **tensors, callback_on_step_end=changing(change))
    ours(**USUAL | {"num_inference_steps": 1})


def test_unguided_rows_for_guidance(ours: OrtDiffusionPipeline) -> None:
    """Guidance that is turned on needs rows for every input."""

    def on(pipeline: Any, step: int, timestep: float, tensors: dict[str, Any]) -> None:
        pipeline._guidance_scale = 5.0

    with refused(OptionError, "1 rows of encoder_hidden_states", "2 with guidance"):
        ours(**USUAL, guidance_scale=1.0, callback_on_step_end=on)


@pytest.mark.parametrize("rescale", [0.0, 0.5])  # the sampler runs on the device, or on the host
def test_callbacks_without_tensors_read_nothing(
    ours: OrtDiffusionPipeline, rescale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a GPU computes the next step meanwhile; a callback waits for the step before, and after the last one."""
    waits: list[Any] = []
    calls: list[tuple[int, dict[str, Any]]] = []
    monkeypatch.setattr(Device, "wait", lambda _, mark: waits.append((len(calls), mark)))
    monkeypatch.setattr(Device, "mark", lambda _: len(calls))

    def callback(_: Any, index: int, __: Any, tensors: dict[str, Any]) -> None:
        calls.append((index, tensors))

    ours.scheduler = "euler"
    usual = {**USUAL, "seed": 0, "guidance_rescale": rescale}
    expected = ours(**usual).images
    reads = mock.patch.object(CapturedShape, "read", autospec=True, side_effect=CapturedShape.read)
    with reads as read:
        found = ours(**usual, callback_on_step_end=callback, callback_on_step_end_tensor_inputs=[]).images
    assert np.array_equal(found, expected)
    assert [index for index, _ in calls] == list(range(len(calls)))
    assert not any(tensors for _, tensors in calls)
    assert len(calls) == 4
    if not rescale:
        assert waits == [(1, 0), (2, 1), (3, 3)]
        assert [call.args[1] for call in read.call_args_list].count(abi.STATE) <= 1  # the result


def test_callback_without_tensors_replaces_latents(ours: OrtDiffusionPipeline) -> None:
    given = np.random.default_rng(0).standard_normal((1, 4, 4, 5)).astype(np.float32)

    def replace(_: Any, index: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": given} if index == 1 else {}

    ours.scheduler = "euler"
    found = [
        ours(**USUAL, seed=seed, callback_on_step_end=replace, callback_on_step_end_tensor_inputs=names).images
        for seed in (0, 1)
        for names in ((), ("latents",))
    ]
    assert all(np.array_equal(each, found[0]) for each in found)
