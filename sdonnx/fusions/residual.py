"""Residual additions and biases, taken into the kernel that reads or writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, constant, dims, insert, replace, static_dim
from sdonnx.graph.match import Idiom, Rule, is_bias, producer_of, same_dims, same_shape, sole_user, sum_of, total_bias
from sdonnx.graph.modules import joint_path

__all__ = [
    "BiasIntoNhwcConv",
    "LayerNormToSkipLayerNorm",
    "ResidualIntoGemm",
    "ResidualToBiasAdd",
    "RmsNormToSkipRmsNorm",
]


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
        if _full_and_skip(parts.terms, total) is None or len(dims(total) or ()) != 3:
            return "the two terms are not of one shape (B,S,D), and no one image's (1,S,D) is added to all"
        channels = static_dim(total, 2)
        if channels is None or any(static_dim(vector, 0) != channels for vector in vectors):
            return "scale and shift are not one number a channel"  # ONNX would broadcast them
        return None

    def in_one_kernel(self, op: Any, total: ir.Value, norm: ir.Value, *vectors: ir.Value) -> Any:
        """Add and normalize; whoever used the sum takes the kernel's."""
        node, parts = norm.producer(), sum_of(total)
        assert node is not None
        terms = _full_and_skip(parts.terms, total)
        assert terms is not None  # `why_not` asked
        inputs = [*terms, *vectors]
        if (bias := total_bias(node, parts.biases)) is not None:
            inputs.append(bias)
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        normal, _, _, summed = getattr(op, self.fused)(*inputs, epsilon=epsilon, _domain=MICROSOFT, _outputs=4)
        summed.shape, summed.type = total.shape, total.type
        replace(total, summed)
        return normal


def _full_and_skip(terms: Sequence[ir.Value], total: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return two terms (B,S,D), or one and another (1,S,D), in the kernel's order; None for other shapes."""
    sizes = dims(total) or ()
    for x, skip in (terms, reversed(terms)):
        if same_shape(x, total) and (same_shape(skip, total) or same_dims(dims(skip) or (), (1, *sizes[1:]))):
            return x, skip
    return None


class LayerNormToSkipLayerNorm(_NormOfSum):
    """s = x + skip + bias; LayerNormalization(s) -> SkipLayerNormalization(x, skip, bias), which gives s too.

    Shapes: x (B,S,D), skip (B,S,D) or (1,S,D), bias (D,).
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

    Shapes: x (B,S,D), skip (B,S,D) or (1,S,D), bias (D,).
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


class ResidualIntoGemm(Idiom):
    """x @ W + residual -> Gemm(x, W, residual), which adds as it multiplies: for sums that no norm takes, with no bias.

    Shapes: x (B,S,K), W (K,D), residual (B,S,D); the kernel sees (B*S,K) and (B*S,D).
    """

    roots = frozenset({"Add"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite a sum with a product that nothing else reads."""
        total = node.outputs[0]
        for added, residual in (node.inputs, reversed(node.inputs)):
            product = producer_of(added, "MatMul")
            if product is None or residual is None or sole_user(product.outputs[0], "Add") is not node:
                continue
            if residual is added:  # twice the product, which one addition doubles
                continue
            x, weight = product.inputs
            if x is None or weight is None or len(dims(x) or ()) != 3 or len(dims(weight) or ()) != 2:
                continue
            rows, channels = static_dim(weight, 0), static_dim(weight, 1)
            if rows is None or channels is None or not same_shape(product.outputs[0], total):
                continue
            if not same_shape(residual, total):
                continue
            flat = [_flat(node, value, width) for value, width in ((x, rows), (residual, channels))]
            module = joint_path((product, node))
            made = insert(node, "Gemm", [flat[0], weight, flat[1]], shape=flat[1].shape, module=module)
            sizes = insert(node, "Shape", [residual], shape=[3], dtype=ir.DataType.INT64)
            replace(total, insert(node, "Reshape", [made, sizes], shape=total.shape))
            return None
        return ""


def _flat(anchor: ir.Node, value: ir.Value, width: int) -> ir.Value:
    """Return (B,S,C) as (B*S,C)."""
    assert isinstance(anchor.graph, ir.Graph)
    shape = constant(anchor.graph, [-1, width], np.int64, f"shape_m1_{width}")
    return insert(anchor, "Reshape", [value, shape], shape=[ir.SymbolicDim(None), width])


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
