"""Check the inputs and outputs of a component's graph, and convert them to the family's inputs and outputs.

Exporters agree on names, but not on types and shapes: token ids are int32 or int64; the timestep is a scalar, a vector
of one element or of one per image, in integers or floats; channels may be declared dynamic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.errors import FolderError
from sdonnx.graph.edit import constant, dtype_of, insert
from sdonnx.graph.shapes.expressions import dimension_of
from sdonnx.graph.shapes.inference import Sizes
from sdonnx.models.spec import ComponentSpec, TensorSpec

__all__ = ["adapt_interface", "require_interface", "require_open_sizes", "require_signature"]

# Sizes that each call chooses. A graph may fix the number of tokens, which the tokenizer defines.
_OPEN_SIZES = frozenset({"batch_size", "height", "width", "height_latent", "width_latent"})


def require_interface(path: Path, model: ir.Model, spec: ComponentSpec, config: Mapping[str, Any]) -> None:
    """Raise unless the graph has the component's inputs and outputs; additional outputs are allowed.

    Raises:
        FolderError: an input or output is missing, unknown or has another shape.
    """
    for kind in ("inputs", "outputs"):
        for tensor, value in require_signature(path, model, spec, kind, config):
            dims = tensor.resolve(config)
            if not _fits(value.shape, dims, tensor):
                raise FolderError(
                    f"{tensor.name} of {path} is {value.shape}",
                    f"[{','.join(map(str, dims))}], as the component's config.json says",
                    "use the graph and the config.json of one component",
                )
            if kind == "inputs":  # some exporters declare the outputs of their example
                _require_open(path, tensor, value.shape, dims)


def require_open_sizes(path: Path, model: ir.Model, spec: ComponentSpec, config: Mapping[str, Any]) -> None:
    """Raise if a fused graph has outputs of one size for inputs of any size: the exporter wrote its example's size.

    Raises:
        FolderError: an output has a fixed size that a call chooses.
    """
    sizes = Sizes(model.graph)
    outputs = {value.name: value for value in model.graph.outputs}
    for tensor in spec.outputs_in(config):
        # An output that is another one has the exporter's name.
        if (value := outputs.get(tensor.name)) is not None and (shape := sizes.shapes.get(value)) is not None:
            _require_open(path, tensor, ir.Shape(map(dimension_of, shape)), tensor.resolve(config))


def _require_open(path: Path, tensor: TensorSpec, shape: ir.Shape | None, dims: Sequence[str | int]) -> None:
    for axis, (size, dim) in enumerate(zip(shape or (), dims, strict=False)):
        if isinstance(size, int) and dim in _OPEN_SIZES:
            raise FolderError(
                f"axis {axis} of {tensor.name} of {path} always has the size {size}",
                f"any {dim} ([{','.join(map(str, dims))}])",
                "export the component with dynamic axes",
            )


def require_signature(
    path: Path, model: ir.Model, spec: ComponentSpec, kind: str, config: Mapping[str, Any] = MappingProxyType({})
) -> Sequence[tuple[TensorSpec, ir.Value]]:
    """Return the component's inputs or outputs with their values in the graph. Sizes are not compared.

    Args:
        path: the ONNX file.
        model: its graph.
        spec: the component.
        kind: "inputs" or "outputs".
        config: its configuration, which defines the length of a series of outputs; without it series are ignored.

    Raises:
        FolderError: an input or output is missing, unknown or has an unknown rank.
    """
    graph, given = model.graph, kind == "inputs"
    tensors, values = (spec.inputs, graph.inputs) if given else (spec.outputs_in(config), graph.outputs)
    found = {str(value.name): value for value in values if kind == "outputs" or value.uses()}
    wanted = {tensor.name for tensor in tensors}
    surplus = kind == "inputs" and found.keys() - wanted
    if surplus or wanted - found.keys():
        raise FolderError(
            f"the {kind} of {path} are {', '.join(found)}",
            ", ".join(tensor.name for tensor in tensors),
            f"pass the graph of a {spec.name}",
        )
    for tensor in tensors:
        shape = found[tensor.name].shape
        if shape is None or shape.rank() not in ({len(tensor.dims)} | ({0} if tensor.once else set())):
            raise FolderError(
                f"{tensor.name} of {path} is {'of unknown rank' if shape is None else shape}",
                f"{len(tensor.dims)} dimensions",
                f"pass the graph of a {spec.name}",
            )
    return [(tensor, found[tensor.name]) for tensor in tensors]


def _fits(shape: ir.Shape | None, dims: Sequence[str | int], tensor: TensorSpec) -> bool:
    if shape is None:
        return False
    if tensor.once and shape.rank() == 0:
        return True
    return all(
        not isinstance(size, int) or not isinstance(dim, int) or size == dim
        for size, dim in zip(shape, dims, strict=True)
    )


def adapt_interface(model: ir.Model, spec: ComponentSpec, config: Mapping[str, Any]) -> None:
    """Change the graph's inputs to the family's inputs: types, names of dynamic axes, and fixed sizes.

    A Cast, Squeeze or Expand converts an input to the type or rank that the graph expects. Unused inputs are removed.

    Args:
        model: the graph, which `require_interface` has accepted.
        spec: the component.
        config: its configuration.
    """
    graph = model.graph
    for value in [value for value in graph.inputs if not value.uses() and not value.is_graph_output()]:
        graph.inputs.remove(value)
    values = {value.name: value for value in graph.inputs}
    for tensor in spec.inputs:
        value, dims = values[tensor.name], tensor.resolve(config)
        dtype = _dtype(value, tensor)
        whole_batch = tensor.once and not (value.shape is not None and value.shape.dims == (1,))
        if dtype != value.dtype or whole_batch:
            value = _replaced(graph, value, tensor, dtype)
        value.type = ir.TensorType(dtype)
        value.shape = ir.Shape([1] if tensor.once else _named(value.shape, dims))
    # Callers may pass inputs by position, so the order is also the family's.
    order = {tensor.name: index for index, tensor in enumerate(spec.inputs)}
    ordered = sorted(graph.inputs, key=lambda value: order[str(value.name)])
    graph.inputs.clear()
    graph.inputs.extend(ordered)
    outputs = {tensor.name: tensor for tensor in spec.outputs_in(config)}
    for value in graph.outputs:
        if (given := outputs.get(str(value.name))) is not None:
            value.shape = ir.Shape(_named(value.shape, given.resolve(config)))


def _dtype(value: ir.Value, tensor: TensorSpec) -> ir.DataType:
    if tensor.integer:
        return ir.DataType.INT32
    return ir.DataType.FLOAT if tensor.keeps_float32 else dtype_of(value)


def _named(shape: ir.Shape | None, dims: Sequence[str | int]) -> list[int | str]:
    """Return the dimensions with the names of the family; a size that the graph fixes stays fixed."""
    own = list(shape.dims) if shape is not None else [None] * len(dims)
    return [size if isinstance(size, int) else dim for size, dim in zip(own, dims, strict=True)]


def _replaced(graph: ir.Graph, old: ir.Value, tensor: TensorSpec, dtype: ir.DataType) -> ir.Value:
    """Replace the input `old` by a new one, and the uses of `old` by a value computed from the new one."""
    new = ir.Value(name=old.name, type=ir.TensorType(dtype), shape=old.shape)
    index = list(graph.inputs).index(old)
    anchor = next(iter(graph))
    value = new
    if tensor.once:
        new.shape = ir.Shape([1])
        if old.shape is not None and old.shape.rank() == 0:
            value = insert(anchor, "Squeeze", [value], shape=[])
        elif old.shape is not None and not isinstance(old.shape[0], int):
            value = insert(anchor, "Expand", [value, _batch(graph, anchor)], shape=old.shape)
    if dtype != old.dtype:
        old_dtype = dtype_of(old)
        value = insert(anchor, "Cast", [value], {"to": old_dtype}, dtype=old_dtype, shape=value.shape)
    graph.inputs[index] = new
    old.name = f"{old.name}_before"
    new.name = tensor.name
    old.replace_all_uses_with(value)
    return new


def _batch(graph: ir.Graph, anchor: ir.Node) -> ir.Value:
    """Insert nodes that read the batch size from the first input, and return it."""
    first = graph.inputs[0]
    sizes = insert(anchor, "Shape", [first], dtype=ir.DataType.INT64)
    index = constant(graph, [0], np.int64, "sizes_0")
    return insert(anchor, "Gather", [sizes, index], {"axis": 0}, shape=[1], dtype=ir.DataType.INT64)
