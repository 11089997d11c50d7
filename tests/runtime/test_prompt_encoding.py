"""`encode_prompt`, compared with diffusers' Stable Diffusion pipeline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.pipelines import refused

from sdonnx.errors import OptionError, PromptError
from sdonnx.metrics import relative_error
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

SIZE: dict[str, Any] = {"height": 32, "width": 40, "num_inference_steps": 2, "output_type": "np"}

CASES: dict[str, dict[str, Any]] = {
    "one": {"prompt": "a red fox"},
    "lists": {"prompt": ["a red fox", "an owl"], "negative_prompt": ["blurry", "grey"]},
    "several images": {"prompt": ["a red fox", "an owl"], "num_images_per_prompt": 3},
    "skipped layers": {"prompt": "a red fox", "negative_prompt": "blurry", "clip_skip": 1},
    "no guidance": {"prompt": ["a red fox", "an owl"], "do_classifier_free_guidance": False},
}


@pytest.mark.parametrize("case", CASES)
def test_embeddings_agree(case: str, ours: OrtDiffusionPipeline, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # diffusers looks for the final norm where transformers 4 has it.
    norm = SimpleNamespace(final_layer_norm=theirs.text_encoder.final_layer_norm)
    monkeypatch.setattr(theirs.text_encoder, "text_model", norm, raising=False)
    usual = {"num_images_per_prompt": 1, "do_classifier_free_guidance": True}
    with torch.inference_mode():
        expected = theirs.encode_prompt(device="cpu", **(usual | CASES[case]))
    found = ours.encode_prompt(device="cpu", **CASES[case])
    assert len(found) == len(expected) == 2
    for array, tensor in zip(found, expected, strict=True):
        if tensor is None:
            assert array is None
            continue
        assert array is not None
        assert array.dtype == np.float32
        assert array.shape == tensor.shape
        assert relative_error(array, tensor.numpy()) < 1e-5


def test_positional_arguments_have_the_order_of_diffusers(ours: OrtDiffusionPipeline) -> None:
    named = ours.encode_prompt("a red fox", num_images_per_prompt=2, negative_prompt="blurry", clip_skip=1)
    found = ours.encode_prompt("a red fox", "cpu", 2, True, "blurry", None, None, None, 1)
    np.testing.assert_array_equal(np.stack(found), np.stack(named))  # type: ignore[arg-type]
    only, none = ours.encode_prompt("a red fox", "cpu", 1, False)
    assert none is None
    assert only is not None
    assert only.shape[0] == 1


def test_embeddings_give_the_image_of_the_texts(ours: OrtDiffusionPipeline) -> None:
    expected = ours("a red fox", negative_prompt="blurry", clip_skip=1, **SIZE, seed=0).images
    own, negative = ours.encode_prompt("a red fox", negative_prompt="blurry", clip_skip=1)
    found = ours(prompt_embeds=own, negative_prompt_embeds=negative, **SIZE, seed=0).images
    np.testing.assert_array_equal(found, expected)


def test_given_embeddings_are_repeated(ours: OrtDiffusionPipeline) -> None:
    own, negative = ours.encode_prompt(["a red fox", "an owl"])
    again = ours.encode_prompt(num_images_per_prompt=2, prompt_embeds=own, negative_prompt_embeds=negative)
    np.testing.assert_array_equal(again[0], np.repeat(own, 2, 0))  # type: ignore[arg-type]
    np.testing.assert_array_equal(again[1], np.repeat(negative, 2, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("positional", "arguments", "error", "words"),
    [
        ((), {}, PromptError, ["no prompt"]),
        (("a fox",), {"prompt_2": "an owl"}, PromptError, ["prompt_2 given"]),
        (("a fox", "cpu", 2), {"num_images_per_prompt": 3}, OptionError, ["num_images_per_prompt given twice"]),
        (("a fox", *[None] * 9), {}, OptionError, ["10 positional arguments", "at most 9"]),
        (("a fox",), {"lora_scale": 0.5}, OptionError, ["set_adapters"]),
        (("a fox",), {"clip_skip": 99}, OptionError, ["clip_skip is 99"]),
        (("a fox",), {"prompt_embeds": np.zeros((1, 77, 64))}, PromptError, ["prompt and prompt_embeds"]),
        (("a fox",), {"negative_prompt_embeds": np.zeros((1, 77, 5))}, OptionError, ["of width 5"]),
    ],
)
def test_bad_arguments_are_refused(
    positional: tuple[Any, ...], arguments: dict[str, Any], error: Any, words: list[str], ours: OrtDiffusionPipeline
) -> None:
    with refused(error, *words):
        ours.encode_prompt(*positional, **arguments)
