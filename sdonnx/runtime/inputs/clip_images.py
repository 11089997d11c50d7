"""Image preprocessing for CLIP's vision towers.

Source: transformers' CLIPImageProcessor on PIL images (its Pillow backend, 5.23.0).
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.runtime.inputs.argument_checks import MAX_SIDE

__all__ = ["EXTRACTOR", "ClipImages"]

Float = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

EXTRACTOR = "feature_extractor"
_CONFIG = "preprocessor_config.json"

# transformers' OPENAI_CLIP_MEAN and OPENAI_CLIP_STD, and CLIPImageProcessor's size.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_EDGE = 224


@dataclass(frozen=True)
class ClipImages:
    """Image preprocessing of one component: resize, center crop, rescale, normalize.

    Attributes:
        size: height and width to resize to, or the shorter edge; None for no resizing.
        resample: Pillow's resampling filter.
        crop: height and width of the center crop; None for no crop.
        scale: factor of the pixels from 0 to 255; None for no rescaling.
        mean: mean of each channel to subtract after rescaling.
        std: standard deviation of each channel to divide by.
    """

    size: tuple[int, int] | int | None
    resample: Image.Resampling
    crop: tuple[int, int] | None
    scale: float | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_folder(cls, folder: PipelineFolder, part: str = EXTRACTOR) -> ClipImages:
        """Read `preprocessor_config.json` of a pipeline's subfolder.

        Raises:
            FolderError: it is missing, or has a value that CLIPImageProcessor does not support.
        """
        config = folder.config(part, _CONFIG)
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
                f"{folder.path / part / _CONFIG} cannot be used ({error})",
                "the configuration of a CLIPImageProcessor",
                "copy it from the original pipeline",
            ) from error

    @classmethod
    def for_component(
        cls, folder: PipelineFolder, part: str, name: str, edges: Sequence[Any], remedy: str
    ) -> ClipImages:
        """Return the image preprocessing of a component.

        Args:
            folder: the pipeline.
            part: subfolder with the configuration.
            name: name of the component.
            edges: height and width of the component's input.
            remedy: another fix besides copying the folder again.

        Raises:
            FolderError: the configuration is missing, or produces images of another size.
        """
        if not (folder.path / part / _CONFIG).is_file():
            raise FolderError(
                f"{folder.path} has a component {name} and no {part}/{_CONFIG}",
                "both",
                f"copy {part} from the original folder, or {remedy}",
            )
        images = cls.from_folder(folder, part)
        prepared = images.crop or (images.size if isinstance(images.size, tuple) else None)
        if prepared != tuple(edges):
            raise FolderError(
                f"{folder.path / part / _CONFIG} prepares images of {prepared or 'any size'}",
                f"{tuple(edges)}, the input size of the component {name}",
                f"copy both from one pipeline, or {remedy}",
            )
        return images

    def prepare(self, images: Pixels) -> Float:
        """Return images (B,H,W,3) from 0 to 255 as inputs of CLIP (B,3,S,S)."""
        return np.stack([self._prepared(image) for image in images])

    def _prepared(self, image: Pixels) -> Float:
        if self.size is not None:
            height, width = _resized(self.size, *image.shape[:2])
            image = np.asarray(Image.fromarray(image).resize((width, height), self.resample))
        if self.crop is not None:
            for axis, wanted in enumerate(self.crop):
                image = _middle(image, axis, wanted)
        # Each step has the same precision as in transformers.
        wide = image.astype(np.float64) * (1.0 if self.scale is None else self.scale)
        values = wide.astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        normal: Float = np.divide(values - mean, std, dtype=np.float32)
        return normal.transpose(2, 0, 1)


def _resized(size: tuple[int, int] | int, height: int, width: int) -> tuple[int, int]:
    if isinstance(size, tuple):
        return size
    longer = int(size * max(height, width) / min(height, width))
    if longer > MAX_SIDE:
        raise OptionError(
            f"an image is {width} pixels wide and {height} high, and has a side of {longer} pixels as input of CLIP",
            f"sides of at most {MAX_SIDE}",
        )
    return (longer, size) if width <= height else (size, longer)


def _middle(image: Pixels, axis: int, wanted: int) -> Pixels:
    """Return the center of an axis, padded with zeros if the axis is shorter."""
    start = (image.shape[axis] - wanted) // 2
    if start < 0:
        before, after = -start, wanted - image.shape[axis] + start
        image = np.pad(image, [(before, after) if each == axis else (0, 0) for each in range(image.ndim)])
        start = 0
    return image.take(range(start, start + wanted), axis)


def _size(given: Any) -> tuple[int, int] | int:
    """Read `size` as transformers does: a number is the shorter edge."""
    if isinstance(given, Mapping) and set(given) == {"shortest_edge"}:
        given = given["shortest_edge"]
    return _edge(given) if isinstance(given, numbers.Number) else _crop(given)


def _crop(given: Any) -> tuple[int, int]:
    """Read `crop_size`: a number is both edges."""
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
