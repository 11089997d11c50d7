"""Steps that replacements by our own operators share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from sdonnx.graph.edit import insert, replace
from sdonnx.operators.kernel_case import SDONNX_DOMAIN

__all__ = ["ancestors", "has_one_reader", "put_own"]


def ancestors(value: ir.Value | None) -> set[ir.Node]:
    """Return the nodes that a value depends on."""
    found, waiting = set[ir.Node](), [value]
    while waiting:
        each = waiting.pop()
        node = None if each is None else each.producer()
        if node is not None and node not in found:
            found.add(node)
            waiting += node.inputs
    return found


def has_one_reader(value: ir.Value) -> bool:
    """Return whether one input of one node reads a value."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def put_own(
    node: ir.Node, old: ir.Value, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> None:
    """Let an operator of our own, inserted before `node`, compute the value `old`."""
    new = insert(node, op_type, inputs, attributes, domain=SDONNX_DOMAIN, shape=old.shape, dtype=old.dtype)
    replace(old, new)
