"""Slices and sizes of equal parts -> Split; Splits with many outputs -> several that the kernel addresses itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import (
    MAX_SPLIT_OUTPUTS,
    constant,
    constant_value,
    dims,
    insert,
    insert_multi,
    replace,
    required,
    static_dim,
)
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, PassOutcome, WalkResult, WalkRule

__all__ = ["SizesToEqualSplit", "SlicesToSplit", "narrow_splits"]


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


def narrow_splits(model: ir.Model) -> PassOutcome:
    """Split a Split with too many outputs (MAX_SPLIT_OUTPUTS) into two levels, in place.

    Where the number of outputs has no suitable divisor, the first level consists of slices.
    """
    found = 0
    for node in list(model.graph):
        count = len(node.outputs)
        if node.op_type != "Split" or node.domain or count <= MAX_SPLIT_OUTPUTS or node.inputs[0] is None:
            continue
        sizes = [_size(part, node) for part in node.outputs]
        if None in sizes or len(set(sizes)) > 1:
            continue
        divisors = [
            each for each in range(2, MAX_SPLIT_OUTPUTS + 1) if count % each == 0 and count // each <= MAX_SPLIT_OUTPUTS
        ]
        axis = node.attributes.get_int("axis", 0)
        wholes = _split_evenly(node, divisors[-1], axis) if divisors else _sliced(node, axis, sizes[0] or 0)
        first = 0
        for whole, parts in wholes:
            made = insert_multi(
                node, "Split", [whole], {"axis": axis, "num_outputs": parts}, parts,
                shapes=[part.shape for part in node.outputs[first : first + parts]],
            ) if parts > 1 else [whole]  # fmt: skip
            for old, new in zip(node.outputs[first : first + parts], made, strict=True):
                replace(old, new)
            first += parts
        model.graph.remove(node, safe=True)
        found += 1
    return PassOutcome({"WideSplit": found})


def _size(part: ir.Value, split: ir.Node) -> int | None:
    return static_dim(part, split.attributes.get_int("axis", 0))


def _split_evenly(node: ir.Node, each: int, axis: int) -> list[tuple[ir.Value, int]]:
    """Return parts that each hold `each` of a Split's parts."""
    count = len(node.outputs) // each
    shape = _joined(node.outputs[0], axis, each)
    wholes = insert_multi(
        node, "Split", [node.inputs[0]], {"axis": axis, "num_outputs": count}, count, shapes=[shape] * count
    )
    return [(whole, each) for whole in wholes]


def _sliced(node: ir.Node, axis: int, size: int) -> list[tuple[ir.Value, int]]:
    """Return slices that each hold the maximum number of a Split's parts, and one of the rest."""
    graph, count = required(node.graph), len(node.outputs)
    along, found = constant(graph, [axis], np.int64, f"axis_{axis}"), []
    for first in range(0, count, MAX_SPLIT_OUTPUTS):
        parts = min(MAX_SPLIT_OUTPUTS, count - first)
        ends = [constant(graph, [place * size], np.int64, f"place_{place * size}") for place in (first, first + parts)]
        shape = _joined(node.outputs[0], axis, parts)
        found.append((insert(node, "Slice", [node.inputs[0], *ends, along], shape=shape), parts))
    return found


def _joined(part: ir.Value, axis: int, count: int) -> list[Any] | None:
    sizes = dims(part)
    if sizes is None:
        return None
    shape: list[Any] = list(sizes)
    shape[axis] *= count
    return shape
