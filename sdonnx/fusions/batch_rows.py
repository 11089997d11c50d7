"""Operations on rows shared by the whole batch (shifts, scales, gates, gated biases), computed for all blocks at once.

A row of some thousand numbers is too small for a kernel: for thirty blocks, launching takes longer than computing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import (
    constant,
    dims,
    input_of,
    insert,
    insert_multi,
    joined_initializer,
    known_size,
    producer_node,
    replace,
    required,
    static_dim,
)
from sdonnx.graph.match import PassOutcome, is_bias, is_matrix
from sdonnx.graph.modules import joint_path

__all__ = ["compute_rows_together"]
_FEWEST = 2


@dataclass(frozen=True)
class _Use:
    """A sum, product or matmul of a row (D) and a constant.

    Attributes:
        index: the index of the row.
        node: the operator.
        weight: the constant: (D), or (D,E) for a matmul.
    """

    index: int
    node: ir.Node
    weight: ir.Value


def compute_rows_together(model: ir.Model) -> PassOutcome:
    """Rows r1 ... rn of one Split, each with a constant: r1 * c1, ... -> Split(rows * [c1, ...]), in place.

    The same for sums, and for matmuls r @ W, which become one batched matmul. Shapes: rows (N,1,D), r (1,1,D) as
    (D), c (D), W (D,E).

    Returns:
        The number of operators of each kind that were merged.
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
    return PassOutcome(dict(fired))


def _splits_rows(node: ir.Node) -> bool:
    """Return whether a node splits (N,1,D) into N rows (1,1,D)."""
    if node.op_type != "Split" or node.domain or node.attributes.get_int("axis", 0) != 0 or node.inputs[0] is None:
        return False
    rows = dims(node.inputs[0])
    if rows is None or len(rows) != 3 or rows[:2] != (len(node.outputs), 1):
        return False
    return all(dims(part) == (1, 1, rows[2]) for part in node.outputs)


def _uses(split: ir.Node) -> Iterator[_Use]:
    """Yield the operations on each row that have a constant of their own."""
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
                # A branch computes only where its condition holds: nodes inside of one stay there.
                if weight is None or node.outputs[0].is_graph_output() or node.graph is not split.graph:
                    continue
                combines = node.op_type in ("Add", "Mul") and is_bias(weight, width)
                multiplies = node.op_type == "MatMul" and place == 0 and is_matrix(weight)
                if combines or (multiplies and static_dim(weight, 0) == width):
                    yield _Use(index, node, weight)


def _together(graph: ir.Graph, split: ir.Node, uses: Sequence[_Use]) -> ir.Node:
    """Apply `uses` to all rows at once, and return the Split of the results."""
    nodes = {use.node for use in uses}
    anchor = next(node for node in graph if node in nodes)
    rows, indices = input_of(split, 0), [use.index for use in uses]
    module = joint_path(use.node for use in uses)
    width, count = known_size(rows, -1), len(uses)
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
    return producer_node(parts[0])


def _stacked(graph: ir.Graph, parts: Sequence[ir.Value]) -> ir.Value:
    """Return vectors (D) as (N,1,D), matrices (D,E) as (N,D,E)."""
    sizes = required(parts[0].shape).numpy()
    shape = (len(parts), *((1, *sizes) if len(sizes) == 1 else sizes))
    return joined_initializer(graph, parts, lambda values: np.stack(values).reshape(shape), shape)
