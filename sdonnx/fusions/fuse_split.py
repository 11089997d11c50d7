"""Slices and sizes of equal parts -> Split."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.graph.edit import constant_value, insert_multi, replace, static_dim
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, WalkResult, WalkRule

__all__ = ["SizesToEqualSplit", "SlicesToSplit"]


class SlicesToSplit(WalkRule):
    """x[..., :D], x[..., D:] -> Split(x, num_outputs=2).

    Shapes: x has 2 D elements along the axis. TorchScript writes chunk(2) so, its bounds computed.
    """

    roots = frozenset({"Slice"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        x = node.inputs[0]
        first = _bounds(node)
        if x is None or first is None:
            return NOT_A_CANDIDATE
        axis, start, end, size = first
        if start != 0 or 2 * end != size:
            return NOT_A_CANDIDATE
        others = [use.node for use in x.uses() if use.node is not node]
        second = [user for user in others if user.op_type == "Slice" and _bounds(user) == (axis, end, size, size)]
        if not second:
            return NOT_A_CANDIDATE
        halves = insert_multi(
            node, "Split", [x], {"axis": axis, "num_outputs": 2}, 2, shapes=[node.outputs[0].shape] * 2
        )
        replace(node.outputs[0], halves[0])
        for user in second:
            replace(user.outputs[0], halves[1])
        return REWRITTEN


def _bounds(node: ir.Node) -> tuple[int, int, int, int] | None:
    """Return (axis, start, end, size) of a slice along one axis with constant bounds and step 1."""
    x = node.inputs[0]
    values = [constant_value(value) for value in node.inputs[1:]]
    if x is None or x.shape is None or any(value is None or value.size != 1 for value in values):
        return None
    numbers = [int(value.item()) for value in values if value is not None]
    axis = numbers[2] if len(numbers) > 2 else 0
    axis %= x.shape.rank()
    size = static_dim(x, axis)
    if size is None or (len(numbers) > 3 and numbers[3] != 1):
        return None
    start, end, _ = slice(numbers[0], numbers[1]).indices(size)
    return axis, start, end, size


class SizesToEqualSplit(WalkRule):
    """Split(x, [D, D]) -> Split(x, num_outputs=2), for any number of equal parts."""

    roots = frozenset({"Split"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        sizes = constant_value(node.inputs[1]) if len(node.inputs) > 1 else None
        if sizes is None or len(set(sizes.tolist())) != 1:
            return NOT_A_CANDIDATE
        attributes = {"axis": node.attributes.get_int("axis", 0), "num_outputs": len(node.outputs)}
        shapes = [output.shape for output in node.outputs]
        parts = insert_multi(node, "Split", [node.inputs[0]], attributes, len(node.outputs), shapes=shapes)
        for old, new in zip(node.outputs, parts, strict=True):
            replace(old, new)
        return REWRITTEN
