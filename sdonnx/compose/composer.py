"""What the composed graphs are written with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant

__all__ = [
    "FLOAT",
    "INT64",
    "Composer",
    "give_out",
    "holds_graph",
    "input_of",
    "integers",
    "measured_axes",
    "prune",
    "repeated_rows",
    "take_over",
    "tensor",
    "widened_input",
]

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


class Composer:
    """Adds nodes before or after those of a graph, or after one of them."""

    def __init__(self, model: ir.Model, *, before: bool = False, after: ir.Node | None = None) -> None:
        self.graph = model.graph
        self._anchor = next(iter(model.graph)) if before else None
        self._last = after

    def op(
        self, op_type: str, *inputs: ir.Value | None, dtype: ir.DataType | None = None, **attributes: Any
    ) -> ir.Value:
        """Add a node with one output, of the type of its first input unless told, and return the output."""
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
        return integers(self.graph, *values)

    def index(self, value: int) -> ir.Value:
        """Return a constant number of int64."""
        return constant(self.graph, value, np.int64, f"index_{value}")

    def number(self, value: float, name: str) -> ir.Value:
        """Return a constant number of float32."""
        return constant(self.graph, value, np.float32, name)

    def zero(self, dtype: ir.DataType | None) -> ir.Value:
        """Return a constant 0 of that type."""
        assert dtype is not None
        return constant(self.graph, 0, dtype.numpy(), f"zero_{dtype.name.lower()}")

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return the value in that type."""
        return value if value.dtype == dtype else self.op("Cast", value, dtype=dtype, to=dtype)

    def columns(self, row: ir.Value, start: int, end: int | None = None) -> ir.Value:
        """Return columns of a matrix, to its last one unless `end` tells."""
        return self.op(
            "Slice",
            row,
            self.integers(start),
            self.integers(np.iinfo(np.int64).max if end is None else end),
            self.integers(1),
        )


def integers(graph: ir.Graph, *values: int) -> ir.Value:
    """Return a constant vector of int64 of a graph."""
    name = "integers_" + "_".join(str(value).replace("-", "m") for value in values)
    return constant(graph, values, np.int64, name)


def tensor(name: str, dtype: ir.DataType | None, shape: Sequence[int | str]) -> ir.Value:
    """Return a graph input of that name, type and shape."""
    return ir.Value(name=name, type=None if dtype is None else ir.TensorType(dtype), shape=ir.Shape(shape))


def input_of(graph: ir.Graph, name: str) -> ir.Value:
    """Return the graph's input of that name."""
    return next(value for value in graph.inputs if value.name == name)


def take_over(graph: ir.Graph, name: str, source: ir.Value) -> None:
    """Let the nodes that read the graph's input `name` read `source`, and drop the input.

    `source` takes its name, so that a composed graph tells what it gives the component that it wraps; where a cast
    stands before the component, the wider input keeps the name.
    """
    value = input_of(graph, name)
    value.replace_all_uses_with(source)
    graph.inputs.remove(value)
    producer = source.producer()
    if producer is not None and all(given is None or given.name != name for given in producer.inputs):
        source.name = name


def widened_input(model: ir.Model, name: str) -> ir.Value:
    """Return the graph's input of that name in float32: itself, or one in its place that is cast to its type."""
    given = input_of(model.graph, name)
    assert given.dtype is not None
    assert given.shape is not None
    if given.dtype == FLOAT:
        return given
    wide = tensor(name, FLOAT, [size if isinstance(size, int) else str(size) for size in given.shape])
    take_over(model.graph, name, Composer(model, before=True).cast(wide, given.dtype))
    return wide


def give_out(graph: ir.Graph, value: ir.Value, name: str, shape: Sequence[int | str] | ir.Shape | None) -> None:
    """Make the value an output of that name and shape."""
    value.name = name
    value.shape = ir.Shape(shape) if shape is not None else None
    graph.outputs.append(value)


def repeated_rows(add: Composer, value: ir.Value, copies: ir.Value) -> ir.Value:
    """Return a value (B,...) G times over, (G*B,...), with G an int64 (1,)."""
    sizes = add.op("Concat", copies, add.op("Shape", value, dtype=INT64), axis=0)
    expanded = add.op("Expand", value, sizes)
    flat = add.op("Concat", add.integers(-1), add.op("Shape", value, dtype=INT64, start=1), axis=0)
    return add.op("Reshape", expanded, flat)


def holds_graph(node: ir.Node) -> bool:
    """Tell whether a node has subgraphs, as If and Loop do."""
    return any(each.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for each in node.attributes.values())


def prune(graph: ir.Graph) -> None:
    """Remove the nodes that nothing reads."""
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)


def measured_axes(node: ir.Node, rank: int) -> tuple[int, int]:
    """Return the first axis whose size a Shape gives, and the one behind the last."""
    given = node.attributes.get_int("start", 0), node.attributes.get_int("end", rank)
    start, end = (min(max(axis + rank if axis < 0 else axis, 0), rank) for axis in given)
    return start, max(start, end)
