"""GroupNorm of a sum -> SkipGroupNorm. Images are (B,H,W,C), after the channels-last pass."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, dims, known_dims, producer_node, replace, required, static_dim
from sdonnx.graph.match import Rule, Sum, same_dims, same_shape, sum_of, total_bias

__all__ = ["GroupNormToSkipGroupNorm"]


class GroupNormToSkipGroupNorm(Rule):
    """s = x + skip + bias; GroupNorm(s) -> SkipGroupNorm(x, skip, bias) and s.

    Shapes: x (B,H,W,C), skip (B,H,W,C) or (B,1,1,C), bias (C,). A bias without a skip is passed as
    the skip, one row per image: the kernel needs a skip, and a separate addition would cost a pass over the image.
    """

    keeps_nodes = True  # later layers read the sum as their residual

    def pattern(self, op: Any, total: Any, gamma: Any, beta: Any) -> Any:
        return op.GroupNorm(total, gamma, beta, _domain=MICROSOFT, _allow_other_attributes=True, _outputs=["norm"])

    def is_candidate(self, total: ir.Value, **_: Any) -> bool:
        parts = sum_of(total)
        return len(parts.terms) + len(parts.biases) > 1

    def check(self, total: ir.Value, **_: Any) -> str | None:
        parts = sum_of(total)
        if len(parts.terms) == 1 and parts.biases:
            return None if same_shape(parts.terms[0], total) else "the bias is not added to a whole image"
        if len(parts.terms) != 2:
            return f"the input is a sum of {len(parts.terms)} activations, the kernel adds two"
        return None if _ordered(parts, total) else "the two terms have shapes that the kernel does not add"

    def rewrite(self, op: Any, total: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> Any:
        node, parts = producer_node(norm), sum_of(total)
        bias = total_bias(node, parts.biases)
        if len(parts.terms) == 1:
            inputs = [parts.terms[0], gamma, beta, _rows(op, required(node.graph), required(bias), parts.terms[0])]
        else:
            x, skip = required(_ordered(parts, total))
            inputs = [x, gamma, beta, skip, *([] if bias is None else [bias])]
        normal, summed = op.SkipGroupNorm(*inputs, **node.attributes, _domain=MICROSOFT, _outputs=2)
        summed.shape, summed.type = total.shape, total.type
        replace(total, summed)
        return normal


def _rows(op: Any, graph: ir.Graph, bias: ir.Value, x: ir.Value) -> ir.Value:
    """Return the bias (C,) as (B,1,1,C)."""
    channels = static_dim(bias, 0)
    batch = op.Shape(_of_same_batch(graph, x), start=0, end=1)
    batch.type = ir.TensorType(ir.DataType.INT64)
    rows: ir.Value = op.Expand(bias, op.Concat(batch, op.Constant(value_ints=[1, 1, channels]), axis=0))
    sizes = known_dims(x)
    rows.shape, rows.type = ir.Shape([sizes[0], 1, 1, sizes[3]]), bias.type
    return rows


def _of_same_batch(graph: ir.Graph, x: ir.Value) -> ir.Value:
    """Return an input of the graph known to have the batch of `x`, else `x`: rows then share one Shape."""
    sizes = dims(x)
    for value in graph.inputs:
        if sizes and (shape := dims(value)) and shape[0] == sizes[0]:
            return value
    return x


def _ordered(parts: Sum, total: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return (x, skip): x has the shape of the sum."""
    first, second = parts.terms
    if same_shape(first, total):
        x, skip = first, second
    elif same_shape(second, total):
        x, skip = second, first
    else:
        return None
    if same_shape(skip, total):
        return x, skip
    sizes, whole = dims(skip), dims(total)
    if sizes is None or whole is None or len(sizes) != 4:
        return None
    return (x, skip) if same_dims(sizes, (whole[0], 1, 1, whole[3])) else None
