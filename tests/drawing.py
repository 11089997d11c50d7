"""Images drawn with diffusers and with this project, from one seed, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy.typing as npt
import torch

from sdonnx.export.pipeline import export_pipeline
from sdonnx.optimize import optimize_folder
from sdonnx.parity import psnr
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample import write_sample

# Rounding alone: float32 against float32 gives 120 dB and more, and 50 dB would let a small mistake pass.
LEAST_PSNR_DB = 90

Array = npt.NDArray[Any]


class Pair:
    """One sample pipeline by diffusers and by this project."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.source, self.exported, self.optimized = folder / "source", folder / "onnx", folder / "cpu"
        write_sample(arch, self.source)
        export_pipeline(self.source, self.exported)
        optimize_folder(self.exported, self.optimized, provider="cpu")
        torch.set_num_threads(1)
        pipeline_class: Any = diffusers.DiffusionPipeline
        self.theirs: Any = pipeline_class.from_pretrained(self.source)
        self.theirs.set_progress_bar_config(disable=True)
        self.ours = OrtDiffusionPipeline.from_pretrained(self.optimized)

    def draw(self, *prompt: str, theirs: Any = None, **arguments: Any) -> tuple[Any, Any]:
        """Return this project's image and diffusers' for the same arguments; `theirs` is another pipeline to ask."""
        reference = self.theirs if theirs is None else theirs
        expected = reference(*prompt, **arguments, generator=generator(3), output_type="np").images
        return self.ours(*prompt, **arguments, seed=3, output_type="np").images, expected


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def switch(ours: OrtDiffusionPipeline, theirs: Any, class_name: str, **changes: Any) -> None:
    """Give both pipelines one scheduler."""
    theirs.scheduler = getattr(diffusers, class_name).from_config(theirs.scheduler.config, **changes)
    ours.scheduler = class_name
    ours.scheduler_config = {**ours.scheduler_config, **changes}


def assert_same_images(ours: OrtDiffusionPipeline, theirs: Any, **arguments: Any) -> Array:
    """Draw with both, from the seed 0, and compare; return the images."""
    usual = {"prompt": "a red fox in the snow", "num_inference_steps": 4, "output_type": "np"}
    arguments = usual | {"height": 32, "width": 40} | arguments
    expected = theirs(**{"generator": generator()} | arguments).images
    given = {} if {"generator", "latents"} & set(arguments) else {"seed": 0}
    found = ours(**arguments, **given).images
    assert expected.std() > 0.02  # an image, not a flat field that everything agrees on
    assert psnr(found, expected) > LEAST_PSNR_DB
    return found
