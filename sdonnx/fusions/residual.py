"""Residual additions and biases, taken into the kernel that reads or writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, constant, dims, replace, static_dim
from sdonnx.graph.match import Rule, is_bias, same_shape, sum_of, total_bias

__all__ = ["BiasIntoNhwcConv", "LayerNormToSkipLayerNorm", "ResidualToBiasAdd", "RmsNormToSkipRmsNorm"]


class _NormOfSum(Rule):
    """What norms of a residual and what is added to it have in common."""

    keeps_nodes = True  # the sum is the residual of what follows
    fused = ""

    def concerns(self, total: ir.Value, **_: Any) -> bool:
        """There must be something to add."""
        return len(sum_of(total).terms) > 1

    @staticmethod
    def why_not(total: ir.Value, norm: ir.Value, *vectors: ir.Value) -> str | None:
        """Return why the kernel cannot add and normalize, None if it can: two terms (B,S,D), over the last axis."""
        node, parts = norm.producer(), sum_of(total)
        assert node is not None
        if node.attributes.get_int("axis", -1) not in (-1, 2):
            return "the norm is not over the last axis"
        if len(parts.terms) != 2:
            return f"the input is a sum of {len(parts.terms)} activations, the kernel adds two"
        if not all(same_shape(term, total) for term in parts.terms) or len(dims(total) or ()) != 3:
            return "the two terms are not of one shape (B,S,D)"
        channels = static_dim(total, 2)
        if channels is None or any(static_dim(vector, 0) != channels for vector in vectors):
            return "scale and shift are not one number a channel"  # ONNX would broadcast them
        return None

    def in_one_kernel(self, op: Any, total: ir.Value, norm: ir.Value, *vectors: ir.Value) -> Any:
        """Add and normalize; whoever used the sum takes the kernel's."""
        node, parts = norm.producer(), sum_of(total)
        assert node is not None
        inputs = [*parts.terms, *vectors]
        if (bias := total_bias(node, parts.biases)) is not None:
            inputs.append(bias)
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        normal, _, _, summed = getattr(op, self.fused)(*inputs, epsilon=epsilon, _domain=MICROSOFT, _outputs=4)
        summed.shape, summed.type = total.shape, total.type
        replace(total, summed)
        return normal


class LayerNormToSkipLayerNorm(_NormOfSum):
    """s = x + skip + bias; LayerNormalization(s) -> SkipLayerNormalization(x, skip, bias), which gives s too.

    Shapes: x and skip (B,S,D), bias (D,).
    """

    fused = "SkipLayerNormalization"

    def pattern(self, op: Any, total: Any, gamma: Any, beta: Any) -> Any:
        """A norm; its input is looked at by `refuse`."""
        return op.LayerNormalization(total, gamma, beta, _allow_other_attributes=True, _outputs=["norm"])

    def refuse(self, total: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> str | None:
        """The kernel must be able to."""
        return self.why_not(total, norm, gamma, beta)

    def rewrite(self, op: Any, total: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> Any:
        """One kernel."""
        return self.in_one_kernel(op, total, norm, gamma, beta)


class RmsNormToSkipRmsNorm(_NormOfSum):
    """s = x + skip + bias; RMSNormalization(s) -> SkipSimplifiedLayerNormalization(x, skip, bias), which gives s too.

    Shapes: x and skip (B,S,D), bias (D,).
    """

    fused = "SkipSimplifiedLayerNormalization"

    def pattern(self, op: Any, total: Any, gamma: Any) -> Any:
        """A norm; its input is looked at by `refuse`."""
        return op.RMSNormalization(total, gamma, _allow_other_attributes=True, _outputs=["norm"])

    def refuse(self, total: ir.Value, gamma: ir.Value, norm: ir.Value) -> str | None:
        """The kernel must be able to."""
        return self.why_not(total, norm, gamma)

    def rewrite(self, op: Any, total: ir.Value, gamma: ir.Value, norm: ir.Value) -> Any:
        """One kernel."""
        return self.in_one_kernel(op, total, norm, gamma)


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
