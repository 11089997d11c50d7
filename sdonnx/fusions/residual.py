"""Residual additions and biases, taken into the kernel that reads or writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, constant, dims, replace, static_dim
from sdonnx.graph.match import Rule, is_bias, same_shape, sum_of, total_bias

__all__ = ["BiasIntoNhwcConv", "LayerNormToSkipLayerNorm", "ResidualToBiasAdd", "RmsNormToSkipRmsNorm"]


class LayerNormToSkipLayerNorm(Rule):
    """s = x + skip + bias; LayerNormalization(s) -> SkipLayerNormalization(x, skip, bias), which gives s too.

    Shapes: x and skip (B,S,D), bias (D,).
    """

    keeps_nodes = True  # the sum is the residual of what follows

    def pattern(self, op: Any, total: Any, gamma: Any, beta: Any) -> Any:
        """A norm; its input is looked at by `refuse`."""
        return op.LayerNormalization(total, gamma, beta, _allow_other_attributes=True, _outputs=["norm"])

    def concerns(self, total: ir.Value, **_: Any) -> bool:
        """There must be something to add."""
        return len(sum_of(total).terms) > 1

    def refuse(self, total: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> str | None:
        """There must be two terms of one shape (B,S,D), normalized over the last axis."""
        node, parts = norm.producer(), sum_of(total)
        assert node is not None
        if node.attributes.get_int("axis", -1) not in (-1, 2):
            return "the norm is not over the last axis"
        if len(parts.terms) != 2:
            return f"the input is a sum of {len(parts.terms)} activations, the kernel adds two"
        if not all(same_shape(term, total) for term in parts.terms) or len(dims(total) or ()) != 3:
            return "the two terms are not of one shape (B,S,D)"
        if static_dim(total, 2) is None or not static_dim(total, 2) == static_dim(gamma, 0) == static_dim(beta, 0):
            return "scale and shift are not one number a channel"  # ONNX would broadcast them
        return None

    def rewrite(self, op: Any, total: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> Any:
        """Add and normalize in one kernel; whoever used the sum takes the kernel's."""
        node, parts = norm.producer(), sum_of(total)
        assert node is not None
        assert isinstance(node.graph, ir.Graph)
        inputs = [parts.terms[0], parts.terms[1], gamma, beta]
        if (bias := total_bias(node, parts.biases)) is not None:
            inputs.append(bias)
        normal, _, _, summed = op.SkipLayerNormalization(
            *inputs, epsilon=node.attributes.get_float("epsilon", 1e-5), _domain=MICROSOFT, _outputs=4
        )
        summed.shape, summed.type = total.shape, total.type
        replace(total, summed)
        return normal


class RmsNormToSkipRmsNorm(Rule):
    """s = x + skip + bias; RMSNormalization(s) -> SkipSimplifiedLayerNormalization(x, skip, bias), which gives s too.

    Shapes: x and skip (B,S,D), bias (D,).
    """

    keeps_nodes = True  # the sum is the residual of what follows

    def pattern(self, op: Any, total: Any, gamma: Any) -> Any:
        """A norm; its input is looked at by `refuse`."""
        return op.RMSNormalization(total, gamma, _allow_other_attributes=True, _outputs=["norm"])

    def concerns(self, total: ir.Value, **_: Any) -> bool:
        """There must be something to add."""
        return len(sum_of(total).terms) > 1

    def refuse(self, total: ir.Value, gamma: ir.Value, norm: ir.Value) -> str | None:
        """There must be two terms of one shape (B,S,D), normalized over the last axis."""
        node, parts = norm.producer(), sum_of(total)
        assert node is not None
        if node.attributes.get_int("axis", -1) not in (-1, 2):
            return "the norm is not over the last axis"
        if len(parts.terms) != 2:
            return f"the input is a sum of {len(parts.terms)} activations, the kernel adds two"
        if not all(same_shape(term, total) for term in parts.terms) or len(dims(total) or ()) != 3:
            return "the two terms are not of one shape (B,S,D)"
        if static_dim(total, 2) is None or static_dim(total, 2) != static_dim(gamma, 0):
            return "the scale is not one number a channel"
        return None

    def rewrite(self, op: Any, total: ir.Value, gamma: ir.Value, norm: ir.Value) -> Any:
        """Add and normalize in one kernel; whoever used the sum takes the kernel's."""
        node, parts = norm.producer(), sum_of(total)
        assert node is not None
        assert isinstance(node.graph, ir.Graph)
        inputs = [parts.terms[0], parts.terms[1], gamma]
        if (bias := total_bias(node, parts.biases)) is not None:
            inputs.append(bias)
        normal, _, _, summed = op.SkipSimplifiedLayerNormalization(
            *inputs, epsilon=node.attributes.get_float("epsilon", 1e-5), _domain=MICROSOFT, _outputs=4
        )
        summed.shape, summed.type = total.shape, total.type
        replace(total, summed)
        return normal


