"""The conditions graph: what is the same at every step, computed once for an image.

Keys and values of attention to the prompt, and embeddings of sizes, are the same at every step: small products, two for
each such attention. So are positions, biases that are repeated for each image, and tables with a row for every call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from sdonnx.compose.composer import give_out, holds_graph, measured_axes, prune, tensor
from sdonnx.graph.edit import dims

__all__ = ["PREFIX", "split_conditions"]

PREFIX = "told."
"""How the names of what the step graph takes from the conditions graph begin."""

_LATENTS, _PARAMETERS = "noise", "parameters"
"""The inputs of the step graph whose sizes are the latents', and which holds what differs from call to call."""

# What is worth a buffer, a count of tokens among it, which is small: lighter nodes above these are computed at each
# step as before.
_HEAVY = frozenset({"Attention", "Conv", "CumSum", "FusedMatMul", "Gemm", "LayerNormalization", "MatMul",
                    "MultiHeadAttention", "NhwcConv", "ReduceSum"})  # fmt: skip


def split_conditions(step: ir.Model, told: Collection[str]) -> ir.Model | None:
    """Take what depends on nothing but the inputs `told` out of a step graph, in place, and return a graph of it.

    That graph takes all of `told`, whether it reads them or not, and what it reads of `parameters` (calls, P), the same
    table at every step, and of the sizes of `noise` (B,C,H,W). It gives out `told.NAME` for each value NAME that the
    step graph then takes in place of computing it. A value of the prompt stays where its sizes are not numbers or names
    of the inputs' sizes.

    Args:
        step: a composed step graph. What it measures may be measured of its inputs thereafter.
        told: names of its inputs that are the same for all steps of an image.

    Returns:
        The graph; None where nothing that is worth a buffer depends on those inputs alone.
    """
    graph = step.graph
    given = [value for value in graph.inputs if value.name in told]
    latents = next((value for value in graph.inputs if value.name == _LATENTS), None)
    _measure_inputs(graph, given if latents is None else [latents, *given])
    same = [*given, *(value for value in graph.inputs if value.name == _PARAMETERS)]
    names = {str(size) for value in same for size in dims(value) or () if not isinstance(size, int)}
    boundary = _boundary(graph, same, latents, names)
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


def _measure_inputs(graph: ir.Graph, given: Sequence[ir.Value]) -> None:
    """Let a Shape whose sizes are, by name or number, neighbouring ones of an input read them there."""
    for node in graph:
        if node.op_type != "Shape" or (measured := node.inputs[0]) is None or measured in given:
            continue
        shape = dims(measured) or ()
        start, end = measured_axes(node, len(shape))
        told = [str(size) for size in shape[start:end]]
        for value in given:
            sizes = [str(size) for size in dims(value) or ()]
            axes = [axis for axis in range(len(sizes) - len(told) + 1) if told == sizes[axis : axis + len(told)]]
            if told and axes:
                node.replace_input_with(0, value)
                node.attributes["start"] = ir.AttrInt64("start", axes[0])
                node.attributes["end"] = ir.AttrInt64("end", axes[0] + len(told))
                break


def _boundary(
    graph: ir.Graph, given: Collection[ir.Value], latents: ir.Value | None, names: Collection[str]
) -> list[ir.Value]:
    """Return the values that the rest of the graph reads, of what is worth a buffer and the same at each step."""
    stays: set[ir.Node] = set()
    while True:
        found, of_sizes = _read_outside(graph, given, latents, stays)
        without = {value for value in found if value not in of_sizes and not _is_sized(value, names)}
        if not without:
            return found
        stays.update(node for value in without if (node := value.producer()) is not None)


def _read_outside(
    graph: ir.Graph, given: Collection[ir.Value], latents: ir.Value | None, stays: Collection[ir.Node]
) -> tuple[list[ir.Value], set[ir.Value]]:
    """Return the values for a buffer, and which values of the graph are computed of sizes alone."""
    known, heavy, of_sizes, fixed = set(given), set[ir.Value](), set[ir.Value](), set[ir.Value]()
    for node in graph:
        read = [value for value in node.inputs if value is not None and not _is_constant(value) and value not in fixed]
        if node.inputs and not read and not holds_graph(node):
            fixed.update(node.outputs)
        measures = node.op_type in ("Shape", "Size")
        of_latents = measures and node.inputs[0] is latents
        if not read or not (of_latents or known.issuperset(read)) or node in stays or holds_graph(node):
            continue
        known.update(node.outputs)
        if measures or of_sizes.issuperset(read):
            # Integers, and what has one axis or none, stay on the host, where a step needs them.
            of_sizes.update(node.outputs)
            heavy.update(output for output in node.outputs if _is_computed(output))
        elif node.op_type in _HEAVY or not heavy.isdisjoint(read):
            heavy.update(node.outputs)
    found = [
        output
        for node in graph
        for output in node.outputs
        if output in heavy and any(use.node.outputs[0] not in known for use in output.uses())
    ]
    return found, of_sizes


def _is_computed(value: ir.Value) -> bool:
    """Tell whether the device computes a value that is made of sizes."""
    return value.dtype is not None and value.dtype.is_floating_point() and len(dims(value) or ()) > 1


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
    others = (_LATENTS, _PARAMETERS)
    inputs = [value for value in graph.inputs if value.name in told or (value.name in others and value.uses())]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.name = "conditions"
