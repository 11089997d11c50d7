"""Text encoders that run outside a captured image on a GPU, and results that go on to other libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdonnx.metrics import psnr
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

Build = Callable[[str], tuple[Path, Path]]

CALL: dict[str, Any] = {"num_inference_steps": 4, "seed": 3, "output_type": "np"}
SAME_DB = 45  # two runs of one image differ by the order of float16 sums in ONNX Runtime's kernels


@pytest.mark.parametrize("arch", ["tiny", "sdxl-tiny", "pixart-sigma-tiny"])
def test_encoded_prompts_give_the_image_of_the_texts(arch: str, build: Build) -> None:
    _, folder = build(arch)
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        texts: dict[str, Any] = {"prompt": "a red fox in the snow", "negative_prompt": "grey"}
        before = pipeline(**texts, **CALL).images
        encoded: Any = pipeline.encode_prompt(**texts)
        given: dict[str, Any] = dict(zip(pipeline._inputs.family.EMBEDDINGS, encoded, strict=True))
        assert psnr(pipeline(**given, **CALL).images, before) > SAME_DB
        assert psnr(pipeline(**texts, **CALL).images, before) > SAME_DB


@pytest.mark.parametrize("arch", ["tiny", "sdxl-tiny"])
def test_weights_apply_to_replays(arch: str, build: Build) -> None:
    _, folder = build(arch)
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        plain = pipeline("a red fox", **CALL).images
        same = pipeline("a red fox", **CALL, prompt_weighting="a1111").images
        assert psnr(same, plain) > SAME_DB
        weighted = pipeline("a (red fox:1.5)", **CALL, prompt_weighting="a1111").images
        assert np.isfinite(weighted).all()
        assert psnr(weighted, plain) < psnr(same, plain)
        longer = pipeline("a red fox BREAK an owl", **CALL, prompt_weighting="a1111").images
        assert psnr(longer, plain) < psnr(same, plain)
        assert psnr(pipeline("a red fox", **CALL).images, plain) > SAME_DB


def test_tensors_are_on_the_device(build: Build) -> None:
    _, folder = build("tiny")
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        expected = pipeline("a red fox", **CALL).images
        tensor = pipeline("a red fox", **(CALL | {"output_type": "pt"})).images
    assert tensor.is_cuda == torch.cuda.is_available()
    assert psnr(tensor.cpu().numpy().transpose(0, 2, 3, 1), expected) > SAME_DB
