"""Splits into more parts than a kernel writes to without the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.contract import MOST_OUTPUTS
from sdonnx.graph.edit import constant, dims, insert, insert_multi, replace, static_dim

__all__ = ["narrow_splits"]


def narrow_splits(model: ir.Model) -> dict[str, int]:
    """Split into more parts than a kernel writes to -> parts of parts, in place; return how many were found.

    Where their number has no fitting divisor, the first parts are slices.
    """
    found = 0
    for node in list(model.graph):
        count = len(node.outputs)
        if node.op_type != "Split" or node.domain or count <= MOST_OUTPUTS or node.inputs[0] is None:
            continue
        sizes = [_size(part, node) for part in node.outputs]
        if None in sizes or len(set(sizes)) > 1:
            continue
        divisors = [each for each in range(2, MOST_OUTPUTS + 1) if count % each == 0 and count // each <= MOST_OUTPUTS]
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
    return {"WideSplit": found}


def _size(part: ir.Value, split: ir.Node) -> int | None:
    return static_dim(part, split.attributes.get_int("axis", 0))


def _split_evenly(node: ir.Node, each: int, axis: int) -> list[tuple[ir.Value, int]]:
    """Return parts of `each` of a Split's parts."""
    count = len(node.outputs) // each
    shape = _joined(node.outputs[0], axis, each)
    wholes = insert_multi(
        node, "Split", [node.inputs[0]], {"axis": axis, "num_outputs": count}, count, shapes=[shape] * count
    )
    return [(whole, each) for whole in wholes]


def _sliced(node: ir.Node, axis: int, size: int) -> list[tuple[ir.Value, int]]:
    """Return slices of as many of a Split's parts as a kernel writes to, and one of the rest."""
    graph, count = node.graph, len(node.outputs)
    assert isinstance(graph, ir.Graph)
    along, found = constant(graph, [axis], np.int64, f"axis_{axis}"), []
    for first in range(0, count, MOST_OUTPUTS):
        parts = min(MOST_OUTPUTS, count - first)
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
