"""Regions of a graph: sets of values that can be multiplied by one factor, since all their readers allow for it.

A region is bounded by operators that can change its factor without a change of the result:

- a linear operator with constant weights multiplies them by the quotient of the factors of its result and its input
- a group norm divides by the standard deviation of its input: GroupNorm(s x) with epsilon s^2 e equals GroupNorm(x)
  with epsilon e (Wu and He 2018)

Inside a region, operators add values, or move and copy them. A region that any other operator reads or computes is
fixed: its factor is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, constant_value, is_weight
from sdonnx.graph.modules import module_path

__all__ = ["Flow", "Region", "find_regions", "flow_of"]

_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE, None})


@dataclass(frozen=True)
class Flow:
    """How an operator treats the factor of its values.

    Attributes:
        inputs: the inputs that share a factor with each other and with `outputs`.
        outputs: the outputs of that factor.
        source: the input of a linear operator; its factor may differ. None for other operators.
        weight: the constant that it is multiplied by; None for other operators.
        is_norm: whether the operator is a group norm of `inputs`; its first output has the factor 1.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = (0,)
    source: int | None = None
    weight: int | None = None
    is_norm: bool = False


@dataclass
class Region:
    """Values that share a factor.

    Attributes:
        values: the values, without constants.
        norms: the group norms that read one of them.
        is_computed: whether another operator than a norm computes one of them, so that they have any range.
        fixed_by: why the factor is 1; None if it can be any.
    """

    values: list[ir.Value] = field(default_factory=list)
    norms: list[ir.Node] = field(default_factory=list)
    is_computed: bool = False
    fixed_by: str | None = None


def _first(node: ir.Node) -> Flow | None:
    return Flow((0,), tuple(range(len(node.outputs))))


def _all(node: ir.Node) -> Flow | None:
    return Flow(tuple(range(len(node.inputs))))


def _times(node: ir.Node) -> Flow | None:
    """Multiply or divide by a constant."""
    constants = [index for index, value in enumerate(node.inputs) if is_weight(value)]
    if len(constants) != 1 or (node.op_type == "Div" and constants != [1]):
        return None
    return Flow((1 - constants[0],))


def _pad(node: ir.Node) -> Flow | None:
    """Pad with zeros, or with values of the image."""
    filled = node.inputs[2] if len(node.inputs) > 2 else None
    values = constant_value(filled)
    return None if filled is not None and (values is None or values.any()) else Flow((0,))


def _linear(node: ir.Node) -> Flow | None:
    """Convolve, or multiply by a matrix; the third input is added to the result."""
    added = (2,) if len(node.inputs) > 2 and node.inputs[2] is not None else ()
    if is_weight(node.inputs[1]) and not is_weight(node.inputs[0]):
        return Flow(added, source=0, weight=1)
    if node.op_type in ("MatMul", "FusedMatMul", "Gemm") and is_weight(node.inputs[0]):
        return Flow(added, source=1, weight=0)
    return None


def _norm(node: ir.Node) -> Flow | None:
    return Flow((0,), (), is_norm=True)


def _skip_norm(node: ir.Node) -> Flow | None:
    present = (index for index in (0, 3, 4) if index < len(node.inputs) and node.inputs[index] is not None)
    return Flow(tuple(present), tuple(range(1, len(node.outputs))), is_norm=True)


_RULES: dict[tuple[str, str], Callable[[ir.Node], Flow | None]] = {
    **{("", name): _first for name in ("Cast", "Expand", "Flatten", "Identity", "Reshape", "Resize", "Slice", "Split",
                                       "Squeeze", "Transpose", "Unsqueeze")},
    **{("", name): _all for name in ("Add", "Concat", "Sub")},
    (MICROSOFT, "BiasAdd"): _all,
    **{("", name): _times for name in ("Div", "Mul")},
    ("", "Pad"): _pad,
    **{("", name): _linear for name in ("Conv", "Gemm", "MatMul")},
    **{(MICROSOFT, name): _linear for name in ("FusedMatMul", "NhwcConv")},
    **{("", name): _norm for name in ("GroupNormalization", "InstanceNormalization")},
    (MICROSOFT, "GroupNorm"): _norm,
    (MICROSOFT, "SkipGroupNorm"): _skip_norm,
}  # fmt: skip


def flow_of(node: ir.Node) -> Flow | None:
    """Return how a node treats the factor of its values; None if it accepts only the factor 1."""
    rule = _RULES.get((node.domain, node.op_type))
    flow = None if rule is None else rule(node)
    return flow if flow is not None and all(node.outputs[index].dtype in _FLOATS for index in flow.outputs) else None


def find_regions(graph: ir.Graph) -> dict[ir.Value, Region]:
    """Return the region of each floating-point value of a graph."""
    groups = _Groups()
    fixed: dict[ir.Value, str] = {}
    for value in (*graph.inputs, *graph.outputs):
        fixed[value] = f"{value.name} is an input or output"
    for node in graph:
        flow = flow_of(node)
        for value, reason in _fixed_values(node, flow):
            fixed.setdefault(value, reason)
        if flow is not None:
            groups.join([value for value in _shared(node, flow) if not is_weight(value)])
            if flow.source is not None:
                groups.join([value for value in (node.inputs[flow.source],) if value is not None])
    regions: dict[ir.Value, Region] = {}
    for value in groups.values():
        region = regions.setdefault(groups.root(value), Region())
        regions[value] = region
        region.values.append(value)
        region.fixed_by = region.fixed_by or fixed.get(value)
    for node in graph:
        flow = flow_of(node)
        if flow is not None and flow.is_norm and node.inputs[0] in regions:
            regions[node.inputs[0]].norms.append(node)
        for value in node.outputs if flow is None or flow.source is not None else ():
            if value in regions:
                regions[value].is_computed = True
    return {value: regions[value] for value in groups.values()}


class _Groups:
    """Disjoint sets of values (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[ir.Value, ir.Value] = {}

    def join(self, values: list[ir.Value]) -> None:
        for value in values:
            self._parents.setdefault(value, value)
            self._parents[self.root(value)] = self.root(values[0])

    def root(self, value: ir.Value) -> ir.Value:
        while (parent := self._parents[value]) is not value:
            self._parents[value] = self._parents[parent]
            value = parent
        return value

    def values(self) -> list[ir.Value]:
        return list(self._parents)


def _shared(node: ir.Node, flow: Flow) -> Iterator[ir.Value]:
    for index in flow.inputs:
        value = node.inputs[index]
        if value is not None:
            yield value
    for index in flow.outputs:
        yield node.outputs[index]


def _fixed_values(node: ir.Node, flow: Flow | None) -> Iterator[tuple[ir.Value, str]]:
    """Yield the values that a node accepts or computes only with the factor 1, each with the reason."""
    place = f"{node.op_type} {module_path(node) or node.name or ''}".rstrip()
    if flow is None:
        read = () if node.op_type in ("Shape", "Size") and not node.domain else node.inputs
        for value in read:
            if value is not None:
                yield value, f"{place} reads {value.name}"
        for value in node.outputs:
            yield value, f"{place} computes {value.name}"
    elif flow.is_norm:
        yield node.outputs[0], f"{place} computes {node.outputs[0].name}"
    for attribute in node.attributes.values():
        if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            graphs = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else attribute.as_graphs()
            for graph in graphs:
                for inner in ir.traversal.RecursiveGraphIterator(graph):
                    for value in inner.inputs:
                        if value is not None and value.graph is node.graph:
                            yield value, f"a subgraph of {place} reads {value.name}"
