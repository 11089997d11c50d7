"""Norms of sums -> SkipLayerNormalization and SkipSimplifiedLayerNormalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, dims, producer_node, replace, required, static_dim
from sdonnx.graph.match import Rule, same_dims, same_shape, sum_of, total_bias

__all__ = ["LayerNormToSkipLayerNorm", "RmsNormToSkipRmsNorm"]


class _NormOfSum(Rule):
    """The base of the rules for norms of a sum."""

    keeps_nodes = True  # later layers read the sum as their residual
    fused = ""

    def is_candidate(self, total: ir.Value, **_: Any) -> bool:
        return len(sum_of(total).terms) > 1

    @staticmethod
    def check_sum(total: ir.Value, norm: ir.Value, *vectors: ir.Value) -> str | None:
        """Return the reason why the kernel cannot add and normalize, None if it can.

        It adds two terms (B,S,D) and normalizes over the last axis.
        """
        node, parts = producer_node(norm), sum_of(total)
        if node.attributes.get_int("axis", -1) not in (-1, 2):
            return "the norm is not over the last axis"
        if len(parts.terms) != 2:
            return f"the input is a sum of {len(parts.terms)} activations, the kernel adds two"
        if _full_and_skip(parts.terms, total) is None or len(dims(total) or ()) != 3:
            return "the two terms are not of one shape (B,S,D), nor (B,S,D) and (1,S,D)"
        channels = static_dim(total, 2)
        if channels is None or any(static_dim(vector, 0) != channels for vector in vectors):
            return "scale and shift do not have one element per channel"  # ONNX would broadcast them
        return None

    def in_one_kernel(self, op: Any, total: ir.Value, norm: ir.Value, *vectors: ir.Value) -> Any:
        """Add and normalize. Other readers of the sum read the kernel's second output."""
        node, parts = producer_node(norm), sum_of(total)
        inputs = [*required(_full_and_skip(parts.terms, total)), *vectors]
        if (bias := total_bias(node, parts.biases)) is not None:
            inputs.append(bias)
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        normal, _, _, summed = getattr(op, self.fused)(*inputs, epsilon=epsilon, _domain=MICROSOFT, _outputs=4)
        summed.shape, summed.type = total.shape, total.type
        replace(total, summed)
        return normal


def _full_and_skip(terms: Sequence[ir.Value], total: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return the terms in the kernel's order: (B,S,D) and (B,S,D) or (1,S,D); None for other shapes."""
    sizes = dims(total) or ()
    for x, skip in (terms, reversed(terms)):
        if same_shape(x, total) and (same_shape(skip, total) or same_dims(dims(skip) or (), (1, *sizes[1:]))):
            return x, skip
    return None


class LayerNormToSkipLayerNorm(_NormOfSum):
    """s = x + skip + bias; LayerNormalization(s) -> SkipLayerNormalization(x, skip, bias) and s.

    Shapes: x (B,S,D), skip (B,S,D) or (1,S,D), bias (D,).
    """

    fused = "SkipLayerNormalization"

    def pattern(self, op: Any, total: Any, gamma: Any, beta: Any) -> Any:
        return op.LayerNormalization(total, gamma, beta, _allow_other_attributes=True, _outputs=["norm"])

    def check(self, total: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> str | None:
        return self.check_sum(total, norm, gamma, beta)

    def rewrite(self, op: Any, total: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> Any:
        return self.in_one_kernel(op, total, norm, gamma, beta)


class RmsNormToSkipRmsNorm(_NormOfSum):
    """s = x + skip + bias; RMSNormalization(s) -> SkipSimplifiedLayerNormalization(x, skip, bias) and s.

    Shapes: x (B,S,D), skip (B,S,D) or (1,S,D), bias (D,).
    """

    fused = "SkipSimplifiedLayerNormalization"

    def pattern(self, op: Any, total: Any, gamma: Any) -> Any:
        return op.RMSNormalization(total, gamma, _allow_other_attributes=True, _outputs=["norm"])

    def check(self, total: ir.Value, gamma: ir.Value, norm: ir.Value) -> str | None:
        return self.check_sum(total, norm, gamma)

    def rewrite(self, op: Any, total: ir.Value, gamma: ir.Value, norm: ir.Value) -> Any:
        return self.in_one_kernel(op, total, norm, gamma)
