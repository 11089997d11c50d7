"""Texts next to embeddings, in calls and in `encode_prompt`, compared with diffusers' Stable Diffusion pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.drawing import MIN_PSNR_DB, assert_same_images
from support.pipelines import refused

from sdonnx.errors import DeviceMemoryError, OptionError, PromptError
from sdonnx.metrics import psnr, relative_error
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

USUAL: dict[str, Any] = {"height": 32, "width": 40, "num_inference_steps": 2, "output_type": "np"}


@pytest.fixture(scope="module")
def given(micro_torch: Any) -> dict[str, Any]:
    """Embeddings of two prompts and of two negative prompts, by diffusers."""
    with torch.inference_mode():
        own, negative = micro_torch.encode_prompt(["a red fox", "an owl"], "cpu", 1, True, ["blurry", "grey"])
    return {"prompt_embeds": own, "negative_prompt_embeds": negative}


# The first, both, or 20 tokens of the first embeddings.
FIRST, BOTH, SHORT = np.s_[:1], np.s_[:], np.s_[:1, :20]


@pytest.mark.parametrize(
    ("texts", "name", "part"),
    [
        ({"prompt": "a red fox"}, "negative_prompt_embeds", FIRST),
        ({"negative_prompt": "blurry"}, "prompt_embeds", FIRST),
        ({}, "prompt_embeds", FIRST),
        ({"prompt": "a red fox", "num_images_per_prompt": 2}, "negative_prompt_embeds", FIRST),
        ({"negative_prompt": "blurry", "num_images_per_prompt": 2}, "prompt_embeds", FIRST),
        ({"negative_prompt": "blurry", "guidance_scale": 1.0}, "prompt_embeds", FIRST),
        ({"prompt": "a red fox", "guidance_scale": 1.0}, "negative_prompt_embeds", FIRST),
        ({"prompt": ["a red fox", "an owl"], "num_images_per_prompt": 2}, "negative_prompt_embeds", BOTH),
        ({"negative_prompt": "blurry"}, "prompt_embeds", SHORT),
    ],
)
def test_images_agree(
    texts: dict[str, Any], name: str, part: Any, given: dict[str, Any], ours: OrtDiffusionPipeline, theirs: Any
) -> None:
    assert_same_images(ours, theirs, **{"prompt": ..., **texts, name: given[name][part]})


def test_layers_are_skipped_for_the_prompt_only(given: dict[str, Any], ours: OrtDiffusionPipeline) -> None:
    embeds = ours.encode_prompt("a red fox", clip_skip=1, negative_prompt="blurry")
    expected = ours(prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1], **USUAL, seed=0).images
    found = ours("a red fox", negative_prompt_embeds=embeds[1], clip_skip=1, **USUAL, seed=0).images
    assert psnr(found, expected) > MIN_PSNR_DB


def test_weights_next_to_embeddings(given: dict[str, Any], ours: OrtDiffusionPipeline) -> None:
    weighted: dict[str, Any] = {"prompt_weighting": "a1111"}
    own, _ = ours.encode_prompt("a (red:1.4) fox", **weighted)
    negative = given["negative_prompt_embeds"][:1]
    expected = ours(prompt_embeds=own, negative_prompt_embeds=negative, **USUAL, seed=0).images
    found = ours("a (red:1.4) fox", negative_prompt_embeds=negative, **weighted, **USUAL, seed=0).images
    assert psnr(found, expected) > MIN_PSNR_DB
    with refused(PromptError, "prompt_weighting given"):
        ours(prompt_embeds=own, negative_prompt_embeds=negative, **weighted, **USUAL)


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        ({"prompt": "a red fox"}, "negative_prompt_embeds"),
        ({"prompt": None, "negative_prompt": "blurry"}, "prompt_embeds"),
        ({"prompt": None}, "prompt_embeds"),
    ],
)
def test_missing_embeddings_are_encoded(
    texts: dict[str, Any], name: str, given: dict[str, Any], ours: OrtDiffusionPipeline, theirs: Any
) -> None:
    arguments = {"num_images_per_prompt": 2, "do_classifier_free_guidance": True, **texts, name: given[name][FIRST]}
    with torch.inference_mode():
        expected = theirs.encode_prompt(device="cpu", **arguments)
    for array, tensor in zip(ours.encode_prompt(**arguments), expected, strict=True):
        assert array is not None
        assert relative_error(array, tensor.numpy()) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"prompt": "fox", "prompt_embeds": (1, 77, 64)}, PromptError, ["prompt and prompt_embeds"]),
        (
            {"prompt": "fox", "negative_prompt": "x", "negative_prompt_embeds": (1, 77, 64)},
            PromptError,
            ["negative_prompt and negative_prompt_embeds"],
        ),
        (
            {"prompt": ["fox", "owl"], "negative_prompt_embeds": (1, 77, 64)},
            PromptError,
            ["1 of negative_prompt_embeds of 77 tokens", "2 of 77 tokens, as prompt"],
        ),
        ({"prompt": "fox", "negative_prompt_embeds": (1, 20, 64)}, PromptError, ["of 20 tokens", "of 77 tokens"]),
        ({"prompt_embeds": (1, 78, 64), "negative_prompt": "x"}, PromptError, ["78 tokens", "2 to 77 tokens"]),
        ({"prompt_embeds": (1, 1, 64)}, PromptError, ["1 tokens", "2 to 77 tokens"]),
        ({"prompt_embeds": (2, 77, 64), "negative_prompt": ["x"]}, PromptError, ["1 negative prompts for 2"]),
        ({"prompt": "fox", "negative_prompt_embeds": (1, 77, 5)}, OptionError, ["negative_prompt_embeds of width 5"]),
        ({"negative_prompt_embeds": (1, 77, 64)}, PromptError, ["no prompt"]),
    ],
)
def test_unusable_halves_are_refused(
    arguments: dict[str, Any], error: Any, words: list[str], ours: OrtDiffusionPipeline
) -> None:
    made: dict[str, Any] = {
        name: np.zeros(value) if isinstance(value, tuple) else value for name, value in arguments.items()
    }
    with refused(error, *words):
        ours(**made, **USUAL)


def test_limits_of_encode_prompt(micro_cpu: Any, ours: OrtDiffusionPipeline) -> None:
    with OrtDiffusionPipeline.from_pretrained(micro_cpu, max_batch_size=2) as pipeline:
        assert pipeline.encode_prompt(["a", "b"])[0] is not None
        with refused(OptionError, "a batch of 3 images", "at most 2"):
            pipeline.encode_prompt(["a", "b", "c"])
        with refused(OptionError, "a batch of 4 images", "at most 2"):
            pipeline.encode_prompt(["a", "b"], num_images_per_prompt=2)
    with refused(DeviceMemoryError, "embeddings of 1000000000 prompts need more than", "fewer"):
        ours.encode_prompt("a", num_images_per_prompt=10**9)
