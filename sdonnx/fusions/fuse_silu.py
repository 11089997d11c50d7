"""Spelled-out SiLU -> Sigmoid and Mul."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import dtype_of, insert, producer_node, replace
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, Rule, WalkResult, WalkRule, producer_of, same_shape, scalar

__all__ = ["ExponentialToSigmoid", "QuotientToSilu", "SwishToSilu"]


class ExponentialToSigmoid(WalkRule):
    """1 / (1 + Exp(-x)), Reciprocal(1 + Exp(-x)) -> Sigmoid(x)."""

    roots = frozenset({"Div", "Reciprocal"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        if node.op_type == "Div" and scalar(node.inputs[0]) != 1.0:
            return NOT_A_CANDIDATE
        x = _inside_exponential(node.inputs[-1])
        if x is None or not same_shape(x, node.outputs[0]):
            return NOT_A_CANDIDATE
        replace(node.outputs[0], insert(node, "Sigmoid", [x], shape=x.shape))
        return REWRITTEN


class QuotientToSilu(WalkRule):
    """x / (1 + Exp(-x)) -> x * Sigmoid(x)."""

    roots = frozenset({"Div"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        x = _inside_exponential(node.inputs[1])
        if x is None or x is not node.inputs[0] or not same_shape(x, node.outputs[0]):
            return NOT_A_CANDIDATE
        gate = insert(node, "Sigmoid", [x], shape=x.shape)
        replace(node.outputs[0], insert(node, "Mul", [x, gate], shape=x.shape))
        return REWRITTEN


def _inside_exponential(value: ir.Value | None) -> ir.Value | None:
    """Return x where value = 1 + Exp(-x)."""
    total = producer_of(value, "Add")
    if total is None:
        return None
    for power_value, one in (total.inputs, reversed(total.inputs)):
        power = producer_of(power_value, "Exp")
        negated = producer_of(power.inputs[0], "Neg") if power is not None else None
        if negated is not None and scalar(one) == 1.0:
            return negated.inputs[0]
    return None


class SwishToSilu(Rule):
    """Swish(x, alpha) -> x * Sigmoid(alpha * x). Opset 24 has the operator, older kernels do not."""

    def pattern(self, op: Any, x: Any) -> Any:
        return op.Swish(x, _allow_other_attributes=True, _outputs=["swish"])

    def rewrite(self, op: Any, x: ir.Value, swish: ir.Value) -> Any:
        node = producer_node(swish)
        alpha = node.attributes.get_float("alpha", 1.0)
        scaled = x if alpha == 1.0 else op.Mul(x, op.Constant(value=ir.tensor(np.array(alpha, dtype_of(x).numpy()))))
        return op.Mul(x, op.Sigmoid(scaled))
