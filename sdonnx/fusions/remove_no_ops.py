"""Operators without effect are removed: x * 1, a Cast to the same type, a Reshape to the same shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, constant_value, dims, insert, is_weight, replace
from sdonnx.graph.match import (
    NOT_A_CANDIDATE,
    REWRITTEN,
    Refused,
    WalkResult,
    WalkRule,
    filling,
    producer_of,
    same_dims,
    same_shape,
)
from sdonnx.graph.passes import constant_target

__all__ = ["MergeReshapes", "MergeTransposes", "MergeUnsqueezes", "NoOp", "PadIntoConv", "TransposeOfFolded"]
_MAX_COMPARED = 2**24  # elements of a constant that is compared


# The types that hold every value of a type.
_WIDER = {
    ir.DataType.FLOAT16: (ir.DataType.FLOAT, ir.DataType.DOUBLE),
    ir.DataType.BFLOAT16: (ir.DataType.FLOAT, ir.DataType.DOUBLE),
    ir.DataType.FLOAT: (ir.DataType.DOUBLE,),
    ir.DataType.INT32: (ir.DataType.INT64,),
    ir.DataType.BOOL: (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.FLOAT16),
}


class NoOp(WalkRule):
    """x * 1, x / 1, x + 0, x - 0 -> x; Identity, Dropout; Cast, Reshape, Expand, Transpose without effect -> x.

    Cast(Cast(x, wider), type of x) -> x. Zeros may be computed: y * 0 where y is ConstantOfShape, as
    torch.baddbmm(torch.empty(...), beta=0) is exported.
    """

    def rewrite(self, node: ir.Node) -> WalkResult:
        output = node.outputs[0]
        same = _CHECKS[node.op_type](node)
        if same is None or any(extra.uses() or extra.is_graph_output() for extra in node.outputs[1:]):
            return NOT_A_CANDIDATE
        if same.dtype is None or same.dtype != output.dtype:
            return NOT_A_CANDIDATE
        if output.is_graph_output() and (same.producer() is None or same.is_graph_output()):
            return NOT_A_CANDIDATE  # an output needs a node of its own
        replace(output, same)
        return REWRITTEN


def _first(node: ir.Node) -> ir.Value | None:
    return node.inputs[0]


def _dropout(node: ir.Node) -> ir.Value | None:
    training = node.inputs[2] if len(node.inputs) > 2 else None
    value = False if training is None else constant_value(training)
    return node.inputs[0] if value is not None and not np.any(value) else None


def _cast(node: ir.Node) -> ir.Value | None:
    x, wanted = node.inputs[0], node.attributes.get_int("to", 0)
    if x is None or x.dtype is None or x.dtype == wanted:
        return x
    inner = producer_of(x, "Cast")
    source = inner.inputs[0] if inner is not None else None
    if source is None or source.dtype is None or source.dtype != wanted:
        return None
    return source if x.dtype in _WIDER.get(source.dtype, ()) else None


def _to_same_shape(node: ir.Node) -> ir.Value | None:
    x = node.inputs[0]
    return x if x is not None and same_shape(x, node.outputs[0]) else None


def _transpose(node: ir.Node) -> ir.Value | None:
    perm = node.attributes.get_ints("perm", ())
    return node.inputs[0] if perm and list(perm) == sorted(perm) else None


def _neutral(neutral: float, commutes: bool) -> Callable[[ir.Node], ir.Value | None]:
    def check(node: ir.Node) -> ir.Value | None:
        first, second = node.inputs
        orders = [(first, second), (second, first)] if commutes else [(first, second)]
        for x, other in orders:
            if x is not None and _all(other, neutral) and same_shape(x, node.outputs[0]):
                return x
        return None

    return check


def _all(value: ir.Value | None, number: float) -> bool:
    """Return whether every element of the value is this number.

    A vector of weights that is all zeros or ones stays, so that fusions do not depend on the values of weights. A
    whole matrix of them is not a weight: an exporter computed it.
    """
    if value is None:
        return False
    tensor = value.const_value if is_weight(value) else None
    if tensor is not None and sum(size > 1 for size in tensor.shape.numpy()) > 1:
        return tensor.size <= _MAX_COMPARED and bool(np.all(constant_value(value) == number))
    return filling(value) == number


_CHECKS: dict[str, Callable[[ir.Node], ir.Value | None]] = {
    "Add": _neutral(0.0, commutes=True),
    "Cast": _cast,
    "Div": _neutral(1.0, commutes=False),
    "Dropout": _dropout,
    "Expand": _to_same_shape,
    "Identity": _first,
    "Mul": _neutral(1.0, commutes=True),
    "Reshape": _to_same_shape,
    "Sub": _neutral(0.0, commutes=False),
    "Transpose": _transpose,
}


NoOp.roots = frozenset(_CHECKS)


class MergeTransposes(WalkRule):
    """Transpose(Transpose(x, p), q) -> Transpose(x, [p[i] for i in q])."""

    roots = frozenset({"Transpose"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        inner = producer_of(node.inputs[0], "Transpose")
        if inner is None or inner.inputs[0] is None:
            return NOT_A_CANDIDATE
        first, second = inner.attributes.get_ints("perm", ()), node.attributes.get_ints("perm", ())
        if not first or not second:
            return NOT_A_CANDIDATE
        perm = [first[axis] for axis in second]
        merged = insert(node, "Transpose", [inner.inputs[0]], {"perm": perm}, shape=node.outputs[0].shape)
        replace(node.outputs[0], merged)
        return REWRITTEN


class MergeUnsqueezes(WalkRule):
    """Unsqueeze(Unsqueeze(x, [2]), [3]) -> Unsqueeze(x, [2, 3]), for any axes."""

    roots = frozenset({"Unsqueeze"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        inner = producer_of(node.inputs[0], "Unsqueeze")
        if inner is None or node.inputs[0] is None or not isinstance(node.graph, ir.Graph):
            return NOT_A_CANDIDATE
        first, second = constant_value(inner.inputs[1]), constant_value(node.inputs[1])
        middle, last = dims(node.inputs[0]), dims(node.outputs[0])
        if first is None or second is None or middle is None or last is None:
            return NOT_A_CANDIDATE
        later = {int(axis) % len(last) for axis in second}
        # Where the axes of the value in between come to stand.
        places = [axis for axis in range(len(last)) if axis not in later]
        axes = sorted(later | {places[int(axis) % len(middle)] for axis in first})
        name = "axes_" + "_".join(map(str, axes))
        merged = constant(node.graph, axes, np.int64, name)
        replace(node.outputs[0], insert(node, "Unsqueeze", [inner.inputs[0], merged], shape=node.outputs[0].shape))
        return REWRITTEN


class MergeReshapes(WalkRule):
    """Reshape(Reshape(x, a), b) -> Reshape(x, b), where b says all sizes but one, or sizes that x has in place."""

    roots = frozenset({"Reshape"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        inner = producer_of(node.inputs[0], "Reshape")
        if inner is None or inner.inputs[0] is None or node.graph is None:
            return NOT_A_CANDIDATE
        source, output = inner.inputs[0], node.outputs[0]
        before, after = dims(source), dims(output)
        if before is None or after is None or any(not isinstance(dim, int) and dim.value is None for dim in after):
            return NOT_A_CANDIDATE
        target = constant_target(ir.Shape(before), ir.Shape(after))
        if target is None or not isinstance(node.graph, ir.Graph):
            return NOT_A_CANDIDATE
        name = "shape_" + "_".join(str(size).replace("-", "m") for size in target)
        sizes = constant(node.graph, target, np.int64, name)
        replace(output, insert(node, "Reshape", [source, sizes], shape=output.shape))
        return REWRITTEN


class TransposeOfFolded(WalkRule):
    """Reshape(Transpose(Reshape(x, (P,L,H)), (0,2,1)), (...,H,L)) -> Transpose(x, last two axes swapped).

    Shapes: x (...,L,H), P the product of the axes before. torch's exporter writes the key of
    scaled_dot_product_attention so.
    """

    roots = frozenset({"Reshape"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        moved = producer_of(node.inputs[0], "Transpose")
        folding = producer_of(moved.inputs[0], "Reshape") if moved is not None else None
        if moved is None or folding is None or moved.attributes.get_ints("perm", ()) != (0, 2, 1):
            return NOT_A_CANDIDATE
        x, output = folding.inputs[0], node.outputs[0]
        if x is None:
            return NOT_A_CANDIDATE
        before, folded, after = (dims(value) for value in (x, folding.outputs[0], output))
        if before is None or folded is None or after is None or len(before) != len(after):
            return NOT_A_CANDIDATE
        swapped = (*before[:-2], before[-1], before[-2])
        if not same_dims(before[-2:], folded[1:]) or not same_dims(swapped, after):
            return NOT_A_CANDIDATE
        rank = len(before)
        perm = [*range(rank - 2), rank - 1, rank - 2]
        replace(output, insert(node, "Transpose", [x], {"perm": perm}, shape=output.shape))
        return REWRITTEN


class PadIntoConv(WalkRule):
    """Conv(Pad(x, zeros around height and width)) -> Conv(x, with larger pads)."""

    roots = frozenset({"Conv"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        pad = producer_of(node.inputs[0], "Pad")
        rank = len(dims(node.outputs[0]) or ())
        if pad is None or rank < 3 or pad.attributes.get_string("mode", "constant") != "constant":
            return NOT_A_CANDIDATE
        amounts = constant_value(pad.inputs[1])
        filled = pad.inputs[2] if len(pad.inputs) > 2 else None
        axes = pad.inputs[3] if len(pad.inputs) > 3 else None
        if amounts is None or amounts.size != 2 * rank or axes is not None or (amounts < 0).any():
            return NOT_A_CANDIDATE
        if filled is not None and filling(filled) != 0.0:
            return Refused("the padding value is not zero")
        before, after = amounts[:rank].tolist(), amounts[rank:].tolist()
        if any((*before[:2], *after[:2])) or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
            return Refused("batch or channels are padded")
        pads = node.attributes.get_ints("pads", (0,) * (2 * (rank - 2)))
        total = [own + more for own, more in zip(pads, (*before[2:], *after[2:]), strict=True)]
        attributes = {name: value for name, value in node.attributes.items() if name != "pads"} | {"pads": total}
        inputs = [pad.inputs[0], *node.inputs[1:]]
        replace(node.outputs[0], insert(node, "Conv", inputs, attributes, shape=node.outputs[0].shape))
        return REWRITTEN
