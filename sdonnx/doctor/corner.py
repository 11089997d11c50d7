"""Corners of what the contrib operators accept: sizes, attributes, and the values that they are tried with."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LENGTHS", "MASK", "TOLERANCE", "Array", "Corner", "rounded"]

Array = npt.NDArray[Any]

# A sum of products in float32, rounded once: 2^-11 in fp16, 2^-8 in bfloat16, and some for the order of sums.
TOLERANCE: Mapping[str, float] = {"float16": 2e-3, "float32": 2e-5, "bfloat16": 1.6e-2}
"""The largest relative error of a kernel that is right, by type."""

LENGTHS = 4
"""MultiHeadAttention's input key_padding_mask: how many keys of each row are there."""

MASK = 5
"""MultiHeadAttention's input attention_bias."""


@dataclass(frozen=True)
class Corner:
    """One node of a contrib operator.

    Attributes:
        op_type: the operator, in the domain com.microsoft.
        name: the corner.
        shapes: of its inputs; None for an absent one.
        attributes: its attributes.
        outputs: how many it has; the second and third of the norms over the last axis are left out.
        weights: the inputs that are initializers.
    """

    op_type: str
    name: str
    shapes: tuple[tuple[int, ...] | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    weights: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.op_type}-{self.name}".replace(" ", "_")

    @property
    def integers(self) -> frozenset[int]:
        """The inputs that are int32 in every type."""
        return frozenset({LENGTHS} if self.op_type == "MultiHeadAttention" else ())

    def draw(self) -> list[Array | None]:
        """Normal values, the same for a corner wherever it stands; weights of convolutions keep the variance.

        Of several numbers of keys the first is 1 and the last all; the others, as a single one, are between.
        """
        generator = np.random.default_rng(zlib.crc32(str(self).encode()))
        arrays: list[Array | None] = []
        for index, shape in enumerate(self.shapes):
            if shape is not None and index in self.integers:
                arrays.append(self._numbers_of_keys(generator))
                continue
            array = None if shape is None else generator.standard_normal(shape, np.float32)
            if array is not None and self.op_type == "NhwcConv" and index == 1:
                array /= np.float32(np.sqrt(array[0].size))
            if array is not None and self.op_type == "MultiHeadAttention" and index == MASK:
                array[generator.random(array.shape) < 0.1] = -10000
                array[..., 0] = 0  # no row is masked as a whole
            arrays.append(array)
        return arrays

    def _numbers_of_keys(self, generator: np.random.Generator) -> Array:
        assert self.shapes[1] is not None
        batch, keys, _ = self.shapes[1]
        numbers = generator.integers(2, keys, batch, np.int32)
        if batch > 1:
            numbers[[0, -1]] = 1, keys
        return numbers


def rounded(arrays: Sequence[Array | None], dtype: str, float32_inputs: Sequence[int] = ()) -> list[Array | None]:
    """Return the values that a kernel of a type gets, as float32; integers stay as they are.

    Args:
        arrays: values of the inputs, float32 or integers; None for an absent one.
        dtype: "float16", "float32" or "bfloat16".
        float32_inputs: the inputs that are float32 in every type.
    """
    return [
        array if array is None or array.dtype.kind == "i" or index in float32_inputs else _rounded(array, dtype)
        for index, array in enumerate(arrays)
    ]


def _rounded(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        # The upper half of a float32, rounded to the nearest, ties to even; numpy has no such type.
        bits = array.view(np.uint32)
        result: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
        return result
    return array.astype(dtype).astype(np.float32)
