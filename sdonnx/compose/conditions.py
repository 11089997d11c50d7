"""The conditions graph: what a denoiser computes of its prompt alone, once for an image and not at every step.

Keys and values of attention to the prompt, and embeddings of sizes, are the same at every step: small products, two for
each such attention.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from sdonnx.compose.composer import give_out, holds_graph, prune, tensor
from sdonnx.graph.edit import dims

__all__ = ["PREFIX", "split_conditions"]

PREFIX = "told."
"""How the names of what the step graph takes from the conditions graph begin."""

# What is worth a buffer, a count of tokens among it, which is small: lighter nodes above these are computed at each
# step as before.
_HEAVY = frozenset({"Attention", "Conv", "CumSum", "FusedMatMul", "Gemm", "LayerNormalization", "MatMul",
                    "MultiHeadAttention", "NhwcConv", "ReduceSum"})  # fmt: skip


def split_conditions(step: ir.Model, told: Collection[str]) -> ir.Model | None:
    """Take what depends on nothing but the inputs `told` out of a step graph, in place, and return a graph of it.

    That graph takes all of `told`, whether it reads them or not. It gives out `told.NAME` for each value NAME that the
    step graph then takes in place of computing it. A value whose sizes are not numbers or names of the inputs' sizes
    stays.

    Args:
        step: a composed step graph.
        told: names of its inputs that are the same for all steps of an image.

    Returns:
        The graph; None where nothing that is worth a buffer depends on those inputs alone.
    """
    graph = step.graph
    given = [value for value in graph.inputs if value.name in told]
    names = {str(size) for value in given for size in dims(value) or () if not isinstance(size, int)}
    boundary = _boundary(graph, given, names)
    if not boundary:
        return None
    conditions = step.clone()
    _keep_outputs(conditions.graph, [str(value.name) for value in boundary], told)
    for value in boundary:
        shape = [size if isinstance(size, int) else str(size) for size in dims(value) or ()]
        taken = tensor(f"{PREFIX}{value.name}", value.dtype, shape)
        value.replace_all_uses_with(taken)
        graph.inputs.append(taken)
    prune(graph)
    for value in given:
        if not value.uses():
            graph.inputs.remove(value)
    return conditions


def _boundary(graph: ir.Graph, given: Collection[ir.Value], names: Collection[str]) -> list[ir.Value]:
    """Return the values that the rest of the graph reads, of what depends on the given inputs alone and is heavy."""
    stays: set[ir.Node] = set()
    while True:
        found = _read_outside(graph, given, stays)
        without = [node for value in found if not _is_sized(value, names) and (node := value.producer()) is not None]
        if not without:
            return found
        stays.update(without)


def _read_outside(graph: ir.Graph, given: Collection[ir.Value], stays: Collection[ir.Node]) -> list[ir.Value]:
    known, heavy, of_sizes = set(given), set[ir.Value](), set[ir.Value]()
    for node in graph:
        read = [value for value in node.inputs if value is not None and not _is_constant(value)]
        if not read or any(value not in known for value in read) or node in stays or holds_graph(node):
            continue
        known.update(node.outputs)
        if node.op_type in ("Shape", "Size") or all(value in of_sizes for value in read):
            of_sizes.update(node.outputs)  # on the host, where a step needs it
        elif node.op_type in _HEAVY or any(value in heavy for value in read):
            heavy.update(node.outputs)
    return [
        output
        for node in graph
        for output in node.outputs
        if output in heavy and any(use.node.outputs[0] not in known for use in output.uses())
    ]


def _is_constant(value: ir.Value) -> bool:
    node = value.producer()
    return (value.is_initializer() and not value.is_graph_input()) or (node is not None and node.op_type == "Constant")


def _is_sized(value: ir.Value, names: Collection[str]) -> bool:
    """Tell whether a buffer can be made for a value."""
    sizes = dims(value)
    named = sizes is not None and all(isinstance(size, int) or str(size) in names for size in sizes)
    return value.dtype is not None and named


def _keep_outputs(graph: ir.Graph, names: Collection[str], told: Collection[str]) -> None:
    """Let a copy of the step graph give out these values and take nothing but what is told."""
    values = {value.name: value for node in graph for value in node.outputs if value.name in names}
    graph.outputs.clear()
    for name in names:
        value = values[name]
        give_out(graph, value, f"{PREFIX}{name}", value.shape)
    prune(graph)
    inputs = [value for value in graph.inputs if value.name in told]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.name = "conditions"
