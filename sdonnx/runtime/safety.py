"""The safety checker: whether images show what it knows.

Source: diffusers' StableDiffusionPipeline.run_safety_checker, for when and on what it runs.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.families import Role
from sdonnx.runtime.clip_images import EXTRACTOR, ClipImages
from sdonnx.runtime.graphs import GraphSet

__all__ = ["OF_FOLDER", "NsfwContentWarning", "OfFolder", "SafetyChecker", "safety_checker_of"]

Pixels = npt.NDArray[np.uint8]


class OfFolder(Enum):
    """The default of `safety_checker`: None means another thing."""

    OF_FOLDER = "what the folder has"


OF_FOLDER = OfFolder.OF_FOLDER


class NsfwContentWarning(UserWarning):
    """The safety checker knows what an image shows; the image is black."""


class SafetyChecker:
    """The check graph of a folder, and how its images are prepared.

    Args:
        graphs: the graphs of a folder that has a safety checker.

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
        """Tell of each image (B,H,W,3), from 0 to 255, whether it shows a concept that the checker knows."""
        found = self._graphs.run_once(
            Role.SAFETY_CHECKER,
            {"clip_input": self._images.prepare(images)},
            {"has_nsfw_concepts": ((len(images),), np.bool_)},
        )
        flags: list[bool] = found["has_nsfw_concepts"].tolist()
        return flags


def safety_checker_of(graphs: GraphSet, chosen: object) -> SafetyChecker | None:
    """Return the folder's safety checker; None where it has none, or where it is left out.

    Args:
        graphs: the graphs of the folder.
        chosen: OF_FOLDER for the folder's, None to leave it out.

    Raises:
        OptionError: anything else is chosen.
        FolderError: the folder's cannot be used.
    """
    if chosen is not OF_FOLDER and chosen is not None:
        raise OptionError(
            f"safety_checker is a {type(chosen).__name__}", "None, to leave the folder's out", "pass None or nothing"
        )
    return SafetyChecker(graphs) if chosen is OF_FOLDER and graphs.family.has(Role.SAFETY_CHECKER) else None
