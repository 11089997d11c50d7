"""The safety checker: images as CLIP sees them, and whether they show what it knows.

Sources: transformers' CLIPImageProcessor on PIL images (its Pillow backend, 5.23.0) for the preparation, and diffusers'
StableDiffusionPipeline.run_safety_checker for when and on what it runs.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sdonnx.errors import FolderError, OptionError
from sdonnx.families import Role
from sdonnx.folder import PipelineFolder
from sdonnx.runtime.graphs import GraphSet

__all__ = ["OF_FOLDER", "ClipImages", "NsfwContentWarning", "OfFolder", "SafetyChecker", "safety_checker_of"]

Float = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

_EXTRACTOR, _CONFIG = "feature_extractor", "preprocessor_config.json"

# transformers' OPENAI_CLIP_MEAN and OPENAI_CLIP_STD, and CLIPImageProcessor's size.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_EDGE = 224


class OfFolder(Enum):
    """The default of `safety_checker`: None means another thing."""

    OF_FOLDER = "what the folder has"


OF_FOLDER = OfFolder.OF_FOLDER


class NsfwContentWarning(UserWarning):
    """The safety checker knows what an image shows; the image is black."""


@dataclass(frozen=True)
class ClipImages:
    """How images are prepared for CLIP.

    Attributes:
        size: height and width to resize to, or the shorter edge; None to leave the size.
        resample: Pillow's filter.
        crop: height and width of what is cut out of the middle; None for all.
        scale: what pixels from 0 to 255 are multiplied by; None to leave them.
        mean: subtracted then, for each channel.
        std: divided by then, for each channel.
    """

    size: tuple[int, int] | int | None
    resample: Image.Resampling
    crop: tuple[int, int] | None
    scale: float | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_folder(cls, folder: PipelineFolder) -> ClipImages:
        """Read `feature_extractor/preprocessor_config.json`.

        Raises:
            FolderError: it is missing, or says something that CLIPImageProcessor does not know.
        """
        if not (folder.path / _EXTRACTOR / _CONFIG).is_file():
            raise FolderError(
                f"{folder.path} has a safety_checker and no {_EXTRACTOR}/{_CONFIG}",
                "both",
                f"copy {_EXTRACTOR} from the original pipeline, or pass safety_checker=None",
            )
        config = folder.config(_EXTRACTOR, _CONFIG)
        try:
            normalizes = config.get("do_normalize", True)
            return cls(
                _size(config.get("size", _EDGE)) if config.get("do_resize", True) else None,
                Image.Resampling(config.get("resample", Image.Resampling.BICUBIC)),
                _crop(config.get("crop_size", _EDGE)) if config.get("do_center_crop", True) else None,
                float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else None,
                _channels(config.get("image_mean", _MEAN)) if normalizes else (0.0,) * 3,
                _channels(config.get("image_std", _STD)) if normalizes else (1.0,) * 3,
            )
        except (TypeError, ValueError, KeyError) as error:
            raise FolderError(
                f"{folder.path / _EXTRACTOR / _CONFIG} cannot be used ({error})",
                "the configuration of a CLIPImageProcessor",
                "copy it from the original pipeline",
            ) from error

    def edges(self) -> tuple[int, int] | None:
        """Return height and width of what is prepared; None where they depend on the image."""
        return self.crop or (self.size if isinstance(self.size, tuple) else None)

    def prepare(self, images: Pixels) -> Float:
        """Return images (B,H,W,3) from 0 to 255 as CLIP takes them, (B,3,S,S)."""
        return np.stack([self._prepared(image) for image in images])

    def _prepared(self, image: Pixels) -> Float:
        if self.size is not None:
            height, width = self._resized(*image.shape[:2])
            image = np.asarray(Image.fromarray(image).resize((width, height), self.resample))
        if self.crop is not None:
            for axis, wanted in enumerate(self.crop):
                image = _middle(image, axis, wanted)
        # In the precisions that transformers takes each step in.
        wide = image.astype(np.float64) * (1.0 if self.scale is None else self.scale)
        values = wide.astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        normal: Float = np.divide(values - mean, std, dtype=np.float32)
        return normal.transpose(2, 0, 1)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        assert self.size is not None
        if isinstance(self.size, tuple):
            return self.size
        longer = int(self.size * max(height, width) / min(height, width))
        return (longer, self.size) if width <= height else (self.size, longer)


def _middle(image: Pixels, axis: int, wanted: int) -> Pixels:
    """Return the middle of an axis, with zeros around it where it is shorter."""
    start = (image.shape[axis] - wanted) // 2
    if start < 0:
        before, after = -start, wanted - image.shape[axis] + start
        image = np.pad(image, [(before, after) if each == axis else (0, 0) for each in range(image.ndim)])
        start = 0
    return image.take(range(start, start + wanted), axis)


def _size(given: Any) -> tuple[int, int] | int:
    """Read a size as transformers does: a number is the shorter edge, as CLIPImageProcessor means it."""
    if isinstance(given, Mapping) and set(given) == {"shortest_edge"}:
        given = given["shortest_edge"]
    return _edge(given) if isinstance(given, numbers.Number) else _crop(given)


def _crop(given: Any) -> tuple[int, int]:
    """Read a size of which a number is both edges."""
    if isinstance(given, Mapping):
        given = (given["height"], given["width"])
    height, width = given if isinstance(given, Sequence) and not isinstance(given, str) else (given, given)
    return _edge(height), _edge(width)


def _edge(given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"an edge of {given!r}")
    return given


def _channels(given: Any) -> tuple[float, ...]:
    values = tuple(map(float, given)) if isinstance(given, Sequence) else (float(given),) * 3
    if len(values) != 3 or not np.isfinite(values).all():
        raise ValueError(f"{given!r} for three channels")
    return values


class SafetyChecker:
    """The check graph of a folder, and how its images are prepared.

    Args:
        graphs: the graphs of a folder that has a safety checker.

    Raises:
        FolderError: its graph or `feature_extractor` is missing, or they do not fit each other.
    """

    def __init__(self, graphs: GraphSet) -> None:
        self._graphs = graphs
        self._images = ClipImages.from_folder(graphs.folder)
        graphs.path(Role.SAFETY_CHECKER)
        clip_input = graphs.family.with_role(Role.SAFETY_CHECKER).inputs[0]
        wanted = clip_input.resolve(graphs.config(Role.SAFETY_CHECKER))[2:]
        if self._images.edges() != wanted:
            raise FolderError(
                f"{graphs.folder.path / _EXTRACTOR / _CONFIG} prepares images of {self._images.edges() or 'any size'}",
                f"{wanted}, as the safety checker takes them",
                "copy both from one pipeline",
            )
        if graphs.stays(Role.SAFETY_CHECKER):
            graphs.get(Role.SAFETY_CHECKER)

    def check(self, images: Pixels) -> list[bool]:
        """Tell of each image (B,H,W,3), from 0 to 255, whether it shows a concept that the checker knows."""
        device = self._graphs.device
        clip_input = device.upload(self._images.prepare(images))
        found = device.empty((len(images),), np.bool_)
        try:
            graph = self._graphs.get(Role.SAFETY_CHECKER)
            graph.bind({"clip_input": clip_input, "has_nsfw_concepts": found})()
            device.synchronize()
        finally:
            self._graphs.done(Role.SAFETY_CHECKER)
        flags: list[bool] = found.numpy().tolist()
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
