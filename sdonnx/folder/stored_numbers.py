"""The 8-bit formats of weights as bytes, with numpy only: the run-time has no types for them.

`sdonnx.quantization.quantization_types` has the same formats, and numbers are rounded to the same bytes.

Quantization is symmetric: w is stored as q = round(w / scale) and restored as q * scale, without a zero point. A scale
is the largest magnitude that it has to represent, divided by the largest finite value of the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sdonnx.errors import WeightsError

__all__ = ["STORED_FORMATS", "ScaledFormat", "StoredFormat", "along", "quantize", "scales_of"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class StoredFormat:
    """An 8-bit number format; its numbers are handled as bytes.

    Attributes:
        name: "e4m3", "e5m2" or "int8".
        max_value: the largest magnitude that is used.
        fraction_bits: bits of the fraction; None for integers.
        bias: bias of the exponent.
    """

    name: str
    max_value: float
    fraction_bits: int | None = None
    bias: int = 0

    def rounded(self, values: npt.NDArray[np.float32]) -> Bytes:
        """Return the bytes of float32 values, rounded to nearest with ties to even and saturated at `max_value`."""
        limit = np.float32(self.max_value)
        limited = np.clip(values, -limit, limit)
        if self.fraction_bits is None:
            return np.rint(limited, out=limited).astype(np.int8).view(np.uint8)
        bits = limited.view(np.uint32)
        sign = ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
        bits &= np.uint32(0x7FFFFFFF)
        # In the number that is added, the last bit is worth one step of the subnormals: the sum is rounded to a step.
        steps = np.float32(2.0 ** (24 - self.bias - self.fraction_bits))
        subnormal = (limited + steps).view(np.uint32) - steps.view(np.uint32)
        is_subnormal = limited < np.float32(2.0 ** (1 - self.bias))
        dropped = 23 - self.fraction_bits
        half = np.uint32((1 << (dropped - 1)) - 1)
        bits += ((bits >> np.uint32(dropped)) & np.uint32(1)) + half
        bits >>= np.uint32(dropped)
        bits -= np.uint32((127 - self.bias) << self.fraction_bits)  # wraps where the number is subnormal
        found: Bytes = np.where(is_subnormal, subnormal, bits).astype(np.uint8) | sign
        return found

    def restored(self, stored: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the float32 numbers of bytes."""
        if self.fraction_bits is None:
            return stored.view(np.int8).astype(np.float32)
        numbers: npt.NDArray[np.float32] = self._numbers[stored.view(np.uint8)]
        return numbers

    @cached_property
    def _numbers(self) -> npt.NDArray[np.float32]:
        """The numbers of all 256 bytes. Those that the format has for NaN and infinity are not written."""
        fraction_bits = self.fraction_bits or 0
        magnitudes = np.arange(128)
        exponent, fraction = magnitudes >> fraction_bits, magnitudes & ((1 << fraction_bits) - 1)
        significand = fraction + np.where(exponent > 0, 1 << fraction_bits, 0)
        positive = np.ldexp(significand, np.maximum(exponent, 1) - self.bias - fraction_bits).astype(np.float32)
        return np.concatenate([positive, -positive])


STORED_FORMATS: Mapping[str, StoredFormat] = {
    each.name: each
    for each in (
        # See `sdonnx.quantization.quantization_types` for their source and the limit of int8.
        StoredFormat("e4m3", 448.0, 3, 7),
        StoredFormat("e5m2", 57344.0, 2, 15),
        StoredFormat("int8", 127.0),
    )
}
"""The formats by name."""


Array = npt.NDArray[Any]


class ScaledFormat(Protocol):
    """An 8-bit number format, in the types of onnx_ir or of this package."""

    @property
    def max_value(self) -> float:
        """The largest magnitude that is used."""

    def rounded(self, values: npt.NDArray[np.float32]) -> Array:
        """Return float32 values in this format, rounded to nearest with ties to even and saturated at `max_value`."""


def scales_of(values: Array, number_format: ScaledFormat, axis: int | None, dtype: npt.DTypeLike, name: str) -> Array:
    """Return the scales of a weight, in the type in which they are stored.

    A scale that the type cannot represent is rounded up, so that no value saturates, unless the largest value would
    then overflow the type when it is restored. A channel of zeros has the scale 1.

    Args:
        values: the weight.
        number_format: the format to store it in.
        axis: the axis of the output channels, for one scale each (C,); None for one scale of the whole weight ().
        dtype: float32 or float16.
        name: the name of the weight in the error.

    Raises:
        WeightsError: the weight holds NaN or infinity.
    """
    axes = None if axis is None else tuple(each for each in range(values.ndim) if each != axis % values.ndim)
    largest = np.max(np.abs(values), axis=axes, initial=0).astype(np.float32)
    if not np.isfinite(largest).all():
        raise WeightsError(
            f"the weight {name} holds NaN or infinity", "finite weights", "export a pipeline with finite weights"
        )
    exact = np.asarray(largest / np.float32(number_format.max_value))
    # The quotient of small numbers is subnormal, and has lost bits.
    wide = largest.astype(np.float64) / number_format.max_value
    exact = np.where(exact < np.finfo(np.float32).tiny, wide, exact)
    scales = np.asarray(exact.astype(dtype))
    scales = np.where(scales < exact, np.nextafter(scales, np.asarray(np.inf, dtype)), scales)
    with np.errstate(over="ignore"):
        restored = scales * np.asarray(number_format.max_value, dtype)
    scales = np.where(np.isfinite(restored), scales, np.nextafter(scales, np.asarray(0, dtype)))
    # The quotient of a subnormal number may be zero.
    scales = np.where(scales == 0, np.finfo(scales.dtype).smallest_subnormal, scales)
    return np.where(largest == 0, np.asarray(1, dtype), scales).astype(dtype)


def quantize(values: Array, scales: Array, number_format: ScaledFormat, axis: int | None) -> Array:
    """Return a weight in an 8-bit format: the quotient is computed in float32 and rounded once.

    Args:
        values: the weight.
        scales: its scales (`scales_of`).
        number_format: the format.
        axis: the axis of the scales; None for one scale.
    """
    with np.errstate(over="ignore"):  # of a subnormal scale; the format saturates
        quotients: Array = values.astype(np.float32) / along(scales, axis, values.ndim).astype(np.float32)
    return number_format.rounded(quotients)


def along(scales: Array, axis: int | None, rank: int) -> Array:
    """Return the scales in a shape that broadcasts along an axis of a weight.

    Args:
        scales: (C,), or () for one scale.
        axis: the axis of the scales; None for one scale.
        rank: the number of the weight's dimensions.
    """
    if axis is None:
        return scales
    return scales.reshape([-1 if each == axis % rank else 1 for each in range(rank)])
