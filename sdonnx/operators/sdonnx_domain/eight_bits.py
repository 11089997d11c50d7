"""8-bit numbers as uint8 tensors, as our own operators pass them, in standard operators.

ONNX's opset 23 cannot reinterpret bits, so reference bodies look values up in tables of all 256 patterns.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.graph.edit import constant, graph_of, insert

__all__ = ["EightBits", "decoded", "encoded"]

_FLOAT, _INT64, _UINT8 = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.UINT8


class EightBits(enum.IntEnum):
    """The formats of our own operators, with the numbers that their attributes have."""

    E4M3 = 0
    E5M2 = 1
    INT8 = 2

    @property
    def dtype(self) -> ir.DataType:
        """The ONNX type."""
        return (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2, ir.DataType.INT8)[self]

    @property
    def max_value(self) -> float:
        """The largest magnitude that is used."""
        return (448.0, 57344.0, 127.0)[self]

    def values(self) -> npt.NDArray[np.float32]:
        """Return the numbers of all 256 patterns, in their order; NaN for those that are no numbers."""
        patterns = np.arange(256, dtype=np.uint8).view(self.dtype.numpy()).astype(np.float32)
        return np.where(np.isfinite(patterns), patterns, np.float32(np.nan))


def decoded(node: ir.Node, bits: ir.Value, number_format: EightBits) -> ir.Value:
    """Return the numbers float32 of patterns, inserted before a node."""
    table = constant(graph_of(node), number_format.values(), np.float32, f"patterns_{number_format.name.lower()}")
    indexes = insert(node, "Cast", [bits], {"to": _INT64}, dtype=_INT64, shape=bits.shape)
    return insert(node, "Gather", [table, indexes], {"axis": 0}, shape=bits.shape)


def encoded(node: ir.Node, quotients: ir.Value, number_format: EightBits) -> ir.Value:
    """Return the patterns of numbers float32, rounded to nearest with ties to even and saturated."""
    graph, name = graph_of(node), number_format.name.lower()
    most = number_format.max_value
    low = constant(graph, -most, np.float32, f"low_{name}")
    high = constant(graph, most, np.float32, f"high_{name}")
    limited = insert(node, "Clip", [quotients, low, high], shape=quotients.shape)
    zero = constant(graph, 0, np.float32, "zero_float32")
    is_negative = insert(node, "Less", [limited, zero], dtype=ir.DataType.BOOL, shape=quotients.shape)
    if number_format is EightBits.INT8:
        whole = insert(node, "Round", [limited], shape=quotients.shape)
        turned = insert(node, "Add", [whole, constant(graph, 256, np.float32, "int8_patterns")])
        # A number that rounds to zero from below is not turned.
        is_below = insert(node, "Less", [whole, zero], dtype=ir.DataType.BOOL)
        codes = insert(node, "Where", [is_below, turned, whole], dtype=_FLOAT)
        return insert(node, "Cast", [codes], {"to": _UINT8}, dtype=_UINT8, shape=quotients.shape)
    narrow = insert(node, "Cast", [limited], {"to": number_format.dtype}, dtype=number_format.dtype)
    sizes = insert(node, "Abs", [insert(node, "Cast", [narrow], {"to": _FLOAT}, dtype=_FLOAT)])
    # The patterns of positive numbers are in the order of the numbers: a pattern is the count of those up to it.
    values = number_format.values()[1:128]
    steps = constant(graph, values[np.isfinite(values)], np.float32, f"steps_{name}")
    last = constant(graph, [-1], np.int64, "integers_m1")
    reached = insert(node, "GreaterOrEqual", [insert(node, "Unsqueeze", [sizes, last]), steps], dtype=ir.DataType.BOOL)
    counted = insert(node, "Cast", [reached], {"to": _FLOAT}, dtype=_FLOAT)
    count = insert(node, "ReduceSum", [counted, last], {"keepdims": 0})
    sign = insert(node, "Where", [is_negative, constant(graph, 128, np.float32, "sign_pattern"), zero], dtype=_FLOAT)
    total = insert(node, "Add", [count, sign])
    return insert(node, "Cast", [total], {"to": _UINT8}, dtype=_UINT8, shape=quotients.shape)
