"""Images side by side, each with its difference to the reference."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sdonnx.html.tables import number
from sdonnx.metrics import MIN_PSNR_DB, psnr
from sdonnx.reference import REFERENCE

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Gallery", "Picture", "Shown", "difference", "factor_for", "make_gallery"]

_FACTORS = (64, 32, 16, 8)
# Share of the differences that may be clipped to black or white. Half precision differs by a few steps of 255, which
# would hardly be visible with a factor of eight; other images fill the range with any factor.
_MAX_CLIPPED = 0.001

_GREY = 128
# A difference is shown if at least this share of the pixels differs from grey by at least so much.
_MIN_VISIBLE_SHARE, _VISIBLE = 0.001, 16

# Keeps pages with many engines, batches and sizes small enough to send: lossless compression hardly shrinks noise.
_MAX_LOSSLESS_BYTES = 2**18
_MAX_WIDTH = 512  # pixels: the width of a phone's screen

_SMALL_WIDTH = 128  # pixels: narrower images are enlarged with square pixels


@dataclass(frozen=True)
class Picture:
    """An image in the page.

    Attributes:
        uri: a data URI.
        width: in pixels.
        height: in pixels.
        is_small: whether it is enlarged with square pixels.
    """

    uri: str
    width: int
    height: int
    is_small: bool


@dataclass(frozen=True)
class Shown:
    """An engine's image and its difference to the reference.

    Attributes:
        rival: the engine.
        colour: its colour.
        image: its image.
        difference: the amplified difference; None for the reference, and if nothing would be visible.
        agreement: a text such as "PSNR 45.0 dB".
        same: a text instead of the difference if nothing would be visible, such as "no visible difference".
    """

    rival: str
    colour: str
    image: Picture
    difference: Picture | None
    agreement: str
    same: str | None = None


@dataclass(frozen=True)
class Gallery:
    """The images of a workload, starting with the reference; differences are amplified by `factor`."""

    title: str
    shown: tuple[Shown, ...]
    factor: int

    @property
    def has_differences(self) -> bool:
        """Whether there are visible differences to a reference."""
        return any(each.difference is not None for each in self.shown)


def make_gallery(title: str, found: Mapping[str, Image], colour_of: Callable[[str], str]) -> Gallery:
    """Return a gallery of the images, with their differences to the image named REFERENCE."""
    reference = found.get(REFERENCE)
    factor = factor_for(reference, [image for name, image in found.items() if name != REFERENCE])
    shown = [_shown(name, image, reference, colour_of(name), factor) for name, image in found.items()]
    return Gallery(title, tuple(shown), factor)


def _shown(rival: str, image: Image, reference: Image | None, colour: str, factor: int) -> Shown:
    if rival == REFERENCE or reference is None:
        return Shown(rival, colour, _picture(image), None, "the reference" if rival == REFERENCE else "no reference")
    if image.size != reference.size:
        return Shown(rival, colour, _picture(image), None, f"size differs from {REFERENCE}")
    decibels = _psnr(image, reference)
    if decibels == math.inf:
        return Shown(rival, colour, _picture(image), None, "identical", "identical pixels")
    agreement = f"PSNR {number(decibels, 1)} dB"
    amplified = factor * _distance(image, reference).max(axis=-1)
    if np.mean(amplified >= _VISIBLE) < _MIN_VISIBLE_SHARE:
        return Shown(rival, colour, _picture(image), None, agreement, "no visible difference")
    return Shown(rival, colour, _picture(image), _picture(difference(image, reference, factor)), agreement)


def factor_for(reference: Image | None, images: Sequence[Image]) -> int:
    """Return the amplification of differences: the largest that does not clip the differences of similar images."""
    alike = [
        _distance(image, reference)
        for image in images
        if reference is not None and image.size == reference.size and _psnr(image, reference) >= MIN_PSNR_DB
    ]
    largest = max((float(np.quantile(each, 1 - _MAX_CLIPPED)) for each in alike), default=0.0)
    if largest == 0:
        return _FACTORS[-1]
    return next((factor for factor in _FACTORS if factor * largest < _GREY), _FACTORS[-1])


def difference(image: Image, reference: Image, factor: int) -> Image:
    """Return the difference of two images of one size, multiplied by `factor`, on grey.

    Equal values are grey (128), larger ones lighter and smaller ones darker.
    """
    from PIL.Image import fromarray

    signed = _array(image).astype(np.int32) - _array(reference)
    return fromarray(np.clip(_GREY + factor * signed, 0, 255).astype(np.uint8))


def _distance(image: Image, reference: Image) -> npt.NDArray[np.int32]:
    distance: npt.NDArray[np.int32] = np.abs(_array(image).astype(np.int32) - _array(reference))
    return distance


def _psnr(image: Image, reference: Image) -> float:
    return psnr(_array(image) / 255, _array(reference) / 255)


def _array(image: Image) -> npt.NDArray[np.uint8]:
    return np.asarray(image.convert("RGB"))


def _picture(image: Image) -> Picture:
    """Encode an image for the page, lossless unless it is too wide or too large."""
    from PIL.Image import Resampling

    shown = image.convert("RGB")
    if shown.width > _MAX_WIDTH:
        height = max(1, round(shown.height * _MAX_WIDTH / shown.width))
        shown = shown.resize((_MAX_WIDTH, height), Resampling.LANCZOS)
    file = io.BytesIO()
    shown.save(file, "WEBP", lossless=True, quality=80)
    if len(file.getvalue()) > _MAX_LOSSLESS_BYTES:
        file = io.BytesIO()
        shown.save(file, "WEBP", quality=90)
    uri = f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
    return Picture(uri, shown.width, shown.height, shown.width < _SMALL_WIDTH)
