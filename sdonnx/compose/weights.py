"""Which weights several of a component's graphs read, so that sessions of more than one of them hold those once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

__all__ = ["shared_weights"]

# As safetensors' headers name them.
_DTYPES = {ir.DataType.FLOAT16: "F16", ir.DataType.FLOAT: "F32"}

# Bytes. What is smaller is not worth an allocation of its own, and may be read on the host.
_LEAST = 1 << 16

_PRODUCTS = {"MatMul", "Gemm"}


def shared_weights(models: Iterable[ir.Model]) -> dict[str, dict[str, Any]]:
    """Return the external weights of products that two graphs or more have in common, as a header of safetensors does.

    A session takes them by name, in place of what it has made of its own. ONNX Runtime moves transpositions through
    element-wise operators into their constants, which keep their names; weights of products stay as they are.

    Args:
        models: the graphs of one component, which read one weight file.

    Returns:
        By name `dtype`, `shape` and `data_offsets`, [begin, end) in bytes of the weight file.
    """
    found: defaultdict[str, list[dict[str, Any] | None]] = defaultdict(list)
    for model in models:
        for name, value in model.graph.initializers.items():
            found[name].append(_entry(value) if _is_weight(value) else None)
        for graph in model.graph.subgraphs():
            for name in graph.initializers:
                found[name].append(None)
    return {
        name: entries[0]
        for name, entries in found.items()
        if len(entries) > 1 and entries[0] is not None and all(entry == entries[0] for entry in entries)
    }


def _is_weight(value: ir.Value) -> bool:
    """Tell whether products alone read it, as their second factor, at once or behind multiplications (gates)."""
    if value.is_graph_output():
        return False
    return all(
        use.idx == 1 if use.node.op_type in _PRODUCTS else use.node.op_type == "Mul" and _is_weight(use.node.outputs[0])
        for use in value.uses()
    )


def _entry(value: ir.Value) -> dict[str, Any] | None:
    tensor = value.const_value
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype not in _DTYPES or tensor.nbytes < _LEAST:
        return None
    begin = tensor.offset or 0
    shape = [int(size) for size in tensor.shape.numpy()]
    return {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, begin + tensor.nbytes]}
