"""The form of a graph, for comparisons of graphs with other names of values."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

__all__ = ["form"]

_SMALL = 16  # values of a constant that are compared one by one

# The first counts for sizes of zero only: torch's view has it, and its reshape has not. The second is for 8 bits.
_WITHOUT_EFFECT = {"allowzero", "saturate"}


def form(model: ir.Model) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the nodes, the constants, and the inputs and outputs; names contain numbers of removed nodes."""
    numbers: dict[ir.Value | None, int] = {None: -1}
    for value in model.graph.inputs:
        numbers[value] = len(numbers)
    constants: list[Any] = []

    def number(value: ir.Value | None) -> Any:
        if value is not None and value.is_initializer() and value.const_value is not None:
            tensor = value.const_value
            constants.append(tensor.numpy().tolist() if tensor.size < _SMALL else value.name)
            return "constant"
        return numbers.setdefault(value, len(numbers))

    nodes = []
    for node in model.graph:
        inputs, outputs = [number(value) for value in node.inputs], [number(value) for value in node.outputs]
        nodes.append((node.op_type, inputs, outputs, _attributes(node)))
    ends = [(value.name, str(value.type), str(value.shape)) for value in (*model.graph.inputs, *model.graph.outputs)]
    return nodes, constants, ends


def _attributes(node: ir.Node) -> list[str]:
    """Return the attributes of a node, with an axis counted from the first."""
    found = []
    for key, attribute in node.attributes.items():
        value = attribute.value
        if key in _WITHOUT_EFFECT:
            continue
        if key == "axis" and node.inputs[0] is not None and node.inputs[0].shape is not None:
            value %= node.inputs[0].shape.rank()
        found.append(f"{key}={value}")
    return sorted(found)
