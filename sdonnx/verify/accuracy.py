"""Compare how often the folder and torch draw what held-out captions say, for pipelines that read such captions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.metrics import Proportion
from sdonnx.reference.workload import Workload
from sdonnx.sample.shapes.shape_architectures import TRAINED, reads_shape_captions
from sdonnx.sample.shapes.shape_judge import draw_batches, held_out_captions, score_images, summarize
from sdonnx.verify.verification import AccuracyFinding

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["DEFAULT_CAPTIONS", "captions_to_judge", "compare_accuracy", "draw_captions"]

Pixels = npt.NDArray[np.uint8]

DEFAULT_CAPTIONS = 100
"""Captions that `verify` judges by default."""


def captions_to_judge(original: PipelineFolder, count: int | None, seed: int) -> tuple[str, ...]:
    """Return held-out captions to judge a pipeline by.

    Args:
        original: the diffusers pipeline.
        count: number of captions; None for the default number if the pipeline reads such captions, or else none.
        seed: seed of the choice.

    Raises:
        OptionError: `count` is negative, or positive for a pipeline that does not read the captions.
    """
    if count is not None and count < 0:
        raise OptionError(f"{count} captions for the accuracy", "a number, or 0 for none", "change --accuracy_prompts")
    if count == 0:
        return ()
    if reads_shape_captions(original):
        return held_out_captions(DEFAULT_CAPTIONS if count is None else count, seed)
    if count is not None:
        raise OptionError(
            f"{count} captions for the accuracy of {original.path}",
            f"one of the trained samples {', '.join(TRAINED)}, whose images can be judged",
            "omit --accuracy_prompts",
        )
    return ()


def draw_captions(
    generate: Callable[[list[str], Workload], Sequence[Image]], captions: Sequence[str], workload: Workload
) -> list[Pixels]:
    """Return an image (H,W,3) of each caption. The same workload gives the same noise to each engine.

    Args:
        generate: returns an image of each of several prompts; the method of an engine.
        captions: the captions.
        workload: size, steps, sampler and first seed; each batch has another seed.
    """
    return draw_batches(lambda batch, seed: generate(batch, replace(workload, seed=seed)), captions, workload.seed)


def compare_accuracy(
    captions: Sequence[str], ours: Sequence[Pixels], torch: Sequence[Pixels], precision: str
) -> list[AccuracyFinding]:
    """Return a finding for each measure that applies to a caption.

    Args:
        captions: the captions.
        ours: the folder's image of each.
        torch: torch's image of each.
        precision: the precision of torch.
    """
    measured, expected = (summarize(score_images(images, captions)) for images in (ours, torch))
    return [
        AccuracyFinding(measure, Proportion(**counted), Proportion(**expected[measure]), precision)
        for measure, counted in measured.items()
    ]
