"""The 8-bit number formats that weights are stored in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

__all__ = ["FORMATS", "NumberFormat"]


@dataclass(frozen=True)
class NumberFormat:
    """An 8-bit number format.

    Attributes:
        name: the name in quantization types: "e4m3", "e5m2" or "int8".
        dtype: the ONNX type.
        max_value: the largest magnitude that is used, which is also the largest finite value.
    """

    name: str
    dtype: ir.DataType
    max_value: float

    def rounded(self, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return float32 values in this format, rounded to nearest with ties to even and saturated at `max_value`."""
        limited = np.clip(values, -self.max_value, self.max_value)
        return (np.rint(limited) if self.dtype == ir.DataType.INT8 else limited).astype(self.dtype.numpy())


FORMATS: Mapping[str, NumberFormat] = {
    each.name: each
    for each in (
        # The formats of Micikevicius et al. 2022 (arXiv:2209.05433). e4m3fn has no infinity.
        NumberFormat("e4m3", ir.DataType.FLOAT8E4M3FN, 448.0),
        NumberFormat("e5m2", ir.DataType.FLOAT8E5M2, 57344.0),
        # -128 is not used, so that the range is symmetric.
        NumberFormat("int8", ir.DataType.INT8, 127.0),
    )
}
"""The formats by name."""
