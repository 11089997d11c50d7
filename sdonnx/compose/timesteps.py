"""Tabulate the values that depend only on the timestep: compute them for all calls at once.

The embedding of the timestep and the projections of it in layers are some twenty small kernels at each step. Here they
compute one row for every call, and a step reads its own row. `hoist_step_invariants` then moves them out of the step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from sdonnx.compose.graph_builder import INT64, GraphBuilder, has_subgraph
from sdonnx.compose.rowwise import RowRules
from sdonnx.graph.edit import dims
from sdonnx.models import abi
from sdonnx.models.abi import CALLS

__all__ = ["CallRow", "read_call_row", "tabulate_timesteps"]

_MATMULS = frozenset({"FusedMatMul", "Gemm", "MatMul"})
# Operators that cost as little on one row as on the table, where no other operator follows.
_CUTS = frozenset({"Slice", "Split", "Squeeze", "Unsqueeze"})
# Numbers in a row of the table: 64 MB for a table in float16.
_MAX_ROW_SIZE = 2**15
# Operators that do not return one row for each row: their size inputs are made for one.
_RESIZING = frozenset({"Expand", "Reshape"})


def tabulate_timesteps(
    step: ir.Model, timestep: ir.Value, timesteps: ir.Value, step_index: ir.Value, conditioning: Collection[ir.Value]
) -> bool:
    """Compute the values that depend only on the timestep for all calls, in a step graph, in place.

    Operators that treat each row of the first axis by itself are followed, from the timestep on. A timestep that is
    repeated for each image is followed as if it were not, and the values computed from it are repeated instead. The
    graph is unchanged if there is no matmul among these operators, if more values are read from the table than are
    saved, or if the table would be too large.

    Args:
        step: a composed step graph.
        timestep: (1,), of this call.
        timesteps: (calls,), of all calls.
        step_index: (1,) int64, the row of this call.
        conditioning: inputs of the graph that are the same at every call.

    Returns:
        Whether the graph was changed.
    """
    if any(map(has_subgraph, step.graph)):
        return False
    found = _TimestepRows(step.graph, timestep, conditioning)
    nodes = found.nodes()
    inside = set(nodes)
    tabulated = [
        value
        for node in nodes
        for value in node.outputs
        if node.op_type != "Expand" and any(use.node not in inside for use in value.uses())
    ]
    numbers = sum(prod(size for size in (dims(value) or ())[1:] if isinstance(size, int)) for value in tabulated)
    matmuls = any(node.op_type in _MATMULS for node in nodes)
    if not matmuls or 3 * len(tabulated) > len(nodes) or numbers > _MAX_ROW_SIZE:
        return False
    outside = {value: [use for use in value.uses() if use.node not in inside] for value in tabulated}
    shapes = {value: value.shape for value in tabulated}
    for node in nodes:
        for index, value in enumerate(node.inputs):
            if value is timestep or (value is not None and value in found.repeated):
                node.replace_input_with(index, timesteps)
        if node.op_type != "Expand":
            for output in node.outputs:
                output.shape = ir.Shape([CALLS, *(dims(output) or ())[1:]])
    for value in tabulated:
        add = GraphBuilder(step, after=value.producer())
        row = add.op("Gather", value, step_index, axis=0)
        if (count := found.counts[value]) is not None:
            row.shape = ir.Shape([1, *(dims(value) or ())[1:]])
            sizes = add.op("Concat", count, add.op("Shape", value, dtype=INT64, start=1), axis=0)
            sizes.shape = ir.Shape([len(row.shape)])
            row = add.op("Expand", row, sizes)
        row.shape = shapes[value]
        for use in outside[value]:
            use.node.replace_input_with(use.idx, row)
    return True


class _TimestepRows(RowRules):
    """The values of a step graph that have one row, which depends only on the timestep and on constants.

    Attributes:
        repeated: the timestep, repeated for each image.
        counts: each such value -> its number of repetitions, an int64 (1,); None where it is not repeated.
    """

    def __init__(self, graph: ir.Graph, timestep: ir.Value, conditioning: Collection[ir.Value]) -> None:
        self.graph = graph
        self._timestep = timestep
        self.repeated = set[ir.Value]()
        self.counts: dict[ir.Value, ir.Value | None] = {timestep: None}
        always = {value for value in conditioning if _has_one_row(value)}
        super().__init__({timestep: True}, {value for value in graph.inputs if value not in always})
        for node in graph:
            if timestep not in node.outputs:
                self._follow(node)

    def nodes(self) -> list[ir.Node]:
        """Return the nodes that will compute one row for each call, in the graph's order."""
        nodes = [node for node in self.graph if node.outputs[0] in self.rows and self._timestep not in node.outputs]
        inside = set(nodes)
        for node in reversed(nodes):
            users = {use.node for output in node.outputs for use in output.uses()}
            if node.op_type in _CUTS and users.isdisjoint(inside):
                inside.discard(node)
        return [node for node in nodes if node in inside]

    def _follow(self, node: ir.Node) -> None:
        read = {value for value in node.inputs if value is not None}
        first = node.inputs[0] if node.inputs else None
        if node.op_type == "Expand" and first is self._timestep and len(dims(node.outputs[0]) or ()) == 1:
            self.repeated.add(node.outputs[0])
            self._add(node, node.inputs[1])
        elif node.op_type == "Shape" or read & self.other:
            self.other.update(node.outputs)  # sizes may depend on the number of rows
        elif read & self.rows.keys():
            counts = {self.counts[value] for value in read & self.rows.keys()} - {None}
            fits = all(_has_known_rows(output) for output in node.outputs if output.name)
            if node.op_type not in _RESIZING and len(counts) < 2 and fits and self.keeps_rows(node):
                self._add(node, next(iter(counts), None))
            else:
                self.other.update(node.outputs)

    def _add(self, node: ir.Node, count: ir.Value | None) -> None:
        self.rows.update(dict.fromkeys(node.outputs, True))
        self.counts.update(dict.fromkeys(node.outputs, count))


