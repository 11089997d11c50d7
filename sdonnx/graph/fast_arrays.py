"""Conversions of large arrays of weights, by torch where it is loaded.

torch has vector instructions for float16 and blocks for transposing, which take a third of NumPy's time. The results
are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["cast", "transposed"]

Array = npt.NDArray[Any]

_MIN_VALUES = 2**16  # fewer are converted before torch has begun

_FLOATS = (np.dtype(np.float16), np.dtype(np.float32))


def cast(values: Array, dtype: npt.DTypeLike) -> Array:
    """Return values in another type, as a contiguous copy. Those that exceed its range become infinite."""
    wanted = np.dtype(dtype)
    tensor = _tensor_of(values) if wanted in _FLOATS else None
    if tensor is None:
        with np.errstate(over="ignore"):
            return values.astype(wanted, order="C")
    torch = sys.modules["torch"]
    types = {np.dtype(np.float16): torch.float16, np.dtype(np.float32): torch.float32}
    converted: Array = tensor.contiguous().to(types[wanted], copy=True).numpy()
    return converted


def transposed(values: Array, axes: Sequence[int]) -> Array:
    """Return values with their axes in another order, as a contiguous array."""
    tensor = _tensor_of(values)
    if tensor is None:
        return np.ascontiguousarray(values.transpose(axes))
    moved: Array = tensor.permute(axes).contiguous().numpy()
    return moved


def _tensor_of(values: Array) -> Any:
    """Return a torch tensor of the memory of an array; None if torch is not loaded or of no use."""
    torch = sys.modules.get("torch")
    if torch is None or values.size < _MIN_VALUES or values.dtype not in _FLOATS:
        return None
    if not values.flags.writeable or min(values.strides) < 0:  # torch accepts neither
        return None
    return torch.from_numpy(values)