class ResidualToBiasAdd(Rule):
    """x + bias + skip -> BiasAdd(x, bias, skip).

    Shapes: x and skip (B,S,C), or (B,H,W,C), which the kernel sees as (B,H*W,C); bias (C,).
    """

    keeps_nodes = True

    def pattern(self, op: Any, a: Any, b: Any) -> Any:
        """An addition; its operands are looked at by `refuse`."""
        return op.Add(a, b, _outputs=["total"])

    def concerns(self, total: ir.Value, **_: Any) -> bool:
        """There must be a residual and a bias."""
        parts = sum_of(total)
        return len(parts.terms) > 1 and len(parts.biases) > 0

    def refuse(self, total: ir.Value, **_: Any) -> str | None:
        """There must be two terms of one shape and a bias."""
        parts, sizes = sum_of(total), dims(total)
        if len(parts.terms) != 2 or not parts.biases:
            return f"{len(parts.terms)} activations and {len(parts.biases)} biases, the kernel adds two and one"
        if not all(same_shape(term, total) for term in parts.terms):
            return "the two terms are not of one shape"
        if sizes is None or len(sizes) not in (3, 4) or static_dim(total, -1) is None:
            return "the terms are neither (B,S,C) nor (B,H,W,C)"
        return None

    def rewrite(self, op: Any, total: ir.Value, **_: Any) -> Any:
        """Add both in one kernel."""
        node, parts = total.producer(), sum_of(total)
        assert node is not None
        assert isinstance(node.graph, ir.Graph)
        bias = total_bias(node, parts.biases)
        x, skip = parts.terms
        if len(dims(total) or ()) == 3:
            return _like(op.BiasAdd(x, bias, skip, _domain=MICROSOFT), x)
        channels = static_dim(total, -1)
        assert channels is not None  # `refuse` asked
        flat = constant(node.graph, [0, -1, channels], np.int64, f"shape_0_m1_{channels}")
        flattened = [op.Reshape(term, flat) for term in (x, skip)]
        for value in flattened:
            value.type = x.type
        added = _like(op.BiasAdd(flattened[0], bias, flattened[1], _domain=MICROSOFT), flattened[0])
        return op.Reshape(added, op.Shape(skip))


def _like(value: ir.Value, other: ir.Value) -> ir.Value:
    """Give a new value type and shape of another: ONNX infers none for contrib operators."""
    value.type, value.shape = other.type, other.shape
    return value


class BiasIntoNhwcConv(Rule):
    """NhwcConv(x, w) + bias -> NhwcConv(x, w, bias).

    Shapes: x (B,H,W,C), w (M,kH,kW,C), bias (M,). For the biases that no other kernel took.
    """

    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        """A convolution and a bias."""
        conv = op.NhwcConv(x, weight, _domain=MICROSOFT, _allow_other_attributes=True, _outputs=["conv"])
        return op.Add(conv, bias)

    def refuse(self, weight: ir.Value, bias: ir.Value, **_: Any) -> str | None:
        """The bias must be one."""
        return None if is_bias(bias, static_dim(weight, 0)) else "what is added is no constant vector"

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, conv: ir.Value) -> Any:
        """The kernel adds it."""
        node = conv.producer()
        assert node is not None
        return op.NhwcConv(x, weight, bias, **node.attributes, _domain=MICROSOFT)