def _has_one_row(value: ir.Value) -> bool:
    return (dims(value) or ())[:1] == (1,)


def _has_known_rows(value: ir.Value) -> bool:
    """Return whether all sizes but the first, the number of rows, are numbers."""
    sizes = dims(value) or ()
    return len(sizes) > 0 and all(isinstance(size, int) for size in sizes[1:])


@dataclass(frozen=True)
class CallRow:
    """Values of one call.

    Attributes:
        row: (1,P) float32, the row of the parameter table.
        next_index: (1,) int64, the row of the next call.
        index: (1,) int64, the row of this call.
        timestep: (1,) float32.
        timesteps: (calls,) float32, of all calls.
        scale: (1,) float32, by which the latents are multiplied for the denoiser.
    """

    row: ir.Value
    next_index: ir.Value
    index: ir.Value
    timestep: ir.Value
    timesteps: ir.Value
    scale: ir.Value


def read_call_row(add: GraphBuilder, parameters: ir.Value, step_index: ir.Value) -> CallRow:
    """Add nodes that read the row of a call.

    Only one of them reads `step_index`: the next index, which may overwrite it, is computed from the row.

    Args:
        add: where to add the nodes.
        parameters: (calls,P) float32, see `sdonnx.samplers.plans`.
        step_index: (1,) int64, the row of this call.
    """
    row = add.op("Gather", parameters, step_index, axis=0)
    next_index = add.op("Cast", add.op("Reshape", add.columns(row, 0, 1), add.integers(1)), dtype=INT64, to=INT64)
    index = add.op("Sub", next_index, add.integers(1))
    timestep = add.op("Reshape", add.columns(row, 1, 2), add.integers(1))
    timesteps = add.op("Reshape", add.columns(parameters, 1, 2), add.integers(-1))
    scale = add.op("Reshape", add.columns(row, 2, 3), add.integers(1))
    timestep.shape, timesteps.shape = ir.Shape([1]), ir.Shape([abi.CALLS])
    return CallRow(row, next_index, index, timestep, timesteps, scale)
