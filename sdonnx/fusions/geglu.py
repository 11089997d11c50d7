"""GEGLU -> BiasSplitGelu."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sdonnx.graph.contract import split_gelu_refusal
from sdonnx.graph.edit import MICROSOFT, is_weight, static_dim
from sdonnx.graph.match import Rule, is_bias

__all__ = ["GegluToBiasSplitGelu"]


class GegluToBiasSplitGelu(Rule):
    """a, b = Split(x + bias); a * Gelu(b) -> BiasSplitGelu(x, bias).

    Shapes: x (B,S,2D), bias (2D,). Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def pattern(self, op: Any, x: Any, bias: Any) -> Any:
        """The gated linear unit."""
        total = op.Add(x, bias)
        value, gate = op.Split(total, num_outputs=2, _allow_other_attributes=True, _outputs=["value", "gate"])
        return op.Mul(value, op.Gelu(gate, _allow_other_attributes=True, _outputs=["gelu"]))

    def concerns(self, x: ir.Value, bias: ir.Value, **_: Any) -> bool:
        """What is added must be a constant; the other way round, it is taken for x."""
        return is_weight(bias) and not is_weight(x)

    def refuse(self, x: ir.Value, bias: ir.Value, gate: ir.Value, gelu: ir.Value, **_: Any) -> str | None:
        """The kernel must exist for this width, and the bias must be one."""
        split, activation = gate.producer(), gelu.producer()
        assert split is not None
        assert activation is not None
        if activation.attributes.get_string("approximate", "none") != "none":
            return "the kernel computes the exact gelu, not an approximation"
        if not is_bias(bias, static_dim(x, -1)):
            return "what is added is no constant vector"
        if (reason := split_gelu_refusal(x)) is not None:
            return reason
        return None if split.attributes.get_int("axis", 0) in (-1, 2) else "the split is not along the last axis"

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> Any:
        """One kernel."""
        return op.BiasSplitGelu(x, bias, _domain=MICROSOFT)
