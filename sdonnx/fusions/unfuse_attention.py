"""Attention that could not become MultiHeadAttention -> matrix products around a Softmax.

ONNX Runtime 1.31's kernel for ONNX's Attention selects flash attention, which silently returns wrong numbers for head
size 160 on sm_90 (relative error 1.3). Plain products are slower and correct.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, insert, known_dims, replace, required, static_dim
from sdonnx.graph.mask_patterns import MASKED_SCORE
from sdonnx.graph.match import REWRITTEN, Refused, WalkResult, WalkRule

__all__ = ["AttentionToMatMul"]
_VERY_LOW = {ir.DataType.FLOAT16: MASKED_SCORE}


class AttentionToMatMul(WalkRule):
    """Attention(q, k, v, mask) -> Softmax(q * scale @ Transpose(k) + mask) @ v.

    Shapes: q (B,N,S,H), k (B,N,L,H), v (B,N,L,H'), mask broadcast to (B,N,S,L).
    """

    roots = frozenset({"Attention"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        q, k, v = node.inputs[:3]
        if q is None or k is None or v is None or not isinstance(node.graph, ir.Graph) or q.dtype is None:
            return Refused("an input is missing")
        sizes, keys = dims(q), dims(k)
        heads = {static_dim(value, 1) for value in (q, k, v)}
        head_size = static_dim(q, 3)
        if sizes is None or keys is None or len(sizes) != 4 or len(heads) != 1 or head_size is None:
            return Refused("q, k and v are not of one number of heads (B,N,S,H)")
        if len(node.inputs) > 4 or len(node.outputs) > 1 or node.attributes.get_float("softcap", 0.0) != 0.0:
            return Refused("a key-value cache, softcap and score outputs are not supported")
        scale = node.attributes.get_float("scale", 0.0) or 1 / math.sqrt(head_size)
        number = constant(node.graph, scale, q.dtype.numpy(), f"scale_{scale:g}_{q.dtype.name.lower()}")
        scaled = insert(node, "Mul", [q, number], shape=q.shape)
        turned = insert(node, "Transpose", [k], {"perm": [0, 1, 3, 2]}, shape=(*keys[:2], keys[3], keys[2]))
        shape = (*sizes[:3], keys[2])
        scores = insert(node, "MatMul", [scaled, turned], shape=shape)
        mask = node.inputs[3] if len(node.inputs) == 4 else None
        if mask is not None:
            scores = insert(node, "Add", [scores, _added(node, mask, q.dtype)], shape=shape)
        if node.attributes.get_int("is_causal", 0):
            scores = insert(node, "Add", [scores, _causal(node, scores, q.dtype)], shape=shape)
        probabilities = insert(node, "Softmax", [scores], {"axis": -1}, shape=shape)
        replace(node.outputs[0], insert(node, "MatMul", [probabilities, v], shape=node.outputs[0].shape))
        return REWRITTEN


def _added(node: ir.Node, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Return the mask as a bias that is added to the scores."""
    if mask.dtype != ir.DataType.BOOL:
        return mask
    allowed, refused = _numbers(node, dtype)
    return insert(node, "Where", [mask, allowed, refused], shape=mask.shape, dtype=dtype)


def _numbers(node: ir.Node, dtype: ir.DataType) -> tuple[ir.Value, ir.Value]:
    kind = dtype.name.lower()
    low = _VERY_LOW.get(dtype, -1e30)
    return (
        constant(required(node.graph), 0.0, dtype.numpy(), f"zero_{kind}"),
        constant(required(node.graph), low, dtype.numpy(), f"very_low_{kind}"),
    )


def _causal(node: ir.Node, scores: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Return (S,L) with 0 where column <= row and a very low number elsewhere."""
    _, refused = _numbers(node, dtype)
    last = insert(node, "Shape", [scores], {"start": 2, "end": 4}, shape=[2], dtype=ir.DataType.INT64)
    sizes = known_dims(scores)
    full = insert(node, "Expand", [refused, last], shape=sizes[2:], dtype=dtype)
    above = constant(required(node.graph), 1, np.int64, "diagonal_above")
    return insert(node, "Trilu", [full, above], {"upper": 1}, shape=sizes[2:], dtype=dtype)
