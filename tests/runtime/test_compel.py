"""Embeddings of compel, which runs the text encoders of a diffusers pipeline, as the prompt of our pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compel import CompelForSD

from sdonnx.metrics import psnr
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

CALL: dict[str, Any] = {"height": 32, "width": 40, "num_inference_steps": 2, "output_type": "np"}


@pytest.mark.parametrize("prompt", ["a cat playing with a ball++ in the forest", "a (red fox)1.4 in deep-- snow"])
def test_image_agrees(prompt: str, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    """As in docs/how-to/prompt-weights.md."""
    with torch.inference_mode():
        embeds = CompelForSD(theirs)(prompt).embeds
    _, negative = ours.encode_prompt("", negative_prompt="blurry")
    found = ours(prompt_embeds=embeds, negative_prompt_embeds=negative, **CALL, seed=0).images
    given = {"prompt_embeds": embeds, "negative_prompt_embeds": torch.from_numpy(np.asarray(negative))}
    expected = theirs(**given, **CALL, generator=torch.Generator().manual_seed(0)).images
    assert psnr(found, expected) > 90
    plain = prompt.translate({ord(sign): None for sign in "()+-."}).replace("14", "")
    assert psnr(found, ours(plain, negative_prompt="blurry", **CALL, seed=0).images) < 60
