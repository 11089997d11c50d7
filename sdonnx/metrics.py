"""Metrics that compare two tensors or two images."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["psnr", "relative_error"]


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
