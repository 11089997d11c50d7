"""Find weights that several of a component's graphs read, so that their sessions can share one copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

__all__ = ["shared_weights"]

# Names of types in safetensors' headers.
# numpy has no type for 8-bit floating-point numbers.
_DTYPES = {ir.DataType.FLOAT16: "F16", ir.DataType.FLOAT: "F32", ir.DataType.INT8: "I8"}

# Smaller weights are not worth an allocation of their own, and the host may read them.
_MIN_BYTES = 1 << 16

# Also convolutions with channels last: no optimizer of ONNX Runtime changes their weights.
_PRODUCTS = {"MatMul", "Gemm", "NhwcConv"}
# Operators between a stored weight and a product: a gate, and the restoring of a weight in 8 bits.
_BEFORE = {"Mul", "DequantizeLinear"}


def shared_weights(models: Iterable[ir.Model]) -> dict[str, dict[str, Any]]:
    """Return the external weights of products and convolutions that two or more graphs share.

    A session accepts shared weights by name, instead of its own copies. ONNX Runtime moves transpositions through
    element-wise operators into their constants, which keep their names; weights of products stay unchanged.

    Args:
        models: the graphs of one component, which read one weight file.

    Returns:
        As a safetensors header, by name `dtype`, `shape` and `data_offsets`, [begin, end) in bytes of the weight file.
    """
    found: defaultdict[str, list[dict[str, Any] | None]] = defaultdict(list)
    for model in models:
        for name, value in model.graph.initializers.items():
            found[name].append(_entry(value) if _is_weight_of_products(value) else None)
        for graph in model.graph.subgraphs():
            for name in graph.initializers:
                found[name].append(None)
    return {
        name: entries[0]
        for name, entries in found.items()
        if len(entries) > 1 and entries[0] is not None and all(entry == entries[0] for entry in entries)
    }


def _is_weight_of_products(value: ir.Value) -> bool:
    """Return whether every user is a product that reads it as its second factor, directly or behind `_BEFORE`."""
    if value.is_graph_output():
        return False
    return all(
        use.idx == 1
        if use.node.op_type in _PRODUCTS
        else use.node.op_type in _BEFORE and _is_weight_of_products(use.node.outputs[0])
        for use in value.uses()
    )


def _entry(value: ir.Value) -> dict[str, Any] | None:
    tensor = value.const_value
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype not in _DTYPES or tensor.nbytes < _MIN_BYTES:
        return None
    begin = tensor.offset or 0
    shape = [int(size) for size in tensor.shape.numpy()]
    return {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, begin + tensor.nbytes]}
