"""Kernel cases: input shapes and attributes that an operator's kernels are tested with, and their input values.

This module imports neither onnx nor onnx_ir: `sdonnx.doctor` uses it at run time.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MICROSOFT", "OUR_DOMAIN", "TOLERANCE", "Array", "Fill", "KernelCase", "rounded"]

Array = npt.NDArray[Any]

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's contrib operators."""

OUR_DOMAIN = "sdonnx"
"""The domain of the operators of `libsdonnx_kernels.so` (`kernels/` in the repository)."""

# A sum of products in float32, rounded once: 2^-11 in fp16, 2^-8 in bfloat16, plus a margin for the order of sums.
TOLERANCE: Mapping[str, float] = {"float16": 2e-3, "float32": 2e-5, "bfloat16": 1.6e-2}
"""The maximum relative error of a correct kernel, by data type."""


class Fill:
    """How the values of an input are generated. An input without a `Fill` holds standard normal values.

    Plain strings, so that they can be written to JSON.

    Attributes:
        UNIT_GAIN: normal values divided by sqrt(fan-in): a weight (M,kH,kW,C) that keeps the variance of its input.
        UNIT_GAIN_COLUMNS: normal values divided by sqrt(K): weights (...,K,N) that keep the variance.
        MASK: a normal bias (..., S, L) in which one score in ten is -10000. Every row keeps its first key.
        KEY_COUNTS: int32 counts (B,) between 2 and the number of keys, axis 1 of input 1. Where there are several rows,
            the first count is 1 and the last is the number of keys.
        DOUBLED_SIZES: the int64 shape (B,2H,2W,C) of an upsampled image, for input 0 of shape (B,H,W,C).
        ODD_SIZES: (B,2H-1,2W-1,C).
        ODD_HEIGHT: (B,2H-1,2W,C).
        ROW_INDEX: the int64 index 2, of the third row of a table.
        KEEP_MASK: a bool mask in which one element in three is true.
        E4M3_BITS: uint8 patterns of numbers in e4m3 of magnitudes up to 15, none of which is NaN.
        E5M2_BITS: uint8 patterns of numbers in e5m2 of magnitudes up to 14.
        INT8_BITS: uint8 patterns of numbers in int8 from -127 to 127.
        SCALES: float32 scales between 0.001 and 0.01, so that products of these numbers have magnitudes near 1.
    """

    UNIT_GAIN = "unit gain"
    UNIT_GAIN_COLUMNS = "unit gain columns"
    MASK = "mask"
    KEY_COUNTS = "key counts"
    DOUBLED_SIZES = "doubled sizes"
    ODD_SIZES = "odd sizes"
    ODD_HEIGHT = "odd height"
    ROW_INDEX = "row index"
    KEEP_MASK = "keep mask"
    E4M3_BITS = "e4m3 bits"
    E5M2_BITS = "e5m2 bits"
    INT8_BITS = "int8 bits"
    SCALES = "scales"


# How much an upsampled height and width are less than doubled.
_LESS = {Fill.DOUBLED_SIZES: (0, 0), Fill.ODD_SIZES: (1, 1), Fill.ODD_HEIGHT: (1, 0)}
# The largest pattern of a positive number that is generated.
_MAX_BITS = {Fill.E4M3_BITS: 0x57, Fill.E5M2_BITS: 0x4A, Fill.INT8_BITS: 0x7F}
_INTEGERS = {
    Fill.KEY_COUNTS: "int32",
    Fill.ROW_INDEX: "int64",
    Fill.KEEP_MASK: "bool",
    Fill.E4M3_BITS: "uint8",
    Fill.E5M2_BITS: "uint8",
    Fill.INT8_BITS: "uint8",
    **dict.fromkeys(_LESS, "int64"),
}


