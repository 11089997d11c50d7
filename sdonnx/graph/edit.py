"""Small edits of a graph: insert nodes, add initializers, read constants and what a rule has already checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.graph.modules import MODULE_KEY, module_path
from sdonnx.graph.tensors import Origin, arranged_origin, lazy, read

__all__ = [
    "MAX_SPLIT_OUTPUTS",
    "MICROSOFT",
    "Dim",
    "add_initializer",
    "constant",
    "constant_value",
    "derived_initializer",
    "dims",
    "dtype_of",
    "graph_of",
    "input_of",
    "insert",
    "insert_multi",
    "is_weight",
    "joined_initializer",
    "known_dims",
    "known_size",
    "optional_input",
    "producer_node",
    "replace",
    "required",
    "static_dim",
    "tensor_of",
]

MICROSOFT = "com.microsoft"

MAX_SPLIT_OUTPUTS = 32
"""ONNX Runtime's Split passes the addresses of up to 32 outputs as arguments of its kernel.

For more outputs it copies the addresses from a host buffer while it runs (CudaAsyncBuffer in its split.cc). The buffer
belongs to someone else by the time a captured graph is replayed.
"""

Dim = int | ir.SymbolicDim

T = TypeVar("T")


def insert(
    anchor: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    domain: str = "",
    shape: Sequence[Dim | str] | ir.Shape | None = None,
    dtype: ir.DataType | None = None,
    module: str | None = None,
) -> ir.Value:
    """Insert a node with one output before `anchor` and return the output.

    Args:
        anchor: the node before which to insert the new node; the new node belongs to the same module.
        op_type: the operator.
        inputs: its inputs; None for an absent one.
        attributes: its attributes, as Python values.
        domain: the operator's domain.
        shape: the output's shape. None: unknown.
        dtype: the output's type. None: the first input's type.
        module: the module it belongs to. None: the anchor's.
    """
    return insert_multi(
        anchor, op_type, inputs, attributes, 1, domain=domain, shapes=[shape], dtype=dtype, module=module
    )[0]


def insert_multi(
    anchor: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None,
    outputs: int,
    *,
    domain: str = "",
    shapes: Sequence[Sequence[Dim | str] | ir.Shape | None] = (),
    dtype: ir.DataType | None = None,
    module: str | None = None,
) -> Sequence[ir.Value]:
    """Insert a node with several outputs before `anchor`; see `insert`."""
    node = ir.node(op_type, list(inputs), dict(attributes or {}), domain=domain, num_outputs=outputs)
    path = module_path(anchor) if module is None else module
    if path:
        node.metadata_props[MODULE_KEY] = path
    if dtype is None:
        dtype = next((value.dtype for value in inputs if value is not None), None)
    for index, output in enumerate(node.outputs):
        if dtype is not None:
            output.type = ir.TensorType(dtype)
        if index < len(shapes) and (shape := shapes[index]) is not None:
            output.shape = ir.Shape(tuple(shape))
    anchor.prepend(node)
    return node.outputs


def replace(old: ir.Value, new: ir.Value) -> None:
    """Replace every use of `old`, graph outputs included, by `new`; graph outputs keep their names."""
    if old.is_graph_output():
        producer = old.producer()
        if producer is not None and (new.is_graph_output() or new.producer() is None):
            new = insert(producer, "Identity", [new], shape=old.shape)  # `new` must also keep its name
        name = old.name
        old.name = None
        new.name = name
        if old.shape is not None:
            new.shape = old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def dims(value: ir.Value) -> tuple[Dim, ...] | None:
    """Return the dimensions of a value, None where its shape is unknown."""
    return None if value.shape is None else tuple(value.shape.dims)


def static_dim(value: ir.Value, axis: int) -> int | None:
    """Return the size of an axis, None where it is unknown or dynamic."""
    if value.shape is None or not -value.shape.rank() <= axis < value.shape.rank():
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def required(value: T | None, name: str = "value") -> T:
    """Return a value that a check has already found to be present.

    The typed accessors below do the same for the parts of a graph that onnx_ir declares optional.

    Args:
        value: the value.
        name: its name in the error message.

    Raises:
        ValueError: it is None, which is an error of the program.
    """
    if value is None:
        raise ValueError(f"the {name} is missing; a rule must check for it before it rewrites the graph")
    return value


def input_of(node: ir.Node, index: int) -> ir.Value:
    """Return an input of a node; raise ValueError where the node has none at that index."""
    value = node.inputs[index] if -len(node.inputs) <= index < len(node.inputs) else None
    return required(value, f"input {index} of {node.op_type} {node.name!r}")


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input of a node, None where it is absent."""
    return node.inputs[index] if index < len(node.inputs) else None


