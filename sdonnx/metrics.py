"""Metrics that compare two tensors or two images, and shares of right images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "MIN_PSNR_DB",
    "Proportion",
    "is_empty",
    "output_error",
    "pattern_error",
    "psnr",
    "relative_error",
    "structural_similarity",
]

MIN_PSNR_DB = 30.0
"""Images of the same weights, noise and sampler are above 45 dB in fp16 (docs/results). With other weights, another
sampler or other noise they are below 20 dB."""

_WINDOW = 7  # of the structural similarity (Wang et al. 2004, with a uniform window as in scikit-image)


@dataclass(frozen=True)
class Proportion:
    """The share of images in which something is right.

    Attributes:
        right: number of these images.
        count: number of all images.
        share: `right / count`.
        low: lower end of the Wilson interval of the share, with 95 % confidence.
        high: its upper end.
    """

    right: int
    count: int
    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


def relative_error(values: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    """Return ||values - reference|| / ||reference||, in float64.

    The result is infinity if `values` contains NaN or infinity, or if only `reference` is zero everywhere.

    Raises:
        ValueError: the shapes differ.
    """
    if values.shape != reference.shape:
        raise ValueError(f"shapes {values.shape} and {reference.shape} differ")
    difference = values.astype(np.float64) - reference.astype(np.float64)
    if not np.isfinite(difference).all():
        return float("inf")
    size = float(np.linalg.norm(reference.astype(np.float64)))
    distance = float(np.linalg.norm(difference))
    if size == 0:
        return 0.0 if distance == 0 else float("inf")
    return distance / size


def pattern_error(patterns: npt.NDArray[np.uint8], reference: npt.NDArray[np.uint8]) -> float:
    """Return the share of numbers in 8 bits that differ, e4m3, e5m2 or int8 as patterns.

    A sum in another order may move a number over the middle between two neighbors. The result is infinity if a number
    differs by more than that, or is NaN. The patterns of zero and of minus zero are equal.

    Raises:
        ValueError: the shapes differ.
    """
    if patterns.shape != reference.shape:
        raise ValueError(f"shapes {patterns.shape} and {reference.shape} differ")
    # NaN in e4m3 and e5m2. In int8 they are 127 and -1, one of which a reference of many numbers contains.
    not_numbers = (0x7F, 0xFF)
    if np.isin(patterns, not_numbers).any() and not np.isin(reference, not_numbers).any():
        return float("inf")
    minus_zero = 0x80  # no number in int8: those are -127 to 127
    left, right = (np.where(each == minus_zero, 0, each).astype(np.int16) for each in (patterns, reference))
    apart = (left - right) % 256
    # Neighbors of zero in floating point are 0x01 and 0x81, in int8 0x01 and 0xff.
    is_near = np.isin(apart, (0, 1, 255)) | ((left * right == 0) & (left + right == minus_zero + 1))
    if not is_near.all():
        return float("inf")
    return float(np.mean(apart != 0)) if apart.size else 0.0


def output_error(values: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    """Return the error of a kernel's output: `pattern_error` of uint8, `relative_error` of other types.

    Raises:
        ValueError: the shapes differ.
    """
    if reference.dtype == np.uint8:
        return pattern_error(values, reference)
    return relative_error(values.astype(np.float32), reference)


def psnr(image: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    """Return the peak signal-to-noise ratio in dB of two images with values from 0 to 1.

    PSNR = 10 log10(1 / mean((image - reference)**2)). The result is infinity for equal images, and minus infinity if
    the image contains NaN.

    Raises:
        ValueError: the shapes differ.
    """
    if image.shape != reference.shape:
        raise ValueError(f"shapes {image.shape} and {reference.shape} differ")
    error = float(np.mean((image.astype(np.float64) - reference.astype(np.float64)) ** 2))
    if not np.isfinite(error):
        return float("-inf")
    return float("inf") if error == 0 else float(10 * np.log10(1 / error))


def is_empty(images: npt.NDArray[np.uint8]) -> bool:
    """Return whether one of the images (B,H,W,3) has a single colour, such as a black image or one made of NaN."""
    return bool((np.ptp(images.reshape(len(images), -1, 3), axis=1).max(axis=1) == 0).any())


def structural_similarity(image: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    """Return the mean structural similarity of images (B,C,H,W); 1 for other shapes and images below the window.

    Z. Wang et al., "Image quality assessment: from error visibility to structural similarity", 2004, with a uniform
    window of 7x7; the range is the reference's.
    """
    if image.ndim != 4 or min(image.shape[2:]) < _WINDOW:
        return 1.0
    x, y = image.astype(np.float64), reference.astype(np.float64)
    span = float(y.max() - y.min()) or 1.0
    mean_x, mean_y = _window_means(x), _window_means(y)
    factor = _WINDOW**2 / (_WINDOW**2 - 1)  # unbiased variances
    variance_x = factor * (_window_means(x * x) - mean_x**2)
    variance_y = factor * (_window_means(y * y) - mean_y**2)
    covariance = factor * (_window_means(x * y) - mean_x * mean_y)
    first, second = (0.01 * span) ** 2, (0.03 * span) ** 2
    similarity = (2 * mean_x * mean_y + first) * (2 * covariance + second)
    similarity /= (mean_x**2 + mean_y**2 + first) * (variance_x + variance_y + second)
    return float(similarity.mean())


def _window_means(images: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    windows = np.lib.stride_tricks.sliding_window_view(images, (_WINDOW, _WINDOW), axis=(2, 3))
    means: npt.NDArray[np.float64] = windows.mean(axis=(-2, -1))
    return means