@dataclass(frozen=True)
class KernelCase:
    """One node of a contrib operator to test a kernel with.

    Attributes:
        op_type: the operator.
        name: the name of the case, unique for the operator.
        shapes: the shapes of the inputs, None for an absent one.
        attributes: the attributes of the node.
        outputs: the number of outputs.
        weights: the indices of the inputs that are initializers.
        fills: how the values of an input are generated, by index; see `Fill`.
        static_axes: the axes of an input that the reference body needs as constants, by index.
        cuda_only: whether the CPU provider lacks a kernel for this case although it has one for the operator.
        intermediate_size: the number of elements of the reference body's largest intermediate tensor, 0 where none is
            larger than the inputs.
        domain: the operator's domain.
    """

    op_type: str
    name: str
    shapes: tuple[tuple[int, ...] | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    weights: tuple[int, ...] = ()
    fills: Mapping[int, str] = field(default_factory=dict)
    static_axes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cuda_only: bool = False
    intermediate_size: int = 0
    domain: str = MICROSOFT

    def __str__(self) -> str:
        prefix = "" if self.domain == MICROSOFT else f"{self.domain}."
        return f"{prefix}{self.op_type}-{self.name}".replace(" ", "_")

    @property
    def integers(self) -> Mapping[int, str]:
        """The data types of the inputs that are integers or bool in every precision, by index."""
        return {index: _INTEGERS[fill] for index, fill in self.fills.items() if fill in _INTEGERS}

    def make_inputs(self) -> list[Array | None]:
        """Return the values of the inputs, float32, integers or bool.

        They depend only on the operator and the case's name.
        """
        generator = np.random.default_rng(zlib.crc32(str(self).encode()))
        return [
            None if shape is None else self._make_input(self.fills.get(index, ""), shape, generator)
            for index, shape in enumerate(self.shapes)
        ]

    def _make_input(self, fill: str, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
        if fill == Fill.KEY_COUNTS:
            return self._key_counts(generator)
        if fill == Fill.ROW_INDEX:
            return np.full(shape, 2, np.int64)
        if fill == Fill.KEEP_MASK:
            return generator.random(shape) < 1 / 3
        if fill in _LESS:
            return self._upsampled_shape(*_LESS[fill])
        if fill in _MAX_BITS:
            bits = generator.integers(0, _MAX_BITS[fill] + 1, shape, np.uint8)
            signs = generator.integers(0, 2, shape, np.uint8)
            if fill == Fill.INT8_BITS:
                return np.where(signs == 1, (256 - bits.astype(np.int32)) % 256, bits).astype(np.uint8)
            signed: Array = bits | (signs << 7)
            return signed
        if fill == Fill.SCALES:
            return np.asarray(generator.uniform(1e-3, 1e-2, shape), np.float32)
        array = generator.standard_normal(shape, np.float32)
        if fill == Fill.UNIT_GAIN:
            array /= np.float32(np.sqrt(array[0].size))
        elif fill == Fill.UNIT_GAIN_COLUMNS:
            array /= np.float32(np.sqrt(shape[-2]))
        elif fill == Fill.MASK:
            array[generator.random(array.shape) < 0.1] = -10000
            array[..., 0] = 0
        return array

    def _key_counts(self, generator: np.random.Generator) -> Array:
        batch, keys = (self.shapes[1] or ())[:2]
        counts = generator.integers(2, keys, batch, np.int32)
        if batch > 1:
            counts[[0, -1]] = 1, keys
        return counts

    def _upsampled_shape(self, less_height: int, less_width: int) -> Array:
        batch, height, width, channels = self.shapes[0] or ()
        return np.array([batch, 2 * height - less_height, 2 * width - less_width, channels], np.int64)


def rounded(arrays: Sequence[Array | None], dtype: str, float32_inputs: Sequence[int] = ()) -> list[Array | None]:
    """Round inputs to a data type and return them as float32; integers and bool stay unchanged.

    Args:
        arrays: the values of the inputs, float32, integers or bool; None for an absent one.
        dtype: "float16", "float32" or "bfloat16".
        float32_inputs: the inputs that are float32 in every precision.
    """
    return [
        array if array is None or array.dtype.kind in "iub" or index in float32_inputs else _rounded(array, dtype)
        for index, array in enumerate(arrays)
    ]


def _rounded(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        # The upper half of a float32, rounded to nearest, ties to even; numpy has no bfloat16.
        bits = array.view(np.uint32)
        result: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
        return result
    return array.astype(dtype).astype(np.float32)