def graph_of(node: ir.Node) -> ir.Graph:
    """Return the graph that a node is in; raise TypeError where it is in a function."""
    graph = node.graph
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"{node.op_type} {node.name!r} is in {type(graph).__name__}, not in a graph")
    return graph


def producer_node(value: ir.Value) -> ir.Node:
    """Return the node that computes a value; raise ValueError for graph inputs and initializers."""
    return required(value.producer(), f"node that computes {value.name!r}")


def dtype_of(value: ir.Value) -> ir.DataType:
    """Return the element type of a value; raise ValueError where it is unknown."""
    return required(value.dtype, f"element type of {value.name!r}")


def known_dims(value: ir.Value) -> tuple[Dim, ...]:
    """Return the dimensions of a value; raise ValueError where its shape is unknown."""
    return required(dims(value), f"shape of {value.name!r}")


def known_size(value: ir.Value, axis: int) -> int:
    """Return the size of an axis; raise ValueError where it is unknown or dynamic."""
    return required(static_dim(value, axis), f"static size of axis {axis} of {value.name!r}")


def tensor_of(value: ir.Value) -> ir.TensorProtocol:
    """Return the tensor of a constant; raise ValueError where the value is not constant."""
    return required(value.const_value, f"constant tensor of {value.name!r}")


def is_weight(value: ir.Value | None) -> bool:
    """Return whether the value is a constant that no caller can override."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def constant_value(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """Return the elements of a constant, None for other values."""
    if value is None or not is_weight(value):
        return None
    return read(tensor_of(value))


def add_initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Add an initializer named `name`, with a number appended where that name is taken."""
    taken = graph.initializers
    unique, count = name, 1
    while unique in taken:
        unique, count = f"{name}_{count}", count + 1
    value = ir.Value(name=unique, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype))
    tensor.name = unique
    value.const_value = tensor
    graph.register_initializer(value)
    return value


def constant(graph: ir.Graph, values: npt.ArrayLike, dtype: npt.DTypeLike, name: str) -> ir.Value:
    """Return an initializer that holds `values`; equal initializers of one name are shared."""
    array = np.asarray(values, dtype)
    present = graph.initializers.get(name)
    if present is not None and isinstance(present.const_value, ir.Tensor):
        held = present.const_value.numpy()
        if held.dtype == array.dtype and np.array_equal(held, array):
            return present
    return add_initializer(graph, name, ir.Tensor(array))


def joined_initializer(
    graph: ir.Graph,
    parts: Sequence[ir.Value | None],
    join: Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]],
    shape: Sequence[int],
) -> ir.Value:
    """Return a new initializer that joins several, in that order, when it is read.

    It is never shared by name: two groups may begin with the same weight.

    Args:
        graph: the graph.
        parts: the initializers; None is left out.
        join: arranges their values, without computing with them.
        shape: the shape of the result.
    """
    tensors = [part.const_value for part in parts if part is not None and part.const_value is not None]
    values = lazy(
        lambda: join([read(tensor) for tensor in tensors]),
        tensors[0].dtype,
        tuple(shape),
        origin=arranged_origin(tensors, join),
    )
    first = required(parts[0], "first part")
    return add_initializer(graph, f"{first.name}.and_{len(tensors) - 1}_more", values)


def derived_initializer(
    graph: ir.Graph,
    name: str,
    make: Callable[[], npt.NDArray[Any]],
    dtype: ir.DataType,
    shape: tuple[int, ...],
    origin: Origin | None = None,
) -> ir.Value:
    """Return an initializer that is computed when it is read; one per name, type and shape."""
    present = graph.initializers.get(name)
    if present is not None and present.dtype == dtype and present.shape == ir.Shape(shape):
        return present
    return add_initializer(graph, name, lazy(make, dtype, shape, origin=origin))


def arranged_initializer(
    graph: ir.Graph,
    name: str,
    tensor: ir.TensorProtocol,
    arrange: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    shape: tuple[int, ...],
) -> ir.Value:
    """Return an initializer with the values of a tensor in another order, which is arranged when it is read.

    Args:
        graph: the graph.
        name: the name of the initializer; see `derived_initializer`.
        tensor: the tensor.
        arrange: arranges its values, without computing with them.
        shape: the shape of the result.
    """
    origin = arranged_origin([tensor], lambda values: arrange(values[0]))
    return derived_initializer(graph, name, lambda: arrange(read(tensor)), tensor.dtype, shape, origin)
