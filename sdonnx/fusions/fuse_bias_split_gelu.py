"""GEGLU -> BiasSplitGelu."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, is_weight, producer_node, static_dim
from sdonnx.graph.match import Rule, is_bias
from sdonnx.operators.contrib_elementwise import check_bias_split_gelu

__all__ = ["GegluToBiasSplitGelu"]


class GegluToBiasSplitGelu(Rule):
    """a, b = Split(x + bias); a * Gelu(b) -> BiasSplitGelu(x, bias).

    Shapes: x (B,S,2D), bias (2D,). Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def pattern(self, op: Any, x: Any, bias: Any) -> Any:
        total = op.Add(x, bias)
        value, gate = op.Split(total, num_outputs=2, _allow_other_attributes=True, _outputs=["value", "gate"])
        return op.Mul(value, op.Gelu(gate, _allow_other_attributes=True, _outputs=["gelu"]))

    def is_candidate(self, x: ir.Value, bias: ir.Value, **_: Any) -> bool:
        return is_weight(bias) and not is_weight(x)  # the swapped operands also match

    def check(self, x: ir.Value, bias: ir.Value, gate: ir.Value, gelu: ir.Value, **_: Any) -> str | None:
        split, activation = producer_node(gate), producer_node(gelu)
        if activation.attributes.get_string("approximate", "none") != "none":
            return "the kernel computes the exact gelu, not an approximation"
        if not is_bias(bias, static_dim(x, -1)):
            return "the addend is not a constant vector"
        if (reason := self.check_kernel(x, bias)) is not None:
            return reason
        return None if split.attributes.get_int("axis", 0) in (-1, 2) else "the split is not along the last axis"

    def check_kernel(self, x: ir.Value, bias: ir.Value) -> str | None:
        """Return why the kernel does not accept x (B,S,2D) and bias (2D,), None if it does."""
        return check_bias_split_gelu(x)

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> Any:
        return op.BiasSplitGelu(x, bias, _domain=MICROSOFT)
