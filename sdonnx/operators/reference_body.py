"""Helpers for writing reference bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, graph_of, insert, optional_input

__all__ = ["TO_NCHW", "TO_NHWC", "channels_last_conv", "copied_rows"]

TO_NCHW, TO_NHWC = [0, 3, 1, 2], [0, 2, 3, 1]
"""Permutations between (B,H,W,C) and (B,C,H,W)."""


def channels_last_conv(node: ir.Node, attributes: Mapping[str, Any]) -> ir.Value:
    """Return the convolution of x (B,H,W,C) by w (M,kH,kW,C/group), with a bias (M,) or none, the inputs of a node.

    Args:
        node: the node before which it is inserted.
        attributes: attributes of ONNX's Conv.
    """
    planes = insert(node, "Transpose", [node.inputs[0]], {"perm": TO_NCHW})
    weight = insert(node, "Transpose", [node.inputs[1]], {"perm": TO_NCHW})
    result = insert(node, "Conv", [planes, weight, optional_input(node, 2)], attributes)
    return insert(node, "Transpose", [result], {"perm": TO_NHWC})


def copied_rows(node: ir.Node, value: ir.Value, like: ir.Value) -> ir.Value:
    """Return copies of a value (A,...), one behind another, with as many rows as `like` (B,...), where A divides B.

    The value itself is returned where A = B is known.
    """
    first, other = (sizes[0] if (sizes := dims(each)) else None for each in (value, like))
    if first is not None and first == other and (isinstance(first, int) or first.value is not None):
        return value
    graph, int64 = graph_of(node), ir.DataType.INT64
    one = constant(graph, [1], np.int64, "integers_1")
    rows, wanted = (insert(node, "Shape", [each], {"start": 0, "end": 1}, dtype=int64) for each in (value, like))
    copies = insert(node, "Div", [wanted, insert(node, "Max", [rows, one])])  # no rows have no copies
    whole = insert(node, "Concat", [copies, insert(node, "Shape", [value], dtype=int64)], {"axis": 0})
    rest = insert(node, "Shape", [value], {"start": 1}, dtype=int64)
    flat = insert(node, "Concat", [wanted, rest], {"axis": 0})
    return insert(node, "Reshape", [insert(node, "Expand", [value, whole]), flat], {"allowzero": 1})
