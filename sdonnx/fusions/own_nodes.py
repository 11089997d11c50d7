"""Steps that replacements by our own operators share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from sdonnx.graph.edit import insert, replace
from sdonnx.operators.case import OWN_DOMAIN

__all__ = ["has_one_reader", "put_own"]


def has_one_reader(value: ir.Value) -> bool:
    """Return whether one input of one node reads a value."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def put_own(
    node: ir.Node, old: ir.Value, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> None:
    """Let an operator of our own, inserted before `node`, compute the value `old`."""
    new = insert(node, op_type, inputs, attributes, domain=OWN_DOMAIN, shape=old.shape, dtype=old.dtype)
    replace(old, new)
