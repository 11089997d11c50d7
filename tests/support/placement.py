"""Find the nodes that ONNX Runtime's CUDA provider places on the host, and the values that it copies to the device.

The rule is taken from `GetCpuPreferredNodes` (onnxruntime/core/framework/fallback_cpu_capability.cc): kernels return
sizes on the host, and a node follows if each of its inputs is there, is a constant of few elements or is an input of
the graph. It does not follow if it reads fp16, or if its kernel reads that input on the host anyway.
"""

from __future__ import annotations

import onnx_ir as ir

_MAX_ELEMENTS = 100  # of a constant that follows a node to the host (kSmallInitializerThreshold)

# Inputs that CUDA kernels read on the host: the first index and the end.
_READ_ON_HOST = {
    "ConstantOfShape": range(1),
    "CumSum": range(1, 2),
    "Expand": range(1, 2),
    "Range": range(3),
    "ReduceMax": range(1, 2),
    "ReduceMean": range(1, 2),
    "ReduceSum": range(1, 2),
    "Reshape": range(1, 2),
    "Resize": range(1, 4),
    "Slice": range(1, 5),
    "Split": range(1, 2),
    "Squeeze": range(1, 2),
    "Tile": range(1, 2),
    "Unsqueeze": range(1, 2),
}


_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def copied_from_host(model: ir.Model) -> list[str]:
    """Return the values that are computed on the host and read on the device: CUDA graphs cannot capture them."""
    on_host: set[ir.Value] = set()
    copied = []
    for node in model.graph:
        if node.op_type in ("Shape", "Size") or _follows(node, on_host):
            on_host |= set(node.outputs)
        else:
            there = _READ_ON_HOST.get(node.op_type, range(0))
            copied += [
                f"{node.op_type} reads {value.name}"
                for index, value in enumerate(node.inputs)
                if value in on_host and index not in there
            ]
    return copied


def _follows(node: ir.Node, on_host: set[ir.Value]) -> bool:
    if not any(value in on_host for value in node.inputs):
        return False
    there = _READ_ON_HOST.get(node.op_type, range(0))
    for index, value in enumerate(node.inputs):
        if value is None:
            continue
        if value.dtype in _NARROW or (value in on_host and index in there):
            return False
        is_small = value.const_value is not None and value.const_value.size <= _MAX_ELEMENTS
        if not (is_small or value.is_graph_input() or value in on_host):
            return False
    return True
