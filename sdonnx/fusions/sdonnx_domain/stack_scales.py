"""Compute the scales of gated matmuls together.

Transformers with adaptive norms multiply the result of a matmul by a gate, which the timestep decides. In 8 bits the
gate becomes part of the scales of the weight's columns: scales_i * gate_i, for two matmuls of each block. Apart,
these are two small launches for each matmul. Here, up to 32 matmuls share one launch of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from sdonnx.graph.edit import (
    MAX_SPLIT_OUTPUTS,
    dtype_of,
    insert,
    insert_multi,
    known_size,
    optional_input,
    replace,
    required,
)
from sdonnx.graph.match import producer_of
from sdonnx.operators.kernel_case import OUR_DOMAIN

__all__ = ["stack_scales"]


def stack_scales(model: ir.Model) -> int:
    """Stack the products scales_i * gate_i of a graph, in place; return the number of stacks.

    Gates that depend on the result of a ScaledMatMul stay apart, since the stack needs all of them.
    """
    late = _behind_scaled_matmuls(model.graph)
    groups: dict[object, list[ir.Node]] = {}
    for node in dict.fromkeys(_gated_scales(model.graph)):
        if late.isdisjoint(node.inputs):
            types = tuple(dtype_of(required(required(producer_of(each, "Cast")).inputs[0])) for each in node.inputs)
            groups.setdefault((known_size(node.outputs[0], 0), types), []).append(node)
    parts = [
        nodes[start : start + MAX_SPLIT_OUTPUTS]
        for nodes in groups.values()
        for start in range(0, len(nodes), MAX_SPLIT_OUTPUTS)
    ]
    stacks = [part for part in parts if len(part) > 1]
    for stack in stacks:
        _stack(stack)
    if stacks:
        model.graph.sort()
    return len(stacks)


def _behind_scaled_matmuls(graph: ir.Graph) -> set[ir.Value | None]:
    """Return the values that depend on the result of a ScaledMatMul."""
    found: set[ir.Value | None] = set()
    for node in graph:
        if (node.domain, node.op_type) == (OUR_DOMAIN, "ScaledMatMul") or not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def _gated_scales(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the products of two vectors that were cast to float32 and are the scales of columns."""
    for node in graph:
        is_scaled = (node.domain, node.op_type) == (OUR_DOMAIN, "ScaledMatMul")
        value = producer_of(optional_input(node, 3), "Mul") if is_scaled else None
        if value is not None and all(producer_of(each, "Cast") is not None for each in value.inputs):
            yield value


def _stack(nodes: Sequence[ir.Node]) -> None:
    anchor, wide, dtype = nodes[0], list[ir.Value](), ir.DataType.FLOAT
    size = known_size(anchor.outputs[0], 0)
    for index in range(2):
        casts = [required(producer_of(node.inputs[index], "Cast")) for node in nodes]
        parts = [cast.inputs[0] for cast in casts]
        together = insert(anchor, "Concat", parts, {"axis": 0}, shape=[len(nodes) * size])
        wide.append(insert(anchor, "Cast", [together], {"to": dtype}, dtype=dtype, shape=together.shape))
    product = insert(anchor, "Mul", wide, shape=wide[0].shape)
    attributes = {"axis": 0, "num_outputs": len(nodes)}
    shapes = [[size]] * len(nodes)
    for node, part in zip(
        nodes, insert_multi(anchor, "Split", [product], attributes, len(nodes), shapes=shapes), strict=True
    ):
        replace(node.outputs[0], part)
