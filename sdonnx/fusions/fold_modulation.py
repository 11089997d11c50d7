"""Shifts, scales and gates shared by the whole batch -> parameters of norms, weights and biases.

For adaptive norms (adaLN-single: arXiv:2310.00426, section 2.3), which compute these rows at each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import (
    Dim,
    constant,
    constant_value,
    dims,
    insert,
    is_weight,
    producer_node,
    replace,
    required,
    static_dim,
)
from sdonnx.graph.match import (
    NOT_A_CANDIDATE,
    REWRITTEN,
    Refused,
    WalkResult,
    WalkRule,
    biased,
    is_matrix,
    producer_of,
    same_shape,
    sole_user,
)
from sdonnx.graph.modules import joint_path

__all__ = ["BiasBeforeGate", "GateIntoWeight", "ModulationIntoLayerNorm"]


class ModulationIntoLayerNorm(WalkRule):
    """LayerNormalization(x, ones, zeros) * scale + shift -> LayerNormalization(x, scale, shift).

    Shapes: x (B,S,D), scale and shift (1,1,D).
    """

    roots = frozenset({"LayerNormalization"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        result = node.outputs[0]
        channels = static_dim(result, -1)
        scaled, scale = _with_row(result, "Mul", channels)
        shifted, shift = _with_row(scaled, "Add", channels)
        if scale is None or shift is None or len(node.inputs) < 3:
            return NOT_A_CANDIDATE
        x, gamma, beta = node.inputs[:3]
        if not _is_filled(gamma, 1) or not _is_filled(beta, 0):
            return Refused("the norm has weights of its own")
        last = producer_node(shifted)
        inputs = [x, _vector(last, scale, channels), _vector(last, shift, channels)]
        replace(shifted, insert(last, "LayerNormalization", inputs, node.attributes, shape=result.shape))
        return REWRITTEN


class BiasBeforeGate(WalkRule):
    """gate * (x + bias) -> gate * x + gate * bias, of which the last is a row: a norm or an addition takes it.

    Shapes: x (B,S,D), bias (D,), gate (1,1,D).
    """

    roots = frozenset({"Mul"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        result = node.outputs[0]
        channels = static_dim(result, -1)
        for gate, total in (node.inputs, reversed(node.inputs)):
            found = biased(total)
            if found is None or total is None or gate is None or not _is_row(gate, channels):
                continue
            x, bias = found
            if sole_user(total, "Mul") is not node or not same_shape(x, result):
                continue
            gated = insert(node, "Mul", [x, gate], shape=result.shape)
            row = insert(node, "Mul", [bias, _vector(node, gate, channels)], shape=[channels or 0])
            replace(result, insert(node, "Add", [gated, row], shape=result.shape))
            return REWRITTEN
        return NOT_A_CANDIDATE


class GateIntoWeight(WalkRule):
    """gate * (x @ W) -> x @ (gate * W): a weight has fewer rows than a large image has tokens.

    Shapes: x (B,S,K), W (K,D), gate (1,1,D).
    """

    roots = frozenset({"Mul"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        result = node.outputs[0]
        channels = static_dim(result, -1)
        for gate, gated in (node.inputs, reversed(node.inputs)):
            matmul = producer_of(gated, "MatMul")
            if matmul is None or gate is None or is_weight(gate) or not _is_row(gate, channels):
                continue
            x, weight = matmul.inputs
            if weight is None or not is_matrix(weight):
                continue
            if sole_user(matmul.outputs[0], "Mul") is not node or not same_shape(matmul.outputs[0], result):
                continue
            if x is None or _is_fewer(dims(x) or (), static_dim(weight, 0)):
                continue
            module = joint_path((matmul, node))
            scaled = insert(node, "Mul", [weight, _vector(node, gate, channels)], shape=weight.shape, module=module)
            replace(result, insert(node, "MatMul", [x, scaled], shape=result.shape, module=module))
            return REWRITTEN
        return NOT_A_CANDIDATE


def _with_row(value: ir.Value, op_type: str, channels: int | None) -> tuple[ir.Value, ir.Value | None]:
    """Return the result of an operator on `value` (B,S,D) and a row (1,1,D), and the row."""
    node = sole_user(value, op_type)
    if node is None:
        return value, None
    other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
    fits = _is_row(other, channels) and same_shape(node.outputs[0], value)
    return (node.outputs[0], other) if fits else (value, None)


def _is_row(value: ir.Value | None, channels: int | None) -> bool:
    sizes = None if value is None else dims(value)
    return channels is not None and sizes == (1, 1, channels)


def _is_fewer(sizes: Sequence[Dim], rows: int | None) -> bool:
    """Return whether tokens (..., K) are known to be fewer than the rows of a weight."""
    tokens = [size for size in sizes[:-1] if isinstance(size, int)]
    return rows is not None and len(tokens) == len(sizes) - 1 and math.prod(tokens) < rows


def _is_filled(value: ir.Value | None, number: int) -> bool:
    values = constant_value(value)
    return values is not None and bool((values == number).all())


def _vector(anchor: ir.Node, row: ir.Value, channels: int | None) -> ir.Value:
    """Return a row (1,1,D) as (D,)."""
    size = required(channels, "number of channels")
    shape = constant(required(anchor.graph), [size], np.int64, f"sizes_{size}")
    return insert(anchor, "Reshape", [row, shape], shape=[size])
