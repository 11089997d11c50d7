"""Latents to images outside of calls and in callbacks, in the words of diffusers' scripts."""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support.drawing import MIN_PSNR_DB, generator
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.metrics import psnr
from sdonnx.runtime.output import ImageProcessor
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

USUAL: dict[str, Any] = {"prompt": ["a fox", "an owl"], "height": 32, "width": 40, "num_inference_steps": 2}


def decoded(pipe: Any, latents: Any) -> Any:
    """Decode latents as diffusers' guides to callbacks do."""
    image = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
    return pipe.image_processor.postprocess(image, output_type="np")


def test_callbacks_decode_latents(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    def images_of(pipe: Any) -> tuple[list[Any], Any]:
        seen: list[Any] = []

        def callback(pipe: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            with torch.no_grad():
                seen.append(decoded(pipe, tensors["latents"]))
            return tensors

        drawn = pipe(**USUAL, generator=generator(), callback_on_step_end=callback, output_type="np").images
        return seen, drawn

    (found, image), (expected, theirs_image) = images_of(ours), images_of(theirs)
    assert len(found) == len(expected) > 1
    for ours_step, theirs_step in zip((*found, image), (*expected, theirs_image), strict=True):
        assert psnr(ours_step, theirs_step) > MIN_PSNR_DB


@pytest.mark.parametrize("option", ["vae_slicing", "vae_tiling"])
def test_latents_of_a_call_are_decoded(option: str, ours: OrtDiffusionPipeline) -> None:
    """With the options of the pipeline, in the memory of no call."""
    if option == "vae_tiling":
        ours.enable_vae_tiling(32)
    else:
        ours.enable_vae_slicing()
    try:
        images = ours(**USUAL, seed=0, output_type="np").images
        latents = ours(**USUAL, seed=0, output_type="latent").images
        np.testing.assert_allclose(decoded(ours, latents), images, atol=1e-5)
        np.testing.assert_allclose(decoded(ours, torch.from_numpy(latents[:1])), images[:1], atol=1e-5)
    finally:
        getattr(ours, f"disable_{option}")()
    output = ours.vae.decode(latents / ours.vae.config.scaling_factor)
    assert output.sample is output[0]
    assert output.sample.shape == (2, 3, 32, 40)


def test_latents_that_cannot_be_decoded(ours: OrtDiffusionPipeline) -> None:
    for shape in ((1, 3, 4, 4), (4, 4, 4), (0, 4, 4, 4)):
        with refused(OptionError, f"latents of shape {shape}", "(B,4,H/8,W/8)"):
            ours.vae.decode(np.zeros(shape, np.float32))
    with refused(OptionError, "NaN"):
        ours.vae.decode(np.full((1, 4, 4, 4), np.nan))


@pytest.mark.parametrize("output_type", ["np", "pil", "latent"])
@pytest.mark.parametrize("denormalize", [None, [True, False]])
def test_images_are_converted_as_in_diffusers(output_type: str, denormalize: Any, theirs: Any) -> None:
    values = torch.rand(2, 3, 5, 7, generator=generator())
    given = values if denormalize else 3 * values - 1.5
    expected = theirs.image_processor.postprocess(given, output_type, denormalize)
    found = ImageProcessor().postprocess(given, output_type, denormalize)
    if output_type == "latent":
        assert found is given
        return
    np.testing.assert_array_equal(np.stack(found), np.stack(expected))
    images = values.permute(0, 2, 3, 1).numpy()
    for each in (images, images[0], images[..., :1]):
        pairs = zip(
            OrtDiffusionPipeline.numpy_to_pil(each), diffusers.DiffusionPipeline.numpy_to_pil(each), strict=True
        )
        assert all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in pairs)


def test_images_that_cannot_be_converted() -> None:
    with refused(OptionError, "'pt'", "pil"):
        ImageProcessor().postprocess(np.zeros((1, 3, 4, 4)), "pt")
    with refused(OptionError, "(1, 4, 4, 3)", "(B,3,H,W)"):
        ImageProcessor().postprocess(np.zeros((1, 4, 4, 3)))


def test_attributes_of_diffusers(ours: OrtDiffusionPipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert ours._execution_device == torch.device("cpu")
    ours.set_progress_bar_config(desc="steps", disable=False)
    try:
        with ours.progress_bar(total=3) as bar:
            bar.update()
        assert list(ours.progress_bar(range(2))) == [0, 1]
    finally:
        ours.set_progress_bar_config()
    assert "steps:  33%" in capsys.readouterr().err
    unet = ours.unet
    assert unet.eval().requires_grad_(False).to("cpu") is unet
    with refused(OptionError, "gradients of the unet"):
        ours.unet.requires_grad_(True)
    assert not hasattr(ours.unet, "set_attn_processor")
    with pytest.raises(AttributeError, match="the vae has no 'encode': it is part of the pipeline's graphs"):
        ours.vae.encode(Image.new("RGB", (8, 8)))
    assert copy.copy(ours.unet).name == "unet"
