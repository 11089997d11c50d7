"""Find where initializers in 8 bits hold each weight of the torch module, by its values.

A weight is rounded with the scales that the file has, and the bytes are compared, all of them. So the rule that
computes them again with an adapter (`sdonnx.folder.stored_numbers`) is proven to be the optimizer's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.folder.stored_numbers import STORED_FORMATS, quantize, scales_of
from sdonnx.folder.weight_table import Initializer, Layout, Place, Scales, channel_rows, rows_of
from sdonnx.graph.edit import is_weight
from sdonnx.graph.tensors import read
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.operators.sdonnx_domain.matmul_8bit import EightBits

__all__ = ["StoredWeight", "StoredWeights", "positions_of", "runs_of", "stored_entry"]

Array = npt.NDArray[Any]

_TYPES = {
    ir.DataType.INT8: ("I8", "int8"),
    ir.DataType.FLOAT8E4M3FN: ("F8_E4M3", "e4m3"),
    ir.DataType.FLOAT8E5M2: ("F8_E5M2", "e5m2"),
}
_FLOATS = {ir.DataType.FLOAT16: "F16", ir.DataType.FLOAT: "F32"}

_JOINED = re.compile(r"\.and_\d+_more|\+")


def stored_entry(value: ir.Value) -> Initializer | None:
    """Return the entry of an initializer in 8 bits, without the graphs that have it.

    None is returned for other initializers, and for those that the run-time cannot replace: values in the graph, and
    such as have scales that the graph computes.
    """
    tensor = value.const_value
    if not isinstance(tensor, ir.ExternalTensor) or value.is_graph_output() or not value.uses():
        return None
    found = {_scales_in(use.node, use.idx, value) for use in value.uses()}
    scales = found.pop() if len(found) == 1 else None
    if scales is None:
        return None
    factors, number_format, axis = scales
    if not is_weight(factors) or factors.const_value is None or factors.const_value.dtype not in _FLOATS:
        return None
    # Our own operators read float32, which are scales that the quantization has rounded to the matmul's float16.
    is_own = tensor.dtype == ir.DataType.UINT8
    rounded_to = "F16" if is_own else _FLOATS[factors.const_value.dtype]
    return Initializer(
        "U8" if is_own else _TYPES[tensor.dtype][0],
        tuple(int(size) for size in tensor.shape.numpy()),
        (tensor.offset or 0, (tensor.offset or 0) + tensor.nbytes),
        in_place=True,
        scales=Scales(factors.name or "", number_format, rounded_to, axis),
    )


def _scales_in(node: ir.Node, index: int, value: ir.Value) -> tuple[ir.Value, str, int | None] | None:
    """Return the scales by which a node multiplies an initializer, their format and axis."""
    if node.op_type == "DequantizeLinear" and index == 0 and len(node.inputs) == 2 and value.dtype in _TYPES:
        scales = node.inputs[1]
        if scales is None or scales.shape is None or scales.shape.rank() > 1:
            return None
        axis = node.attributes.get_int("axis", 1) if scales.shape.rank() else None
        return scales, _TYPES[value.dtype][1], axis
    if (node.domain, node.op_type, index, value.dtype) != (OUR_DOMAIN, "ScaledMatMul", 2, ir.DataType.UINT8):
        return None
    number_format = EightBits(node.attributes.get_int("w_format", 0)).name.lower()
    scales = node.inputs[3] if len(node.inputs) > 3 else None
    if scales is None:  # SumRows multiplies by them
        readers = {use.node.inputs[2] for use in node.outputs[0].uses() if use.node.op_type == "SumRows"}
        scales = readers.pop() if len(readers) == 1 else None
    return None if scales is None else (scales, number_format, 0)


@dataclass(frozen=True)
class StoredWeight:
    """An initializer in 8 bits of the written graphs.

    Attributes:
        name: its name.
        entry: its entry in the table.
        tensor: its tensor.
        factors: the tensor of its scales.
    """

    name: str
    entry: Initializer
    tensor: ir.TensorProtocol
    factors: ir.TensorProtocol

    @property
    def scales(self) -> Scales:
        """How its numbers are restored."""
        if self.entry.scales is None:
            raise ValueError(f"{self.name} has no scales")
        return self.entry.scales

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts that it may have."""
        is_matrix = len(self.entry.shape) == 2
        if self.scales.axis is None:
            return ("columns", "rows") if is_matrix else ("rows",)
        return ("columns",) if is_matrix and self.scales.axis == 1 else ("rows",)

    @cached_property
    def _factors(self) -> Array:
        return read(self.factors).astype(np.float16 if self.scales.dtype == "F16" else np.float32)

    def place_of(self, weight: Array) -> Place | None:
        """Return where it has a weight in torch's layout, or None if it has other numbers."""
        for layout in self.layouts:
            rows = rows_of(weight, layout)
            found = self._channels(layout, rows.shape[1])
            if found is None or self._rounded(rows[:1])[0] not in found:
                continue
            positions = positions_of([found.get(key, []) for key in self._rounded(rows)])
            if positions is not None:
                return Place(self.name, layout, tuple(runs_of(positions)))
        return None

    def _rounded(self, rows: Array) -> list[bytes]:
        """Return the bytes of channels, with their scales."""
        rows = rows.astype(self._factors.dtype)
        number_format = STORED_FORMATS[self.scales.format]
        if self.scales.axis is None:
            return _keys(quantize(rows, self._factors, number_format, None), None)
        factors = scales_of(rows, number_format, 0, rows.dtype, self.name)
        return _keys(quantize(rows, factors, number_format, 0), factors)

    def _channels(self, layout: Layout, inputs: int) -> dict[bytes, list[int]] | None:
        """Return the index of each channel by its bytes; None if channels have another size."""
        shape = self.entry.shape
        if (shape[0] if layout == "columns" else int(np.prod(shape[1:]))) != inputs:
            return None
        if layout not in self._index:
            rows = channel_rows(read(self.tensor).view(np.uint8), layout, inputs)
            keys = _keys(np.ascontiguousarray(rows), None if self.scales.axis is None else self._factors)
            found: defaultdict[bytes, list[int]] = defaultdict(list)
            for at, key in enumerate(keys):
                found[key].append(at)
            self._index[layout] = dict(found)
        return self._index[layout]

    @cached_property
    def _index(self) -> dict[Layout, dict[bytes, list[int]]]:
        return {}


