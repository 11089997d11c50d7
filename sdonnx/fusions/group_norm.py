"""GroupNorm takes the SiLU after it and the additions before it.

These rules work on graphs whose images are (B,H,W,C), after the layout stage.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, dims, replace, static_dim
from sdonnx.graph.match import Rule, Sum, same_dims, same_shape, sum_of, total_bias

__all__ = ["GroupNormToSkipGroupNorm", "SiluIntoGroupNorm"]


class SiluIntoGroupNorm(Rule):
    """n = GroupNorm(x); n * Sigmoid(n) -> GroupNorm(x, activation=1).

    Shapes: x (B,H,W,C).
    """

    def pattern(self, op: Any, x: Any, gamma: Any, beta: Any) -> Any:
        """SiLU of a norm."""
        norm = op.GroupNorm(
            x, gamma, beta, activation=0, _domain=MICROSOFT, _allow_other_attributes=True, _outputs=["norm"]
        )
        return op.Mul(norm, op.Sigmoid(norm))

    def rewrite(self, op: Any, x: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> Any:
        """One kernel."""
        node = norm.producer()
        assert node is not None
        attributes = {name: value for name, value in node.attributes.items() if name != "activation"}
        return op.GroupNorm(x, gamma, beta, **attributes, activation=1, _domain=MICROSOFT)


class GroupNormToSkipGroupNorm(Rule):
    """s = x + skip + bias; GroupNorm(s) -> SkipGroupNorm(x, skip, bias), which gives s too.

    Shapes: x (B,H,W,C), skip (B,H,W,C) or (B,1,1,C), bias (C,). A bias alone is given as the skip, a row
    for each image: the kernel wants one, and adding a convolution's bias apart costs a pass over the image.
    """

    keeps_nodes = True  # the sum is the residual of what follows

    def pattern(self, op: Any, total: Any, gamma: Any, beta: Any) -> Any:
        """A norm; its input is looked at by `refuse`."""
        return op.GroupNorm(total, gamma, beta, _domain=MICROSOFT, _allow_other_attributes=True, _outputs=["norm"])

    def concerns(self, total: ir.Value, **_: Any) -> bool:
        """There must be something to add."""
        parts = sum_of(total)
        return len(parts.terms) + len(parts.biases) > 1

    def refuse(self, total: ir.Value, **_: Any) -> str | None:
        """There must be two terms, of one shape or one of them a row for each image; or one, and a bias."""
        parts = sum_of(total)
        if len(parts.terms) == 1 and parts.biases:
            return None if same_shape(parts.terms[0], total) else "the bias is not added to a whole image"
        if len(parts.terms) != 2:
            return f"the input is a sum of {len(parts.terms)} activations, the kernel adds two"
        return None if _ordered(parts, total) else "the two terms have shapes that the kernel does not add"

    def rewrite(self, op: Any, total: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> Any:
        """Add and normalize in one kernel; whoever used the sum takes the kernel's."""
        node, parts = norm.producer(), sum_of(total)
        assert node is not None
        assert isinstance(node.graph, ir.Graph)
        bias = total_bias(node, parts.biases)
        if len(parts.terms) == 1:
            assert bias is not None
            inputs = [parts.terms[0], gamma, beta, _rows(op, node.graph, bias, parts.terms[0])]
        else:
            terms = _ordered(parts, total)
            assert terms is not None
            inputs = [terms[0], gamma, beta, terms[1], *([] if bias is None else [bias])]
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
    sizes = dims(x)
    assert sizes is not None
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
