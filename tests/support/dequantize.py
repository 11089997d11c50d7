"""Restore weights in 8 bits as the graphs do."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.folder.stored_numbers import along

__all__ = ["dequantize"]

Array = npt.NDArray[Any]


def dequantize(values: Array, scales: Array, axis: int | None) -> Array:
    """Return a weight restored in the type of its scales, as ONNX's DequantizeLinear computes it.

    Args:
        values: the weight in an 8-bit format.
        scales: its scales, float32 or float16.
        axis: the axis of the scales; None for one scale.
    """
    product = values.astype(np.float32) * along(scales, axis, values.ndim).astype(np.float32)
    return product.astype(scales.dtype)
