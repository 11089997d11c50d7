"""The safety checker, which flags NSFW content in images.

Source: diffusers' StableDiffusionPipeline.run_safety_checker, for the images that it checks.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.clip_images import EXTRACTOR, ClipImages

__all__ = ["OF_FOLDER", "NsfwContentWarning", "OfFolder", "SafetyChecker", "safety_checker_of"]

Pixels = npt.NDArray[np.uint8]


class OfFolder(Enum):
    """Default of the argument `safety_checker`, distinct from None."""

    OF_FOLDER = "safety checker of the folder"


OF_FOLDER = OfFolder.OF_FOLDER


class NsfwContentWarning(UserWarning):
    """The safety checker flagged an image, which is black."""


class SafetyChecker:
    """Safety checker of a folder, with its image preprocessing.

    Args:
        graphs: graphs of a folder with a safety checker.

    Raises:
        FolderError: its graph or `feature_extractor` is missing, or they do not fit each other.
    """

    def __init__(self, graphs: GraphSet) -> None:
        self._graphs = graphs
        graphs.path(Role.SAFETY_CHECKER)
        clip_input = graphs.family.with_role(Role.SAFETY_CHECKER).inputs[0]
        edges = clip_input.resolve(graphs.config(Role.SAFETY_CHECKER))[2:]
        self._images = ClipImages.for_component(
            graphs.folder, EXTRACTOR, "safety_checker", edges, "pass safety_checker=None"
        )
        if graphs.stays(Role.SAFETY_CHECKER):
            graphs.get(Role.SAFETY_CHECKER)

    def check(self, images: Pixels) -> list[bool]:
        """Return for each image (B,H,W,3) from 0 to 255 whether the checker flags it."""
        found = self._graphs.run_once(
            Role.SAFETY_CHECKER,
            {abi.CLIP_INPUT: self._images.prepare(images)},
            {abi.HAS_NSFW_CONCEPTS: ((len(images),), np.bool_)},
        )
        flags: list[bool] = found[abi.HAS_NSFW_CONCEPTS].tolist()
        return flags


def safety_checker_of(graphs: GraphSet, chosen: object) -> SafetyChecker | None:
    """Return the safety checker of a folder; None if it has none, or if it is disabled.

    Args:
        graphs: graphs of the folder.
        chosen: OF_FOLDER for the folder's safety checker, None to disable it.

    Raises:
        OptionError: `chosen` has another value.
        FolderError: the folder's safety checker cannot be used.
    """
    if chosen is not OF_FOLDER and chosen is not None:
        raise OptionError(
            f"safety_checker is a {type(chosen).__name__}",
            "None, to disable the folder's safety checker",
            "pass None, or leave it out",
        )
    return SafetyChecker(graphs) if chosen is OF_FOLDER and graphs.family.has(Role.SAFETY_CHECKER) else None
