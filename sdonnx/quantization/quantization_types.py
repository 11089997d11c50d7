"""Quantization types: the formats of weights and activations, and what a scale covers.

Names are from OneDiff (`nexfort.ao.quantize`): the format of activations precedes the format of weights, so
`fp8_e4m3_e5m2_dynamic` multiplies activations in e4m3 by weights in e5m2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.errors import OptionError

__all__ = ["FORMATS", "NOT_QUANTIZED", "TYPES", "NumberFormat", "QuantizationType", "quantization_type"]


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


NOT_QUANTIZED = "none"
"""The name that stands for no quantization where a configuration expects a type."""


@dataclass(frozen=True)
class QuantizationType:
    """How the factors of matmuls are stored and multiplied.

    Attributes:
        name: its name.
        weights: the format of weights.
        activations: the format of activations; None for types that quantize weights only.
        per_tensor: whether a tensor has one scale. Otherwise a weight has one for each output channel, and an
            activation one for each row.
        is_static: whether activations have scales that were calibrated, one for a tensor. Otherwise their scales are
            computed from their values at each call.
    """

    name: str
    weights: NumberFormat
    activations: NumberFormat | None = None
    per_tensor: bool = False
    is_static: bool = False

    @property
    def is_weight_only(self) -> bool:
        """Whether activations keep their type."""
        return self.activations is None


def _types() -> Iterator[QuantizationType]:
    floats = [FORMATS["e4m3"], FORMATS["e5m2"]]
    for activations in floats:
        yield QuantizationType(f"fp8_{activations.name}_weightonly", activations)
        for weights in floats:
            name = f"fp8_{activations.name}_{weights.name}"
            # OneDiff names both formats also where activations keep their type.
            yield QuantizationType(f"{name}_weightonly", weights)
            yield QuantizationType(f"{name}_weightonly_per_tensor", weights, per_tensor=True)
            if (activations.name, weights.name) != ("e5m2", "e5m2"):
                # cuBLASLt has no matmul of two matrices in e5m2 (its documentation, "FP8 data types").
                yield QuantizationType(f"{name}_dynamic", weights, activations)
                yield QuantizationType(f"{name}_dynamic_per_tensor", weights, activations, per_tensor=True)
    yield QuantizationType("fp8_static", floats[0], floats[0], is_static=True)
    int8 = FORMATS["int8"]
    yield QuantizationType("int8_weightonly", int8)
    yield QuantizationType("int8_dynamic", int8, int8)
    yield QuantizationType("int8_static", int8, int8, is_static=True)


TYPES: Mapping[str, QuantizationType] = {each.name: each for each in _types()}
"""The types by name."""

_SHORT_NAMES = {"fp8": "fp8_e4m3_e4m3_dynamic", "int8": "int8_dynamic"}


def quantization_type(name: object) -> QuantizationType:
    """Return the type of a name, or of one of the short names `fp8` and `int8`.

    Raises:
        OptionError: no type has that name.
    """
    found = TYPES.get(_SHORT_NAMES.get(name, name)) if isinstance(name, str) else None
    if found is None:
        names = ", ".join([*_SHORT_NAMES, *TYPES])
        is_narrow = isinstance(name, str) and name.startswith("fp8_e5m2_e5m2_dynamic")
        remedy = "take fp8_e5m2_e4m3_dynamic: no GPU multiplies e5m2 by e5m2" if is_narrow else "name one of these"
        raise OptionError(f"the quantization type {name!r} is unknown", f"one of {names}", remedy)
    return found
