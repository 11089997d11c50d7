"""Generate images with diffusers and with this project from one seed, and compare them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import diffusers
import numpy.typing as npt
import torch

from sdonnx.metrics import psnr
from sdonnx.models.spec import Role
from sdonnx.runtime.device.session import Run
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from support.diffusers_pipelines import in_diffusers
from support.pipeline_cache import PipelineCache

# float32 rounding gives 120 dB and more, and a small fault may pass 50 dB.
MIN_PSNR_DB = 90

USUAL: dict[str, Any] = {"prompt": "a red fox in the snow", "num_inference_steps": 4, "output_type": "np"}
USUAL |= {"height": 32, "width": 40}

Array = npt.NDArray[Any]


class Pair:
    """A sample pipeline, run by diffusers and by this project."""

    def __init__(self, arch: str, pipelines: PipelineCache) -> None:
        self.source = pipelines.micro(arch)
        self.exported = pipelines.exported(self.source)
        self.optimized = pipelines.optimized(self.exported, provider="cpu")
        self.theirs = in_diffusers(self.source)
        self.ours = OrtDiffusionPipeline.from_pretrained(self.optimized)

    def draw(self, prompt: Any = None, *, theirs: Any = None, **arguments: Any) -> tuple[Any, Any]:
        """Return the images of this project and of diffusers, or of the pipeline `theirs`, for the same arguments."""
        reference = self.theirs if theirs is None else theirs
        expected = reference(prompt, **arguments, generator=generator(3), output_type="np").images
        return self.ours(prompt, **arguments, seed=3, output_type="np").images, expected


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def switch(ours: OrtDiffusionPipeline, theirs: Any, class_name: str, **changes: Any) -> None:
    """Set the same scheduler in both pipelines."""
    theirs.scheduler = getattr(diffusers, class_name).from_config(theirs.scheduler.config, **changes)
    ours.scheduler = class_name
    ours.scheduler_config = {**ours.scheduler_config, **changes}


def assert_same_images(ours: OrtDiffusionPipeline, theirs: Any, **arguments: Any) -> Array:
    """Generate images with both pipelines from seed 0, compare them, and return them; ... leaves an argument out."""
    arguments = USUAL | arguments
    arguments = {name: value for name, value in arguments.items() if value is not ...}
    expected = theirs(**{"generator": generator()} | arguments).images
    given: dict[str, Any] = {} if {"generator", "latents"} & set(arguments) else {"seed": 0}
    found: Array = ours(**arguments, **given).images
    assert expected.std() > 0.02  # not a flat image, which would always agree
    assert psnr(found, expected) > MIN_PSNR_DB
    return found


@contextmanager
def observed_roles(pipeline: OrtDiffusionPipeline) -> Iterator[list[Role]]:
    """Yield a list that receives the role of each graph that runs."""
    roles: list[Role] = []

    def note(role: Role, _: Run) -> AbstractContextManager[None]:
        roles.append(role)
        return nullcontext()

    pipeline.observe(note)
    try:
        yield roles
    finally:
        pipeline.observe(None)
