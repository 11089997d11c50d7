"""Sums of a residual and a bias -> BiasAdd; GEGLU -> BiasSplitGelu."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, constant, dims, is_weight, known_size, producer_node, required, static_dim
from sdonnx.graph.match import Rule, is_bias, same_shape, sum_of, total_bias
from sdonnx.operators.contrib_elementwise import check_bias_split_gelu

__all__ = ["BiasAfterReshape", "GegluToBiasSplitGelu", "ResidualToBiasAdd"]


class BiasAfterReshape(Rule):
    """Reshape(x + bias, shape) -> Reshape(x, shape) + bias, where the last axis stays as it is.

    Shapes: x (..., C), bias (C,). The bias comes next to the residual, where one kernel adds both.
    """

    def pattern(self, op: Any, x: Any, bias: Any, shape: Any) -> Any:
        return op.Reshape(op.Add(x, bias), shape, _allow_other_attributes=True, _outputs=["reshaped"])

    def is_candidate(self, x: ir.Value, bias: ir.Value, **_: Any) -> bool:
        return is_weight(bias) and not is_weight(x)  # the swapped operands also match

    def check(self, x: ir.Value, bias: ir.Value, reshaped: ir.Value, **_: Any) -> str | None:
        channels = static_dim(x, -1)
        if not is_bias(bias, channels):
            return "the addend is not a constant vector"
        if static_dim(reshaped, -1) != channels:
            return "the reshape changes the last axis"
        return None

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, shape: ir.Value, reshaped: ir.Value) -> Any:
        moved = op.Reshape(x, shape)
        moved.shape, moved.type = reshaped.shape, reshaped.type
        return op.Add(moved, bias)


class ResidualToBiasAdd(Rule):
    """x + bias + skip -> BiasAdd(x, bias, skip).

    Shapes: x and skip (B,S,C), or (B,H,W,C), which the kernel sees as (B,H*W,C); bias (C,).
    """

    keeps_nodes = True

    def pattern(self, op: Any, a: Any, b: Any) -> Any:
        return op.Add(a, b, _outputs=["total"])

    def is_candidate(self, total: ir.Value, **_: Any) -> bool:
        parts = sum_of(total)
        return len(parts.terms) > 1 and len(parts.biases) > 0

    def check(self, total: ir.Value, **_: Any) -> str | None:
        parts, sizes = sum_of(total), dims(total)
        if len(parts.terms) != 2 or not parts.biases:
            return f"{len(parts.terms)} activations and {len(parts.biases)} biases, the kernel adds two and one"
        if not all(same_shape(term, total) for term in parts.terms):
            return "the two terms are not of one shape"
        if sizes is None or len(sizes) not in (3, 4) or static_dim(total, -1) is None:
            return "the terms are neither (B,S,C) nor (B,H,W,C)"
        return None

    def rewrite(self, op: Any, total: ir.Value, **_: Any) -> Any:
        node, parts = producer_node(total), sum_of(total)
        bias = total_bias(node, parts.biases)
        x, skip = parts.terms
        if len(dims(total) or ()) == 3:
            return _like(op.BiasAdd(x, bias, skip, _domain=MICROSOFT), x)
        channels = known_size(total, -1)
        flat = constant(required(node.graph), [0, -1, channels], np.int64, f"shape_0_m1_{channels}")
        flattened = [op.Reshape(term, flat) for term in (x, skip)]
        for value in flattened:
            value.type = x.type
        added = _like(op.BiasAdd(flattened[0], bias, flattened[1], _domain=MICROSOFT), flattened[0])
        return op.Reshape(added, op.Shape(skip))


def _like(value: ir.Value, other: ir.Value) -> ir.Value:
    """Copy type and shape of another value: ONNX infers none for contrib operators."""
    value.type, value.shape = other.type, other.shape
    return value


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
