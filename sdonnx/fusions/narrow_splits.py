"""Splits with more outputs than the kernel addresses without the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import MAX_SPLIT_OUTPUTS, constant, dims, insert, insert_multi, replace, required, static_dim
from sdonnx.graph.match import PassOutcome

__all__ = ["narrow_splits"]


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
