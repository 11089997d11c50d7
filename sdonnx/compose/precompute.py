"""The precompute graph: the step-invariant part of the denoiser, computed once for an image.

Keys and values of attention to the prompt, and embeddings of sizes, are the same at every step: small matmuls, two for
each such attention. So are positions, biases that are repeated for each image, and tables with a row for every call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from sdonnx.compose.graph_builder import add_output, has_subgraph, measured_axes, new_input, remove_unused_nodes
from sdonnx.graph.edit import dims
from sdonnx.models import abi
from sdonnx.operators.operator_table import CONTRACTS

__all__ = ["hoist_step_invariants"]

# Values of these operators, and a count of tokens, which is small, are worth a buffer. Lighter nodes are
# computed at each step, unless an input is worth a buffer.
_HEAVY = frozenset({"Attention", "Conv", "CumSum", "Gemm", "LayerNormalization", "MatMul", "ReduceSum"}) | {
    op_type for op_type, contract in CONTRACTS.items() if contract.expensive
}


def hoist_step_invariants(step: ir.Model, conditioning: Collection[str]) -> ir.Model | None:
    """Move the values that depend only on the inputs `conditioning` out of a step graph, in place.

    Return the precompute graph, which computes them. Its inputs are all of `conditioning`, whether it reads them or
    not, and where it reads them `parameters` (calls, P), the same table at every step, and `noise` (B,C,H,W), for its
    size only. Its output `precomputed.NAME` is the step graph's value NAME, which the step graph then has as an input.
    A value of the prompt is not moved if its sizes are neither numbers nor names of the inputs' sizes.

    Args:
        step: a composed step graph. Its Shape nodes may read other values of the same size afterwards.
        conditioning: names of its inputs that are the same for all steps of an image.

    Returns:
        The precompute graph; None where no value that is worth a buffer depends only on those inputs.
    """
    graph = step.graph
    invariant = [value for value in graph.inputs if value.name in conditioning]
    latents = next((value for value in graph.inputs if value.name == abi.NOISE), None)
    _measure_inputs(graph, invariant if latents is None else [latents, *invariant])
    known = [*invariant, *(value for value in graph.inputs if value.name == abi.PARAMETERS)]
    names = {str(size) for value in known for size in dims(value) or () if not isinstance(size, int)}
    boundary = _boundary(graph, known, latents, names)
    if not boundary:
        return None
    precompute = step.clone()
    _keep_outputs(precompute.graph, [str(value.name) for value in boundary], conditioning)
    for value in boundary:
        shape = [size if isinstance(size, int) else str(size) for size in dims(value) or ()]
        hoisted = new_input(f"{abi.PRECOMPUTED}{value.name}", value.dtype, shape)
        value.replace_all_uses_with(hoisted)
        graph.inputs.append(hoisted)
    remove_unused_nodes(graph)
    for value in invariant:
        if not value.uses():
            graph.inputs.remove(value)
    return precompute


def _measure_inputs(graph: ir.Graph, inputs: Sequence[ir.Value]) -> None:
    """Let a Shape read its sizes from an input with the same neighbouring sizes, by name or number."""
    for node in graph:
        if node.op_type != "Shape" or (measured := node.inputs[0]) is None or measured in inputs:
            continue
        shape = dims(measured) or ()
        start, end = measured_axes(node, len(shape))
        wanted = [str(size) for size in shape[start:end]]
        for value in inputs:
            sizes = [str(size) for size in dims(value) or ()]
            axes = [axis for axis in range(len(sizes) - len(wanted) + 1) if wanted == sizes[axis : axis + len(wanted)]]
            if wanted and axes:
                node.replace_input_with(0, value)
                node.attributes["start"] = ir.AttrInt64("start", axes[0])
                node.attributes["end"] = ir.AttrInt64("end", axes[0] + len(wanted))
                break


def _boundary(
    graph: ir.Graph, known: Collection[ir.Value], latents: ir.Value | None, names: Collection[str]
) -> list[ir.Value]:
    """Return the step-invariant values to move to buffers, which the rest of the graph reads."""
    kept_nodes: set[ir.Node] = set()
    while True:
        found, of_sizes = _read_outside(graph, known, latents, kept_nodes)
        unsized = {value for value in found if value not in of_sizes and not _has_known_size(value, names)}
        if not unsized:
            return found
        kept_nodes.update(node for value in unsized if (node := value.producer()) is not None)


def _read_outside(
    graph: ir.Graph, inputs: Collection[ir.Value], latents: ir.Value | None, kept_nodes: Collection[ir.Node]
) -> tuple[list[ir.Value], set[ir.Value]]:
    """Return the values to move to buffers, and the values of the graph that are computed only from sizes.

    Args:
        graph: the step graph.
        inputs: its step-invariant inputs.
        latents: the input that has the latents' size.
        kept_nodes: nodes that stay in the step graph.
    """
    known, heavy, of_sizes, fixed = set(inputs), set[ir.Value](), set[ir.Value](), set[ir.Value]()
    for node in graph:
        read = [value for value in node.inputs if value is not None and not _is_constant(value) and value not in fixed]
        if node.inputs and not read and not has_subgraph(node):
            fixed.update(node.outputs)
        measures = node.op_type in ("Shape", "Size")
        of_latents = measures and node.inputs[0] is latents
        if not read or not (of_latents or known.issuperset(read)) or node in kept_nodes or has_subgraph(node):
            continue
        known.update(node.outputs)
        if measures or of_sizes.issuperset(read):
            # Integers, and values with one axis or none, stay on the host, where a step needs them.
            of_sizes.update(node.outputs)
            heavy.update(output for output in node.outputs if _is_on_device(output))
        elif node.op_type in _HEAVY or not heavy.isdisjoint(read):
            heavy.update(node.outputs)
    found = [
        output
        for node in graph
        for output in node.outputs
        if output in heavy and any(use.node.outputs[0] not in known for use in output.uses())
    ]
    return found, of_sizes


def _is_on_device(value: ir.Value) -> bool:
    """Return whether the device computes a value that depends only on sizes."""
    return value.dtype is not None and value.dtype.is_floating_point() and len(dims(value) or ()) > 1


def _is_constant(value: ir.Value) -> bool:
    node = value.producer()
    return (value.is_initializer() and not value.is_graph_input()) or (node is not None and node.op_type == "Constant")


def _has_known_size(value: ir.Value, names: Collection[str]) -> bool:
    """Return whether a buffer can be allocated for a value."""
    sizes = dims(value)
    named = sizes is not None and all(isinstance(size, int) or str(size) in names for size in sizes)
    return value.dtype is not None and named


def _keep_outputs(graph: ir.Graph, names: Collection[str], conditioning: Collection[str]) -> None:
    """Reduce a copy of the step graph to the precompute graph with the values `names` as outputs."""
    values = {value.name: value for node in graph for value in node.outputs if value.name in names}
    graph.outputs.clear()
    for name in names:
        value = values[name]
        add_output(graph, value, f"{abi.PRECOMPUTED}{name}", value.shape)
    remove_unused_nodes(graph)
    others = (abi.NOISE, abi.PARAMETERS)
    inputs = [value for value in graph.inputs if value.name in conditioning or (value.name in others and value.uses())]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.name = abi.PRECOMPUTE.name
