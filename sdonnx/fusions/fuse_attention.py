"""Spelled-out attention -> Attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import (
    constant,
    dims,
    dtype_of,
    input_of,
    insert,
    is_weight,
    known_dims,
    producer_node,
    replace,
    required,
)
from sdonnx.graph.mask_patterns import MASKED_SCORE, is_causal
from sdonnx.graph.match import (
    NOT_A_CANDIDATE,
    REWRITTEN,
    Refused,
    Rule,
    WalkResult,
    WalkRule,
    producer_of,
    same_dims,
    same_shape,
    scalar,
    skip_float_casts,
)

__all__ = ["CausalMaskToAttribute", "EinsumToMatMul", "SoftmaxToAttention"]


class EinsumToMatMul(WalkRule):
    """Einsum(a, b) that contracts one axis -> Transpose(MatMul(Transpose(a), Transpose(b))).

    Shapes: a has the batch axes, i and k; b the batch axes, k and j; the result the batch axes, i and j,
    each in any order, as in "bihd,bjhd->bhij".
    """

    roots = frozenset({"Einsum"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        equation = node.attributes.get_string("equation", "").replace(" ", "")
        operands, arrow, result = equation.partition("->")
        terms = operands.split(",")
        if len(terms) != 2 or not arrow or "." in equation:
            return Refused(f"the equation {equation} is not one of two operands with named axes")
        first, second = terms
        batch = [label for label in result if label in first and label in second]
        rows = [label for label in first if label in result and label not in second]
        columns = [label for label in second if label in result and label not in first]
        summed = [label for label in first if label in second and label not in result]
        counts = [len(rows), len(columns), len(summed), len(first) - len(batch), len(second) - len(batch)]
        distinct = all(len(set(term)) == len(term) for term in (first, second, result))
        if counts != [1, 1, 1, 2, 2] or not distinct or None in node.inputs[:2]:
            return Refused(f"the equation {equation} is not a matmul")
        a = _ordered(node, input_of(node, 0), first, [*batch, *rows, *summed])
        b = _ordered(node, input_of(node, 1), second, [*batch, *summed, *columns])
        shapes = [dims(value) for value in (a, b)]
        shape = None if shapes[0] is None or shapes[1] is None else (*shapes[0][:-1], shapes[1][-1])
        matmul = insert(node, "MatMul", [a, b], shape=shape)
        replace(node.outputs[0], _ordered(node, matmul, "".join([*batch, *rows, *columns]), list(result)))
        return REWRITTEN


def _ordered(anchor: ir.Node, value: ir.Value, labels: str, wanted: list[str]) -> ir.Value:
    """Return the value with its axes in the wanted order."""
    perm = [labels.index(label) for label in wanted]
    if perm == sorted(perm):
        return value
    sizes = dims(value)
    return insert(
        anchor, "Transpose", [value], {"perm": perm}, shape=None if sizes is None else [sizes[axis] for axis in perm]
    )


@dataclass(frozen=True)
class _Scores:
    """The argument of the Softmax: (q @ k_transposed) * scale + masks."""

    matmul: ir.Node
    scale: float
    masks: tuple[ir.Value, ...]


class SoftmaxToAttention(WalkRule):
    """MatMul(Softmax(MatMul(q, Transpose(k)) * scale + mask), v) -> Attention(q, k, v, mask, scale).

    Shapes: q (B,N,S,H), k (B,N,L,H), v (B,N,L,H'), mask broadcast to (B,N,S,L); or heads folded into the
    batch, (B*N,S,H); or no heads, (B,S,H). Vaswani et al. 2017, "Attention Is All You Need". The scale may
    be applied to the scores, to q, to k or to both, before or after the split into heads.
    """

    roots = frozenset({"MatMul"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        probabilities, guarded = _unguarded(node.inputs[0])
        softmax = producer_of(probabilities, "Softmax")
        v = node.inputs[1]
        if softmax is None or v is None or softmax.inputs[0] is None:
            return NOT_A_CANDIDATE
        sizes = dims(softmax.outputs[0])
        if sizes is None or softmax.attributes.get_int("axis", -1) not in (-1, len(sizes) - 1):
            return Refused("the softmax is not known to be over the last axis")
        scores = _scores(softmax.inputs[0])
        if scores is None:
            return Refused("the scores are not a matmul")
        q_scale, q = _unscaled(input_of(scores.matmul, 0), node)
        k_scale, k_transposed = _unscaled(input_of(scores.matmul, 1), node)
        k = _swapped(k_transposed, node)
        # Kernels compute the scores in float32 for every type of q and k, as diffusers' upcast_attention does.
        q, k = (_before_widening(value, v.dtype) for value in (q, k))
        if not q.dtype == k.dtype == v.dtype == node.outputs[0].dtype:
            return Refused(f"q is {q.dtype}, k {k.dtype}, v {v.dtype} and the result {node.outputs[0].dtype}")
        heads = _split_heads(node, q, k, v)
        if isinstance(heads, Refused):
            return heads
        if (reason := _broadcast_refusal(heads)) is not None:
            return Refused(reason)
        mask = _mask(node, scores.masks, heads)
        if isinstance(mask, Refused):
            return mask
        if guarded and mask is not None and not is_causal(mask):
            return Refused("rows without any key give zeros, which no kernel computes")
        scale = q_scale * k_scale * scores.scale
        inputs = [*heads, *([] if mask is None else [mask])]
        shape = (*known_dims(heads[0])[:3], known_dims(heads[2])[3])
        result = insert(node, "Attention", inputs, {"scale": scale}, shape=shape)
        replace(node.outputs[0], _joined(node, result))
        return REWRITTEN


def _before_widening(value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    """Return x where value = Cast(x) and x is of the type, else the value."""
    cast = producer_of(value, "Cast")
    source = cast.inputs[0] if cast is not None else None
    return source if source is not None and value.dtype == ir.DataType.FLOAT and source.dtype == dtype else value


def _unguarded(value: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """Return the probabilities and whether NaN in them is replaced by 0, as torch's exporter writes it."""
    value = skip_float_casts(value)
    where = producer_of(value, "Where")
    if where is None:
        return value, False
    test, zero, kept = where.inputs
    asked = producer_of(test, "IsNaN")
    if asked is None or asked.inputs[0] is not kept or scalar(zero) != 0.0:
        return value, False
    return skip_float_casts(kept), True


def _scores(value: ir.Value | None) -> _Scores | None:
    """Follow the scores back to the matmul of q and k."""
    value = skip_float_casts(value)
    if (matmul := producer_of(value, "MatMul")) is not None:
        return _Scores(matmul, 1.0, ())
    if (node := producer_of(value, "Mul", "Div")) is not None:
        factor, rest = _factor(node)
        inner = _scores(rest) if factor is not None else None
        if inner is None or factor is None or inner.masks or rest is None or not same_shape(rest, node.outputs[0]):
            return None
        return _Scores(inner.matmul, inner.scale * factor, ())
    if (node := producer_of(value, "Add")) is not None:
        for term, mask in (node.inputs, reversed(node.inputs)):
            inner = _scores(term)
            # The scores have the shape of the sum. A mask that is broadcast may also be a product.
            if inner is not None and mask is not None and term is not None and same_shape(term, node.outputs[0]):
                return _Scores(inner.matmul, inner.scale, (*inner.masks, mask))
    if (node := producer_of(value, "Reshape")) is not None and _folds_heads(node):
        return _scores(node.inputs[0])
    return None


def _folds_heads(node: ir.Node) -> bool:
    """Return whether a Reshape folds (B,N,S,L) into (B*N,S,L), or unfolds it."""
    before, after = (dims(value) if value is not None else None for value in (node.inputs[0], node.outputs[0]))
    if before is None or after is None or {len(before), len(after)} != {3, 4}:
        return False
    return same_dims(before[-2:], after[-2:])


def _factor(node: ir.Node) -> tuple[float | None, ir.Value | None]:
    """Return (factor, rest) of a product with, or quotient by, a number."""
    first, second = node.inputs
    if (number := scalar(second)) is not None and number != 0.0:
        return (1.0 / number if node.op_type == "Div" else number), first
    if node.op_type == "Mul" and (number := scalar(first)) is not None:
        return number, second
    return None, None


def _unscaled(value: ir.Value, anchor: ir.Node) -> tuple[float, ir.Value]:
    """Return (scale, x) with value = scale * x, where the scale may also precede reshapes and transposes."""
    node = producer_of(value, "Mul", "Div", "Reshape", "Transpose")
    if node is None or node.inputs[0] is None:
        return 1.0, value
    if node.op_type in ("Mul", "Div"):
        factor, rest = _factor(node)
        if factor is None or rest is None or not same_shape(rest, value):
            return 1.0, value
        scale, x = _unscaled(rest, anchor)
        return scale * factor, x
    scale, x = _unscaled(node.inputs[0], anchor)
    if x is node.inputs[0]:
        return 1.0, value
    inputs = [x, *node.inputs[1:]]
    return scale, insert(anchor, node.op_type, inputs, node.attributes, shape=value.shape)


def _swapped(value: ir.Value, anchor: ir.Node) -> ir.Value:
    """Return the value with its last two axes swapped; a Transpose before it takes that up."""
    sizes = known_dims(value)
    rank = len(sizes)
    swap = [*range(rank - 2), rank - 1, rank - 2]
    node = producer_of(value, "Transpose")
    if node is not None and node.inputs[0] is not None and (perm := node.attributes.get_ints("perm", ())):
        composed = [perm[axis] for axis in swap]
        if composed == sorted(composed):
            return node.inputs[0]
        value, swap = node.inputs[0], composed
    source = known_dims(value)
    return insert(anchor, "Transpose", [value], {"perm": swap}, shape=[source[axis] for axis in swap])


def _split_heads(
    anchor: ir.Node, q: ir.Value, k: ir.Value, v: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value] | Refused:
    """Return q, k and v as (B,N,S,H)."""
    ranks = {len(dims(value) or ()) for value in (q, k, v)}
    if ranks == {4}:
        return q, k, v
    if ranks != {3}:
        return Refused("q, k and v do not all have 3 or 4 dimensions")
    unfolded = [_unfolded(value) for value in (q, k, v)]
    if any(value is not None for value in unfolded):
        heads = {str((dims(value) or ())[:2]) for value in unfolded if value is not None}
        if None in unfolded or len(heads) != 1:
            return Refused("q, k and v do not fold the same heads into the batch")
        first, second, third = (value for value in unfolded if value is not None)
        return first, second, third
    first, second, third = (_one_head(anchor, value) for value in (q, k, v))
    return first, second, third


def _broadcast_refusal(heads: tuple[ir.Value, ir.Value, ir.Value]) -> str | None:
    """Return the reason why Attention does not broadcast batch and heads as MatMul does, None if it does."""
    q, k, v = (dims(value) for value in heads)
    if q is None or k is None or v is None or not same_dims(k[:2], v[:2]) or not same_dims(q[:1], k[:1]):
        return "q, k and v do not have one batch"
    one_for_all = k[1] == 1 and isinstance(q[1], int)
    return None if same_dims(q[1:2], k[1:2]) or one_for_all else "q, k and v do not have one number of heads"


def _unfolded(value: ir.Value) -> ir.Value | None:
    """Return x (B,N,S,H) where value = Reshape(x, (B*N,S,H))."""
    node = producer_of(value, "Reshape")
    if node is None or not _folds_heads(node) or len(dims(value) or ()) != 3:
        return None
    return node.inputs[0]


def _one_head(anchor: ir.Node, value: ir.Value) -> ir.Value:
    """(B,S,H) -> (B,1,S,H), written as other attentions split their heads."""
    sizes = known_dims(value)
    batch, length, size = sizes
    target = [0, 0, 1, size if isinstance(size, int) else -1]
    name = "shape_" + "_".join(str(number).replace("-", "m") for number in target)
    shape = constant(required(anchor.graph), target, np.int64, name)
    split = insert(anchor, "Reshape", [value, shape], shape=[batch, length, 1, size])
    return insert(anchor, "Transpose", [split], {"perm": [0, 2, 1, 3]}, shape=[batch, 1, length, size])


def _mask(
    anchor: ir.Node, masks: tuple[ir.Value, ...], heads: tuple[ir.Value, ir.Value, ir.Value]
) -> ir.Value | Refused | None:
    """Return the sum of the masks, None where there is none, or the reason why Attention does not accept them."""
    if not masks:
        return None
    q, k = known_dims(heads[0]), known_dims(heads[1])
    whole = (q[0], q[1], q[2], k[2])
    for mask in masks:
        sizes = dims(mask)
        if sizes is None or len(sizes) > 4:
            return Refused("the mask has more than 4 dimensions, or unknown ones")
        if len(sizes) == 3 and not (is_weight(mask) or sizes[0] == 1):
            return Refused("the mask is folded with the heads into the batch")
        for size, wanted in zip(reversed(sizes), reversed(whole), strict=False):
            if size != 1 and not same_dims((size,), (wanted,)):
                return Refused(f"the mask is {mask.shape}, the scores are {ir.Shape(whole)}")
        if mask.dtype is None or not mask.dtype.is_floating_point():
            return Refused(f"the mask is {mask.dtype}, which cannot be added")
    total = _narrowed(anchor, _full(anchor, masks[0], heads), heads[0])
    for mask in masks[1:]:
        other = _narrowed(anchor, _full(anchor, mask, heads), heads[0])
        lead = [b if a == 1 else a for a, b in zip(dims(total) or (), dims(other) or (), strict=True)]
        total = insert(anchor, "Add", [total, other], shape=lead)
    return total


def _narrowed(anchor: ir.Node, mask: ir.Value, like: ir.Value) -> ir.Value:
    """Return the mask in the type of the scores. Numbers below the range of the type are clamped."""
    dtype = dtype_of(mask)
    if dtype == like.dtype:
        return mask
    lowest = constant(required(anchor.graph), MASKED_SCORE, dtype.numpy(), f"very_low_{dtype.name.lower()}")
    held = insert(anchor, "Max", [mask, lowest], shape=mask.shape)
    return insert(anchor, "Cast", [held], {"to": like.dtype}, dtype=like.dtype, shape=mask.shape)


def _full(anchor: ir.Node, mask: ir.Value, heads: tuple[ir.Value, ir.Value, ir.Value]) -> ir.Value:
    """Return the mask with 4 dimensions, S and L in full: kernels broadcast it only along batch and heads."""
    sizes, q, k = known_dims(mask), known_dims(heads[0]), known_dims(heads[1])
    if len(sizes) == 4 and same_dims(sizes[2:], (q[2], k[2])):
        return mask
    ones = constant(required(anchor.graph), [1, 1], np.int64, "sizes_1_1")
    lengths = [
        insert(anchor, "Shape", [value], {"start": 2, "end": 3}, shape=[1], dtype=ir.DataType.INT64)
        for value in heads[:2]
    ]
    target = insert(anchor, "Concat", [ones, *lengths], {"axis": 0}, shape=[4], dtype=ir.DataType.INT64)
    lead = (1, 1, 1, 1, *sizes)[-4:-2]
    return insert(anchor, "Expand", [mask, target], shape=(*lead, q[2], k[2]))


def _joined(anchor: ir.Node, result: ir.Value) -> ir.Value:
    """Return the result (B,N,S,H) in the shape that the matmul with v had."""
    before, after = known_dims(result), dims(anchor.outputs[0])
    if after is not None and len(after) == 4:
        return result
    if before[1] == 1 and _reshaped_to(anchor.outputs[0], result) and isinstance(before[3], int):
        # A later reshape joins the heads; the two will cancel.
        shape = constant(required(anchor.graph), [0, -1, before[3]], np.int64, f"shape_0_m1_{before[3]}")
        return insert(anchor, "Reshape", [result, shape], shape=anchor.outputs[0].shape)
    if before[1] == 1:
        moved = insert(
            anchor,
            "Transpose",
            [result],
            {"perm": [0, 2, 1, 3]},
            shape=[before[0], before[2], before[1], before[3]],
        )
        shape = constant(required(anchor.graph), [0, 0, -1], np.int64, "shape_0_0_m1")
        return insert(anchor, "Reshape", [moved, shape], shape=anchor.outputs[0].shape)
    sizes = insert(anchor, "Shape", [result], {"start": 2}, shape=[2], dtype=ir.DataType.INT64)
    rest = constant(required(anchor.graph), [-1], np.int64, "shape_m1")
    shape = insert(anchor, "Concat", [rest, sizes], {"axis": 0}, shape=[3], dtype=ir.DataType.INT64)
    return insert(anchor, "Reshape", [result, shape], shape=anchor.outputs[0].shape)


def _reshaped_to(value: ir.Value, like: ir.Value) -> bool:
    """Return whether every reader of `value` reshapes it to the shape of `like`."""
    users = [use.node for use in value.uses()]
    return bool(users) and all(user.op_type == "Reshape" and same_shape(user.outputs[0], like) for user in users)


class CausalMaskToAttribute(Rule):
    """Attention(q, k, v, [j <= i]) -> Attention(q, k, v, is_causal=1).

    Shapes: q, k, v (B,N,S,H), mask (S,S) or (1 or B,1,S,S), of booleans or of numbers to add: 0 where
    j <= i and -inf, or a very low number, elsewhere.
    """

    keeps_nodes = True  # one mask serves every layer

    def pattern(self, op: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return op.Attention(q, k, v, mask, _allow_other_attributes=True, _outputs=["attention"])

    def check(self, q: ir.Value, k: ir.Value, mask: ir.Value, **_: Any) -> str | None:
        sizes, queries, keys = dims(mask), dims(q), dims(k)
        if sizes is None or queries is None or keys is None or not same_dims(sizes[-2:], (queries[-2], keys[-2])):
            return "the mask is not known to be causal"
        return None if is_causal(mask) else "the mask is not known to be causal"

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, attention: ir.Value, **_: Any) -> Any:
        node = producer_node(attention)
        attributes = {name: value for name, value in node.attributes.items() if name != "is_causal"}
        return op.Attention(q, k, v, **attributes, is_causal=1)
