"""Small work on rows that are one for the whole batch, of all blocks at once: shifts, scales, gates, gated biases.

A row of some thousand numbers is too little for a kernel; of thirty blocks, launching takes longer than computing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, insert, insert_multi, joined_initializer, replace, static_dim
from sdonnx.graph.match import is_bias, is_matrix
from sdonnx.graph.modules import joint_path

__all__ = ["compute_rows_together"]

_FEWEST = 2


@dataclass(frozen=True)
class _Use:
    """A row (D) and a constant, added up, multiplied or of a matrix product.

    Attributes:
        index: which of the rows it is.
        node: the operator.
        weight: the constant, (D) or, of a product, (D,E).
    """

    index: int
    node: ir.Node
    weight: ir.Value


def compute_rows_together(model: ir.Model) -> dict[str, int]:
    """Rows r1 ... rn of one Split, each with a constant: r1 * c1, ... -> Split(rows * [c1, ...]), in place.

    Likewise sums, and products r @ W, which are one batched product. Shapes: rows (N,1,D), r (1,1,D) as (D), c (D),
    W (D,E).

    Returns:
        How many operators of each kind went into another.
    """
    fired: dict[str, int] = defaultdict(int)
    graph = model.graph
    splits = [node for node in graph if _splits_rows(node)]
    while splits:
        split = splits.pop()
        groups: dict[tuple[str, int | None], list[_Use]] = defaultdict(list)
        for use in _uses(split):
            groups[use.node.op_type, static_dim(use.weight, -1)].append(use)
        for (op_type, _), uses in groups.items():
            if len(uses) >= _FEWEST:
                splits.append(_together(graph, split, uses))
                fired[op_type] += len(uses)
    return dict(fired)


def _splits_rows(node: ir.Node) -> bool:
    """Tell whether a node splits (N,1,D) into N rows (1,1,D)."""
    if node.op_type != "Split" or node.domain or node.attributes.get_int("axis", 0) != 0 or node.inputs[0] is None:
        return False
    rows = dims(node.inputs[0])
    if rows is None or len(rows) != 3 or rows[:2] != (len(node.outputs), 1):
        return False
    return all(dims(part) == (1, 1, rows[2]) for part in node.outputs)


def _uses(split: ir.Node) -> Iterator[_Use]:
    """Yield what is done to each row with a constant of its own."""
    for index, part in enumerate(split.outputs):
        width = static_dim(part, -1)
        for reshape, _ in part.uses():
            if (
                reshape.graph is not split.graph
                or reshape.op_type != "Reshape"
                or reshape.domain
                or dims(reshape.outputs[0]) != (width,)
            ):
                continue
            row = reshape.outputs[0]
            for node, place in row.uses():
                weight = node.inputs[1 - place] if not node.domain and len(node.inputs) == 2 else None
                # A branch computes only where its condition holds: what stands in one is left there.
                if weight is None or node.outputs[0].is_graph_output() or node.graph is not split.graph:
                    continue
                combines = node.op_type in ("Add", "Mul") and is_bias(weight, width)
                multiplies = node.op_type == "MatMul" and place == 0 and is_matrix(weight)
                if combines or (multiplies and static_dim(weight, 0) == width):
                    yield _Use(index, node, weight)


def _together(graph: ir.Graph, split: ir.Node, uses: Sequence[_Use]) -> ir.Node:
    """Do to the rows at once what `uses` do to each, and return the Split of the results."""
    nodes = {use.node for use in uses}
    anchor = next(node for node in graph if node in nodes)
    rows, indices = split.inputs[0], [use.index for use in uses]
    assert rows is not None
    module = joint_path(use.node for use in uses)
    width, count = static_dim(rows, -1), len(uses)
    assert width is not None
    if indices != list(range(len(split.outputs))):
        chosen = constant(graph, indices, np.int64, f"rows_{indices[0]}_and_{count - 1}_more")
        rows = insert(anchor, "Gather", [rows, chosen], {"axis": 0}, shape=[count, 1, width], module=module)
    weights = _stacked(graph, [use.weight for use in uses])
    result = static_dim(weights, -1) or 0
    made = insert(anchor, uses[0].node.op_type, [rows, weights], shape=[count, 1, result], module=module)
    parts = insert_multi(
        anchor, "Split", [made], {"axis": 0, "num_outputs": count}, count,
        shapes=[(1, 1, result)] * count, module=module,
    )  # fmt: skip
    shape = constant(graph, [result], np.int64, f"sizes_{result}")
    for use, part in zip(uses, parts, strict=True):
        replace(use.node.outputs[0], insert(use.node, "Reshape", [part, shape], shape=[result]))
        graph.remove(use.node, safe=True)
    found = parts[0].producer()
    assert found is not None
    return found


def _stacked(graph: ir.Graph, parts: Sequence[ir.Value]) -> ir.Value:
    """Return vectors (D) as (N,1,D), matrices (D,E) as (N,D,E)."""
    assert parts[0].shape is not None
    sizes = parts[0].shape.numpy()
    shape = (len(parts), *((1, *sizes) if len(sizes) == 1 else sizes))
    return joined_initializer(graph, parts, lambda values: np.stack(values).reshape(shape), shape)
