"""Scaling of the values that group norms read, so that an autoencoder fits into the range of fp16.

The residual stream of published decoders exceeds 65504, the maximum of fp16
(docs/decisions/0143-scale-what-group-norms-read.md). Its readers are group norms, which divide by the standard
deviation, and convolutions. So the stream and the values inside its branches are multiplied by a power of two, within
the weights that compute them, and the result stays the same: powers of two are exact, except for weights that become
subnormal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.graph.edit import derived_initializer, input_of, is_weight, tensor_of
from sdonnx.graph.tensors import read
from sdonnx.precision.value_regions import Region, find_regions, flow_of

__all__ = ["NormScaling", "scalable_values", "scale_group_norms"]


@dataclass(frozen=True)
class NormScaling:
    """The result of scaling the inputs of group norms.

    Attributes:
        scale: the factor of the values; 1 if the graph was left unchanged.
        norms: the number of group norms that read scaled values.
        reason: why the graph was left unchanged, or None.
    """

    scale: float = 1.0
    norms: int = 0
    reason: str | None = None


def scalable_values(model: ir.Model) -> frozenset[str]:
    """Return the names of the values that `scale_group_norms` multiplies; none if it leaves the graph unchanged."""
    regions = find_regions(model.graph)
    if _refusal(regions) is not None:
        return frozenset()
    return frozenset(str(value.name) for value in _scaled(model.graph, regions))


def scale_group_norms(model: ir.Model, scale: float) -> NormScaling:
    """Scale the values that group norms read, in place.

    Values between scaled ones and linear operators are scaled as well, so that no value is larger than before.

    Args:
        model: a fused graph before its conversion to fp16.
        scale: a power of two.
    """
    graph = model.graph
    regions = find_regions(graph)
    if (reason := _refusal(regions)) is not None:
        return NormScaling(reason=reason)
    scaled = _scaled(graph, regions)
    norms = 0
    for node in list(graph):
        flow = flow_of(node)
        if flow is None:
            continue
        shared = [node.inputs[index] for index in flow.inputs] + [node.outputs[index] for index in flow.outputs]
        is_scaled = any(value in scaled for value in shared)
        if is_scaled:
            for index in flow.inputs:
                _multiply(graph, node, index, scale)
        if flow.is_norm and is_scaled:
            norms += 1
            epsilon = node.attributes.get_float("epsilon", 1e-5)
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon * scale**2)
        if flow.source is not None and flow.weight is not None:
            was_scaled = input_of(node, flow.source) in scaled
            if is_scaled != was_scaled:
                _multiply(graph, node, flow.weight, scale if is_scaled else 1 / scale)
    _drop_unread(graph)
    return NormScaling(scale, norms)


def _refusal(regions: Mapping[ir.Value, Region]) -> str | None:
    """Return why the values that group norms read cannot be scaled, None if they can."""
    read_by_norms = [region for region in regions.values() if region.norms and region.is_computed]
    if not read_by_norms:
        return "no group norm reads a value of any range"
    return next((region.fixed_by for region in read_by_norms if region.fixed_by is not None), None)


def _scaled(graph: ir.Graph, regions: Mapping[ir.Value, Region]) -> frozenset[ir.Value]:
    """Return the values to scale: those that norms read, and those that linear operators compute from them."""
    chosen = {
        id(region) for region in regions.values() if region.norms and region.is_computed and region.fixed_by is None
    }
    steps = list(_linear_steps(graph, regions))
    while True:
        reached = {id(result) for source, result in steps if id(source) in chosen and result.fixed_by is None}
        if reached <= chosen:
            break
        chosen |= reached
    return frozenset(value for value, region in regions.items() if id(region) in chosen)


def _linear_steps(graph: ir.Graph, regions: Mapping[ir.Value, Region]) -> Iterator[tuple[Region, Region]]:
    for node in graph:
        flow = flow_of(node)
        if flow is not None and flow.source is not None:
            yield regions[input_of(node, flow.source)], regions[node.outputs[0]]


def _multiply(graph: ir.Graph, node: ir.Node, index: int, scale: float) -> None:
    """Multiply a constant input of a node; other nodes keep the constant."""
    value = node.inputs[index]
    if value is None or not is_weight(value):
        return
    tensor = tensor_of(value)
    scaled = derived_initializer(
        graph,
        f"{value.name}.times_{scale:g}",
        lambda: read(tensor) * tensor.dtype.numpy().type(scale),
        tensor.dtype,
        tuple(tensor.shape.numpy()),
    )
    node.replace_input_with(index, scaled)


def _drop_unread(graph: ir.Graph) -> None:
    outputs = {value.name for value in graph.outputs}
    for name in [name for name, value in graph.initializers.items() if not value.uses() and name not in outputs]:
        graph.initializers.pop(name)
