"""Small edits of a graph: new nodes in place, new initializers, constants and their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.graph.modules import MODULE_KEY, module_path
from sdonnx.graph.tensors import lazy, read

__all__ = [
    "MICROSOFT",
    "Dim",
    "add_initializer",
    "constant",
    "constant_value",
    "derived_initializer",
    "dims",
    "insert",
    "insert_multi",
    "is_weight",
    "joined_initializer",
    "replace",
    "static_dim",
]

MICROSOFT = "com.microsoft"

Dim = int | ir.SymbolicDim


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
        anchor: the node before which the new one stands, and whose module it belongs to.
        op_type: the operator.
        inputs: its inputs; None for an absent one.
        attributes: its attributes, as Python values.
        domain: the operator's domain.
        shape: the output's shape. None: unknown.
        dtype: the output's type. None: that of the first input.
        module: the module it belongs to, if not the anchor's.
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
    """Let every user of `old`, graph outputs included, take `new`; graph outputs keep their names."""
    if old.is_graph_output():
        producer = old.producer()
        if producer is not None and (new.is_graph_output() or new.producer() is None):
            new = insert(producer, "Identity", [new], shape=old.shape)  # `new` has a name to keep, too
        name = old.name
        old.name = None
        new.name = name
        if old.shape is not None:
            new.shape = old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def dims(value: ir.Value) -> tuple[Dim, ...] | None:
    """Return the value's dimensions, None where its shape is unknown."""
    return None if value.shape is None else tuple(value.shape.dims)


def static_dim(value: ir.Value, axis: int) -> int | None:
    """Return the size of an axis, None where it is unknown or dynamic."""
    if value.shape is None or not -value.shape.rank() <= axis < value.shape.rank():
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def is_weight(value: ir.Value | None) -> bool:
    """Tell whether the value is a constant that no caller can replace."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def constant_value(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """Return the values of a constant, None where it is none."""
    if value is None or not is_weight(value):
        return None
    assert value.const_value is not None
    return read(value.const_value)


def add_initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Add an initializer, under `name` or, where that is taken, under `name` and a number."""
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
    """Return an initializer that holds `values`; equal ones of that name are shared."""
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
    """Return a new initializer made of several, in that order, when it is read.

    Never shared by name: two groups may begin with one weight, equal ones being one initializer.
    """
    tensors = [part.const_value for part in parts if part is not None and part.const_value is not None]
    values = lazy(lambda: join([read(tensor) for tensor in tensors]), tensors[0].dtype, tuple(shape))
    assert parts[0] is not None
    return add_initializer(graph, f"{parts[0].name}.and_{len(tensors) - 1}_more", values)


def derived_initializer(
    graph: ir.Graph,
    name: str,
    make: Callable[[], npt.NDArray[Any]],
    dtype: ir.DataType,
    shape: tuple[int, ...],
) -> ir.Value:
    """Return an initializer computed from others when it is read; one per name."""
    present = graph.initializers.get(name)
    if present is not None and present.dtype == dtype and present.shape == ir.Shape(shape):
        return present
    return add_initializer(graph, name, lazy(make, dtype, shape))
