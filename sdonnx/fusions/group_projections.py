"""Projections of one value, computed by one matmul."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import (
    MAX_SPLIT_OUTPUTS,
    dims,
    insert,
    insert_multi,
    joined_initializer,
    known_dims,
    replace,
    required,
    static_dim,
)
from sdonnx.graph.match import PassOutcome, is_bias
from sdonnx.graph.modules import joint_path

__all__ = ["group_projections"]


# Three projections are the q, k, v of a self-attention. Its input is large: splitting their
# matmul would copy more than it saves. Four and more are projections of the prompt or the time.
_FEWEST = 4


@dataclass(frozen=True)
class _Kind:
    """The properties that projections must share to be computed together."""

    op_type: str
    width: int
    transposed: bool
    has_bias: bool


def group_projections(model: ir.Model) -> PassOutcome:
    """x@W1 + b1, ..., x@Wn + bn -> Split(x@[W1|...|Wn] + [b1|...|bn]).

    Shapes: x (..., D), Wi (D,E), bi (E,). A UNet projects the prompt (32 times in SD1.5) and the
    time (22 times) with matmuls that are too small to fill a GPU and spend most of their time on launching.

    Returns:
        The number of projections that were grouped.
    """
    graph, fired = model.graph, 0
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        for kind, nodes in _projections(value).items():
            if len(nodes) >= _FEWEST:
                for start in range(0, len(nodes), MAX_SPLIT_OUTPUTS):
                    _group(graph, value, kind, nodes[start : start + MAX_SPLIT_OUTPUTS])
                fired += len(nodes)
    return PassOutcome({"GroupProjections": fired})


def _group(graph: ir.Graph, x: ir.Value, kind: _Kind, nodes: Sequence[ir.Node]) -> None:
    anchor, sizes = nodes[0], known_dims(nodes[0].outputs[0])
    modules = joint_path(nodes)
    axis = 0 if kind.transposed else 1
    inputs: list[ir.Value | None] = [x, _joined(graph, [node.inputs[1] for node in nodes], axis)]
    if kind.has_bias:
        inputs.append(_joined(graph, [node.inputs[2] for node in nodes], 0))
    whole = (*sizes[:-1], kind.width * len(nodes))
    matmul = insert(anchor, kind.op_type, inputs, anchor.attributes, shape=whole, module=modules)
    parts = insert_multi(
        anchor,
        "Split",
        [matmul],
        {"axis": len(sizes) - 1, "num_outputs": len(nodes)},
        len(nodes),
        shapes=[sizes] * len(nodes),
        module=modules,
    )
    for node, part in zip(nodes, parts, strict=True):
        replace(node.outputs[0], part)
        graph.remove(node, safe=True)


def _projections(x: ir.Value) -> dict[_Kind, list[ir.Node]]:
    """Return the projections of `x` by constant weights, grouped by kind."""
    groups: dict[_Kind, list[ir.Node]] = {}
    for node in _users(x):
        weight = node.inputs[1]
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if weight is None or not weight.is_initializer() or len(dims(weight) or ()) != 2:
            continue
        transposed = bool(node.attributes.get_int("transB", 0))
        width = static_dim(weight, 0 if transposed else 1)
        if bias is not None and not is_bias(bias, width):
            continue
        if width is not None and node.outputs[0].shape is not None:
            groups.setdefault(_Kind(node.op_type, width, transposed, bias is not None), []).append(node)
    return groups


def _users(x: ir.Value) -> Iterator[ir.Node]:
    """Yield the matmuls with `x` as left operand, each once, in the graph's order."""
    for node, index in x.uses():
        if index != 0 or node.domain or node.op_type not in ("MatMul", "Gemm"):
            continue
        attributes = node.attributes
        if attributes.get_int("transA", 0) or attributes.get_float("alpha", 1.0) != 1.0:
            continue
        if attributes.get_float("beta", 1.0) == 1.0:
            yield node


def _joined(graph: ir.Graph, parts: Sequence[ir.Value | None], axis: int) -> ir.Value:
    shape = list(required(required(parts[0]).shape).numpy())
    shape[axis] *= len(parts)
    return joined_initializer(graph, parts, partial(np.concatenate, axis=axis), shape)