def _keys(rows: Array, factors: Array | None) -> list[bytes]:
    if factors is None:
        return [row.tobytes() for row in rows]
    return [row.tobytes() + factor.tobytes() for row, factor in zip(rows, factors, strict=True)]


class StoredWeights:
    """The initializers in 8 bits of a component's written graphs.

    Args:
        weights: the initializers.
    """

    def __init__(self, weights: list[StoredWeight]) -> None:
        self._weights = weights

    def places(self, initializer: str, weight: Array) -> Iterator[Place]:
        """Yield the places of a weight.

        Args:
            initializer: its name in the exported graph.
            weight: its values in torch's layout.
        """
        for each in self._weights:
            is_named = each.name.startswith(f"{initializer}.") or _JOINED.search(each.name)
            if is_named and (place := each.place_of(weight)) is not None:
                yield place


def positions_of(candidates: list[list[int]]) -> list[int] | None:
    """Return one index for each channel, increasing where channels are equal; None if there is none for some."""
    positions: list[int] = []
    for each in candidates:
        behind = [at for at in each if not positions or at > positions[-1]] or each
        if not behind:
            return None
        positions.append(behind[0])
    return positions if len(set(positions)) == len(positions) else None


def runs_of(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first index and the length of each run of indexes that follow one another."""
    first = previous = positions[0]
    for at in positions[1:]:
        if at != previous + 1:
            yield first, previous - first + 1
            first = at
        previous = at
    yield first, previous - first + 1
