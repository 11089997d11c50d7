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


def shared_weights(models: Iterable[ir.Model]) -> dict[str, dict[str, Any]]:
    """Return the external initializers that two graphs or more have in common, as a header of safetensors has them.

    Args:
        models: the graphs of one component, which read one weight file.

    Returns:
        By name `dtype`, `shape` and `data_offsets`, [begin, end) in bytes of the weight file.
    """
    found: defaultdict[str, list[dict[str, Any] | None]] = defaultdict(list)
    for model in models:
        for graph in (model.graph, *model.graph.subgraphs()):
            for name, value in graph.initializers.items():
                found[name].append(_entry(value.const_value))
    # A session takes them by name alone: one that means two tensors is left out.
    return {
        name: entries[0]
        for name, entries in found.items()
        if len(entries) > 1 and entries[0] is not None and all(entry == entries[0] for entry in entries)
    }


def _entry(tensor: ir.TensorProtocol | None) -> dict[str, Any] | None:
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype not in _DTYPES or tensor.nbytes < _LEAST:
        return None
    begin = tensor.offset or 0
    shape = [int(size) for size in tensor.shape.numpy()]
    return {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, begin + tensor.nbytes]}
