"""The images side by side, each with where it differs from the reference."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.report.tables import number
from sdonnx.benchmark.results import LEAST_PSNR_DB, REFERENCE, Comparison, Workload
from sdonnx.parity import psnr

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Gallery", "Picture", "Shown", "difference", "factor_for", "galleries_of", "gallery_of"]

_FACTORS = (64, 32, 16, 8)
# How much of a difference may be cut off at white. Half precision is off by a few steps of 255, which eight times
# amplified would still be black; other pictures fill the range with any factor.
_CUT_OFF = 0.001

# A page of many engines, batches and sizes is to stay a file that can be sent: noise hardly shrinks without loss.
_HEAVIEST_BYTES = 2**18
_MOST = 512  # pixels across: as wide as a phone shows, and pages stay small

_SMALL = 128  # pixels across, below which enlarged pixels are shown as squares


@dataclass(frozen=True)
class Picture:
    """A picture in the page.

    Attributes:
        uri: a data URI.
        width: in pixels.
        height: in pixels.
        is_small: whether it is enlarged with its pixels to be seen.
    """

    uri: str
    width: int
    height: int
    is_small: bool


@dataclass(frozen=True)
class Shown:
    """An engine's image; `difference` is its distance to the reference, `agreement` says what to think of it."""

    rival: str
    colour: str
    image: Picture
    difference: Picture | None
    agreement: str


@dataclass(frozen=True)
class Gallery:
    """The images of a workload, the reference first; differences are shown `factor` times as large."""

    title: str
    shown: tuple[Shown, ...]
    factor: int

    @property
    def has_differences(self) -> bool:
        """Whether there is a reference to differ from."""
        return any(each.difference is not None for each in self.shown)


def galleries_of(comparison: Comparison, palette: Palette) -> list[Gallery]:
    """Return the images by workload."""
    workloads = dict.fromkeys(
        [*(each.workload for each in comparison.results), *(workload for _, workload in comparison.images)]
    )
    galleries = [_gallery(comparison, workload, palette) for workload in workloads]
    return [gallery for gallery in galleries if gallery.shown]


def _gallery(comparison: Comparison, workload: Workload, palette: Palette) -> Gallery:
    names = [REFERENCE, *(name for name in palette.rivals if name != REFERENCE)]
    found = {name: comparison.images[name, workload] for name in names if (name, workload) in comparison.images}
    return gallery_of(workload.title, found, palette.colour)


def gallery_of(title: str, found: Mapping[str, Image], colour_of: Callable[[str], str]) -> Gallery:
    """Return images side by side, with their differences to the one that is called REFERENCE."""
    reference = found.get(REFERENCE)
    factor = factor_for(reference, [image for name, image in found.items() if name != REFERENCE])
    shown = [_shown(name, image, reference, colour_of(name), factor) for name, image in found.items()]
    return Gallery(title, tuple(shown), factor)


def _shown(rival: str, image: Image, reference: Image | None, colour: str, factor: int) -> Shown:
    if rival == REFERENCE or reference is None:
        return Shown(rival, colour, _picture(image), None, "the reference" if rival == REFERENCE else "no reference")
    if image.size != reference.size:
        return Shown(rival, colour, _picture(image), None, f"another size than {REFERENCE}")
    decibels = _psnr(image, reference)
    agreement = "same pixels" if decibels == math.inf else f"PSNR {number(decibels, 1)} dB"
    return Shown(rival, colour, _picture(image), _picture(difference(image, reference, factor)), agreement)


def factor_for(reference: Image | None, images: Sequence[Image]) -> int:
    """Return how many times as large differences are shown: as large as leaves those of like pictures below white."""
    alike = [
        _distance(image, reference)
        for image in images
        if reference is not None and image.size == reference.size and _psnr(image, reference) >= LEAST_PSNR_DB
    ]
    most = max((float(np.quantile(each, 1 - _CUT_OFF)) for each in alike), default=0.0)
    if most == 0:
        return _FACTORS[-1]
    return next((factor for factor in _FACTORS if factor * most <= 255), _FACTORS[-1])


def difference(image: Image, reference: Image, factor: int) -> Image:
    """Return the absolute difference of two images of one size, `factor` times as large, cut off at white."""
    from PIL.Image import fromarray

    return fromarray(np.minimum(_distance(image, reference) * factor, 255).astype(np.uint8))


def _distance(image: Image, reference: Image) -> npt.NDArray[np.int32]:
    distance: npt.NDArray[np.int32] = np.abs(_array(image).astype(np.int32) - _array(reference))
    return distance


def _psnr(image: Image, reference: Image) -> float:
    return psnr(_array(image) / 255, _array(reference) / 255)


def _array(image: Image) -> npt.NDArray[np.uint8]:
    return np.asarray(image.convert("RGB"))


def _picture(image: Image) -> Picture:
    """Return an image for the page, without loss where it is neither too wide nor too heavy."""
    from PIL.Image import Resampling

    shown = image.convert("RGB")
    if shown.width > _MOST:
        shown = shown.resize((_MOST, max(1, round(shown.height * _MOST / shown.width))), Resampling.LANCZOS)
    file = io.BytesIO()
    shown.save(file, "WEBP", lossless=True, quality=80)
    if len(file.getvalue()) > _HEAVIEST_BYTES:
        file = io.BytesIO()
        shown.save(file, "WEBP", quality=90)
    uri = f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
    return Picture(uri, shown.width, shown.height, shown.width < _SMALL)
