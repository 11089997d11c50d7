"""The 8-bit formats of weights as bytes, with numpy only: the run-time has no types for them.

`sdonnx.quantization.number_formats` has the same formats, and numbers are rounded to the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["STORED_FORMATS", "StoredFormat"]

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
        # See `sdonnx.quantization.number_formats` for their source and the limit of int8.
        StoredFormat("e4m3", 448.0, 3, 7),
        StoredFormat("e5m2", 57344.0, 2, 15),
        StoredFormat("int8", 127.0),
    )
}
"""The formats by name."""
