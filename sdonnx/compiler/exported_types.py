"""Changes of an exported graph of any module: its types for devices without kernels for them, and its fixed sizes."""

from __future__ import annotations

import functools
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.graph.tensors import lazy

__all__ = ["numbered", "widen"]


def _float32(tensor: ir.TensorProtocol) -> npt.NDArray[np.float32]:
    return tensor.numpy().astype(np.float32)


def widen(model: ir.Model, types: Collection[ir.DataType]) -> None:
    """Compute values of some floating-point types in float32, in place."""
    wide = ir.DataType.FLOAT
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in (*graph.inputs, *graph.initializers.values()):
            _widen_value(value, types)
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.dtype in types:
                value.const_value = lazy(functools.partial(_float32, tensor), wide, tuple(tensor.shape.numpy()), name)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            _widen_value(value, types)
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.INT and name in ("to", "dtype") and attribute.value in types:
                node.attributes[name] = ir.AttrInt64(name, wide)
            elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in types:
                node.attributes[name] = ir.AttrTensor(name, ir.Tensor(attribute.value.numpy().astype(np.float32)))


def _widen_value(value: ir.Value, types: Collection[ir.DataType]) -> None:
    if value.dtype in types:
        value.dtype = ir.DataType.FLOAT


def numbered(shape: ir.Shape) -> ir.Shape:
    """Return a shape with numbers instead of names that are numbers; the exporter writes some fixed sizes so."""
    return ir.Shape(
        int(size.value) if isinstance(size, ir.SymbolicDim) and size.value and size.value.isdecimal() else size
        for size in shape
    )
