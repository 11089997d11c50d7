"""GraphBuilder and small functions to write the served graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dtype_of, known_dims, required
from sdonnx.models.abi import COMPONENT, GraphTensor

__all__ = [
    "FLOAT",
    "INT64",
    "GraphBuilder",
    "add_output",
    "declared_input",
    "declared_shape",
    "graph_input",
    "has_subgraph",
    "int64_vector",
    "measured_axes",
    "new_input",
    "remove_unused_nodes",
    "repeat_rows",
    "replace_input",
    "widen_input",
    "widen_interface",
]

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64

_DTYPES = {"bool": ir.DataType.BOOL, "float32": FLOAT, "int32": ir.DataType.INT32, "int64": INT64}


class GraphBuilder:
    """Adds nodes to a graph: before its first node, after its last node, or after a given node.

    Args:
        model: the model of the graph.
        before: add before the first node.
        after: add after this node; None for after the last node, unless `before`.
    """

    def __init__(self, model: ir.Model, *, before: bool = False, after: ir.Node | None = None) -> None:
        self.graph = model.graph
        self._anchor = next(iter(model.graph)) if before else None
        self._last = after

    def op(
        self, op_type: str, *inputs: ir.Value | None, dtype: ir.DataType | None = None, **attributes: Any
    ) -> ir.Value:
        """Add a node with one output and return the output; its type defaults to the first input's."""
        return self.multi(op_type, 1, *inputs, dtype=dtype, **attributes)[0]

    def multi(
        self, op_type: str, outputs: int, *inputs: ir.Value | None, dtype: ir.DataType | None = None, **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add a node with several outputs of one type and return them."""
        node = ir.node(op_type, list(inputs), attributes, num_outputs=outputs)
        kind = dtype if dtype is not None else next(value.dtype for value in inputs if value is not None)
        if kind is not None:
            for output in node.outputs:
                output.type = ir.TensorType(kind)
        if self._last is not None:
            self._last.append(node)
            self._last = node
        elif self._anchor is not None:
            self._anchor.prepend(node)
        else:
            self.graph.append(node)
        return node.outputs

    def integers(self, *values: int) -> ir.Value:
        """Return a constant vector of int64."""
        return int64_vector(self.graph, *values)

    def index(self, value: int) -> ir.Value:
        """Return a constant int64 scalar."""
        return constant(self.graph, value, np.int64, f"index_{value}")

    def number(self, value: float, name: str) -> ir.Value:
        """Return a constant float32 scalar."""
        return constant(self.graph, value, np.float32, name)

    def zero(self, dtype: ir.DataType) -> ir.Value:
        """Return a constant 0 of that type."""
        return constant(self.graph, 0, dtype.numpy(), f"zero_{dtype.name.lower()}")

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return the value in that type."""
        return value if value.dtype == dtype else self.op("Cast", value, dtype=dtype, to=dtype)

    def columns(self, row: ir.Value, start: int, end: int | None = None) -> ir.Value:
        """Return the columns [start, end) of a matrix; `end` defaults to its last column."""
        return self.op(
            "Slice",
            row,
            self.integers(start),
            self.integers(np.iinfo(np.int64).max if end is None else end),
            self.integers(1),
        )


def int64_vector(graph: ir.Graph, *values: int) -> ir.Value:
    """Return a constant vector of int64 in a graph."""
    name = "integers_" + "_".join(str(value).replace("-", "m") for value in values)
    return constant(graph, values, np.int64, name)


def new_input(name: str, dtype: ir.DataType | None, shape: Sequence[int | str]) -> ir.Value:
    """Return a new graph input of that name, type and shape; the caller adds it to the graph."""
    return ir.Value(name=name, type=None if dtype is None else ir.TensorType(dtype), shape=ir.Shape(shape))


def declared_input(
    tensor: GraphTensor, sizes: Mapping[str, int] | None = None, dtype: ir.DataType | None = None
) -> ir.Value:
    """Return a new graph input as `sdonnx.models.abi` declares it.

    Args:
        tensor: the declaration.
        sizes: the sizes of symbolic axes that the model fixes.
        dtype: the component's type, for tensors that have it.
    """
    kind = required(dtype, f"element type of {tensor.name}") if tensor.dtype == COMPONENT else _DTYPES[tensor.dtype]
    return new_input(tensor.name, kind, declared_shape(tensor, sizes))


def declared_shape(tensor: GraphTensor, sizes: Mapping[str, int] | None = None) -> list[int | str]:
    """Return the shape of a declared tensor with the sizes of axes that the model fixes."""
    shape = required(tensor.shape, f"shape of {tensor.name}")
    fixed = sizes or {}
    return [fixed.get(size, size) if isinstance(size, str) else size for size in shape]


def graph_input(graph: ir.Graph, name: str) -> ir.Value:
    """Return the graph's input of that name."""
    return next(value for value in graph.inputs if value.name == name)


def replace_input(graph: ir.Graph, name: str, source: ir.Value) -> None:
    """Let the nodes that read the graph's input `name` read `source`, and remove the input.

    `source` takes the input's name, so that a served graph shows the values that the wrapped component reads. Where
    `source` is a cast of a wider input of the same name, the wider input keeps it.
    """
    value = graph_input(graph, name)
    value.replace_all_uses_with(source)
    graph.inputs.remove(value)
    producer = source.producer()
    if producer is not None and all(read is None or read.name != name for read in producer.inputs):
        source.name = name


def widen_input(model: ir.Model, name: str) -> ir.Value:
    """Return the graph's input of that name in float32: itself, or a new input that is cast to the old type."""
    narrow = graph_input(model.graph, name)
    dtype = dtype_of(narrow)
    if dtype == FLOAT:
        return narrow
    wide = new_input(name, FLOAT, [size if isinstance(size, int) else str(size) for size in known_dims(narrow)])
    replace_input(model.graph, name, GraphBuilder(model, before=True).cast(wide, dtype))
    return wide


def widen_interface(model: ir.Model) -> None:
    """Make all inputs and outputs of a graph float32, in place."""
    graph = model.graph
    inputs = [widen_input(model, str(value.name)) for value in list(graph.inputs)]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    outputs = [(value, str(value.name), value.shape) for value in graph.outputs]
    graph.outputs.clear()
    add = GraphBuilder(model, before=False)
    for value, name, shape in outputs:
        if value.dtype != FLOAT:
            value.name = f"{name}_narrow"
            value = add.cast(value, FLOAT)
        add_output(graph, value, name, shape)


def add_output(graph: ir.Graph, value: ir.Value, name: str, shape: Sequence[int | str] | ir.Shape | None) -> None:
    """Make the value an output of that name and shape."""
    value.name = name
    value.shape = ir.Shape(shape) if shape is not None else None
    graph.outputs.append(value)


def repeat_rows(add: GraphBuilder, value: ir.Value, copies: ir.Value) -> ir.Value:
    """Return G copies (G*B,...) of a value (B,...); `copies` is G, an int64 (1,)."""
    sizes = add.op("Concat", copies, add.op("Shape", value, dtype=INT64), axis=0)
    expanded = add.op("Expand", value, sizes)
    flat = add.op("Concat", add.integers(-1), add.op("Shape", value, dtype=INT64, start=1), axis=0)
    return add.op("Reshape", expanded, flat)


def has_subgraph(node: ir.Node) -> bool:
    """Return whether a node has subgraphs, as If and Loop do."""
    return any(each.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for each in node.attributes.values())


def remove_unused_nodes(graph: ir.Graph) -> None:
    """Remove the nodes without a used output."""
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)


def measured_axes(node: ir.Node, rank: int) -> tuple[int, int]:
    """Return the range [start, end) of axes that a Shape node measures."""
    bounds = node.attributes.get_int("start", 0), node.attributes.get_int("end", rank)
    start, end = (min(max(axis + rank if axis < 0 else axis, 0), rank) for axis in bounds)
    return start, max(start, end)
