"""Draws from the generators of a call: their order, number and shapes, compared with diffusers' own pipelines.

Images that agree do not show draws after the last one that matters, but the next call with the generator does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from support.control_networks import picture
from support.diffusers_pipelines import in_diffusers, task_of
from support.drawing import MIN_PSNR_DB, generator
from support.inpainting import inpainting_pipeline
from support.pipeline_cache import PipelineCache

from sdonnx.metrics import psnr
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

pytestmark = pytest.mark.filterwarnings("ignore:You have passed 4 text prompts:FutureWarning")

SIZE = (32, 32)
PROMPTS = ["a fox", "an owl"]
MASK = Image.new("L", SIZE)
MASK.paste(255, (8, 4, 28, 20))

TEXT, IMAGE, INPAINT = "", "Img2Img", "Inpaint"


@pytest.fixture(scope="module")
def pairs(micro_torch: Any, loaded: Any, pipelines: PipelineCache, micro: Path) -> Iterator[dict[bool, Any]]:
    """Return the pipelines of this project and of diffusers, by whether the UNet was trained to inpaint."""
    source = inpainting_pipeline(pipelines, micro)
    trained = in_diffusers(source, "StableDiffusionInpaintPipeline")
    with OrtDiffusionPipeline.from_pretrained(
        pipelines.optimized(pipelines.exported(source), provider="cpu")
    ) as pipeline:
        before = loaded.scheduler_config
        yield {False: (loaded, micro_torch), True: (pipeline, trained)}
        loaded.scheduler_config = before


def photos(count: int) -> Any:
    found = [picture(seed, SIZE) for seed in range(count)]
    return found if count > 1 else found[0]


def latents(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, 4, SIZE[1] // 8, SIZE[0] // 8, generator=generator(seed))


TRAINED: dict[str, Any] = {"trained": True}

# A strength of 0.6 leaves one of two steps.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (TEXT, {}),
    "latents": (TEXT, {"latents": latents(5, 4)}),
    "image": (IMAGE, {"image": photos(1)}),
    "images": (IMAGE, {"image": photos(2)}),
    "all images": (IMAGE, {"image": photos(4)}),
    "latents as images": (IMAGE, {"image": latents(6, 2)}),
    "mask": (INPAINT, {"image": photos(1), "mask_image": MASK}),
    "mask, images": (INPAINT, {"image": photos(2), "mask_image": MASK}),
    "masks": (INPAINT, {"image": photos(1), "mask_image": [MASK] * 2}),
    "mask, all images": (INPAINT, {"image": photos(4), "mask_image": [MASK] * 4}),
    "mask, noise": (INPAINT, {"image": photos(1), "mask_image": MASK, "strength": 1.0}),
    "mask, latents": (INPAINT, {"image": photos(2), "mask_image": MASK, "latents": latents(7, 4)}),
    "trained": (INPAINT, {"image": photos(1), "mask_image": MASK, **TRAINED}),
    "trained, noise": (INPAINT, {"image": photos(2), "mask_image": MASK, "strength": 1.0, **TRAINED}),
    "trained, latents": (INPAINT, {"image": photos(1), "mask_image": MASK, "latents": latents(8, 4), **TRAINED}),
}

Draws = list[tuple[int, tuple[int, ...]]]


def drawn(pipeline: Any, generators: list[torch.Generator], listed: bool, **arguments: Any) -> tuple[Draws, Any]:
    """Return the number of the generator and the shape of each draw, and the images."""
    draws: Draws = []
    randn = torch.randn

    def spy(*size: Any, generator: Any = None, **options: Any) -> torch.Tensor:
        shape = size[0] if len(size) == 1 else size
        draws.append((generators.index(generator), tuple(shape)))
        return randn(*size, generator=generator, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", spy)
        images = pipeline(**arguments, generator=generators if listed else generators[0], output_type="np").images
    return draws, images


def same_draws(name: str, listed: bool, scheduler: str, pairs: dict[bool, Any]) -> bool:
    """Compare the draws of a case of CASES, then return whether the images are the same too."""
    suffix, arguments = CASES[name]
    given: dict[str, Any] = {"prompt": PROMPTS, "num_images_per_prompt": 2, "num_inference_steps": 2, "eta": 0.5}
    given |= {"guidance_scale": 1.0} | arguments
    ours, base = pairs[given.pop("trained", False)]
    theirs = task_of(base, f"StableDiffusion{suffix}Pipeline")
    ours.scheduler, theirs.scheduler = (
        getattr(diffusers, scheduler).from_config(base.scheduler.config) for _ in range(2)
    )
    if suffix:
        given.setdefault("strength", 0.6)
    if suffix != IMAGE:
        given |= {"height": SIZE[1], "width": SIZE[0]}
    expected, images = drawn(theirs, [generator(seed) for seed in range(4)], listed, **given)
    found, own = drawn(ours, [generator(seed) for seed in range(4)], listed, **given)
    assert found == expected
    return psnr(own, images) > MIN_PSNR_DB


@pytest.mark.parametrize("listed", [False, True], ids=["one generator", "a list"])
@pytest.mark.parametrize("name", CASES)
def test_draws_of_each_task(name: str, listed: bool, pairs: dict[bool, Any]) -> None:
    assert same_draws(name, listed, "EulerAncestralDiscreteScheduler", pairs)


@pytest.mark.parametrize("name", ["text", "mask, images"])
@pytest.mark.parametrize(
    "scheduler", ["DDIMScheduler", "LCMScheduler", "DDPMScheduler", "DPMSolverSinglestepScheduler"]
)
def test_draws_of_schedulers(scheduler: str, name: str, pairs: dict[bool, Any]) -> None:
    """Compare noise of the steps: none for some schedulers, and in some of the steps for others."""
    assert same_draws(name, True, scheduler, pairs)
