"""GEGLU -> BiasSplitGelu."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sdonnx.graph.contract import split_gelu_refusal
from sdonnx.graph.edit import MICROSOFT, static_dim
from sdonnx.graph.match import Rule, is_bias

__all__ = ["GegluToBiasSplitGelu"]


class GegluToBiasSplitGelu(Rule):
    """a, b = Split(x + bias); a * Gelu(b) -> BiasSplitGelu(x, bias).

    Shapes: x (B,S,2D), bias (2D,). Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def pattern(self, op: Any, x: Any, bias: Any) -> Any:
        """The gated linear unit."""
        value, gate = op.Split(op.Add(x, bias), num_outputs=2, axis=2, _outputs=["value", "gate"])
        return op.Mul(value, op.Gelu(gate, approximate="none"))

    def refuse(self, x: ir.Value, bias: ir.Value, **_: Any) -> str | None:
        """The kernel must exist for this width, and the bias must be one."""
        if not is_bias(bias, static_dim(x, -1)):
            return "what is added is no constant vector"
        return split_gelu_refusal(x)

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> Any:
        """One kernel."""
        return op.BiasSplitGelu(x, bias, _domain=MICROSOFT)
