"""Gelu, approximated by tanh -> FastGelu."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, insert, replace
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, Refused, WalkResult, WalkRule, biased, sole_user
from sdonnx.operators.contrib_elementwise import check_fast_gelu

__all__ = ["GeluToFastGelu"]


class GeluToFastGelu(WalkRule):
    """Gelu(x + bias), approximated by tanh -> FastGelu(x, bias), with or without a bias.

    Shapes: x (..., D), bias (D,).
    """

    roots = frozenset({"Gelu"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        x = node.inputs[0]
        if x is None or node.attributes.get_string("approximate", "none") != "tanh":
            return NOT_A_CANDIDATE
        if (reason := check_fast_gelu(x)) is not None:
            return Refused(reason)
        inputs = biased(x) if sole_user(x, "Gelu") is node else None
        replace(node.outputs[0], insert(node, "FastGelu", inputs or [x], domain=MICROSOFT, shape=x.shape))
        return REWRITTEN
