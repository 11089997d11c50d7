"""Spelled-out norms over the last axis -> LayerNormalization and RMSNormalization."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import (
    constant,
    constant_value,
    derived_initializer,
    dims,
    insert,
    is_weight,
    producer_node,
    replace,
    static_dim,
    tensor_of,
)
from sdonnx.graph.match import (
    NOT_A_CANDIDATE,
    REWRITTEN,
    Refused,
    WalkResult,
    WalkRule,
    producer_of,
    same_shape,
    scalar,
    skip_float_casts,
    sole_user,
)
from sdonnx.graph.tensors import read

__all__ = ["LayerNormWithShift", "MeansToLayerNorm", "SquaresToRmsNorm"]


class MeansToLayerNorm(WalkRule):
    """(x - Mean(x)) / Sqrt(Mean((x - Mean(x))^2) + epsilon) * gamma + beta -> LayerNormalization(x, gamma, beta).

    Shapes: x (..., D), gamma and beta (D,). Ba et al. 2016, "Layer Normalization".
    """

    roots = frozenset({"Div", "Mul"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        found = _normalized(node)
        if found is None:
            return NOT_A_CANDIDATE
        x, epsilon = found
        return _rewrite(node, "LayerNormalization", x, epsilon, (("Mul", 1), ("Add", 0)))


class SquaresToRmsNorm(WalkRule):
    """x / Sqrt(Mean(x^2) + epsilon) * gamma -> RMSNormalization(x, gamma).

    Shapes: x (..., D), gamma (D,). Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """

    roots = frozenset({"Div", "Mul"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        found = _by_root_mean_square(node)
        if found is None:
            return NOT_A_CANDIDATE
        x, epsilon = found
        return _rewrite(node, "RMSNormalization", x, epsilon, (("Mul", 1),))


def _rewrite(
    node: ir.Node, op_type: str, x: ir.Value, epsilon: float, parameters: tuple[tuple[str, int], ...]
) -> WalkResult:
    """Replace the quotient `node` by a norm of x.

    Args:
        node: the quotient.
        op_type: the norm.
        x: the value to normalize over its last axis.
        epsilon: the number added to the variance.
        parameters: (operator, default) of each parameter, in order: the operator that applies it to the quotient, and
            the number that fills it where it is absent.
    """
    channels, graph = static_dim(x, -1), node.graph
    if channels is None or not isinstance(graph, ir.Graph) or x.dtype is None or dims(x) is None:
        return Refused("the size of the last axis is not known")
    last = node.outputs[0]
    if last.dtype != x.dtype:  # TorchScript computes the norm of fp16 in double
        cast = sole_user(last, "Cast")
        if cast is None or cast.outputs[0].dtype != x.dtype:
            return Refused(f"the norm of {x.dtype} has the type {last.dtype}")
        last = cast.outputs[0]
    if not same_shape(last, x):
        return Refused("a constant adds dimensions")
    inputs = [x]
    for operator, number in parameters:
        last, given = _affine(last, operator, channels)
        vector = _filled(graph, channels, x.dtype, number) if given is None else _vector(graph, given, channels)
        inputs.append(vector)
    after = producer_node(last)
    norm = insert(after, op_type, inputs, {"axis": -1, "epsilon": epsilon}, shape=x.shape)
    replace(last, norm)
    return REWRITTEN


def _normalized(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return (x, epsilon) where the node divides x - Mean(x) by its standard deviation."""
    for deviation, mean_square, epsilon in _over_root(node):
        centred = producer_of(skip_float_casts(deviation), "Sub")
        x = None if centred is None else centred.inputs[0]
        if centred is None or x is None or _mean_over_last(skip_float_casts(centred.inputs[1])) is not x:
            continue
        if _is_square(_mean_over_last(skip_float_casts(mean_square)), skip_float_casts(deviation)):
            return x, epsilon
    return None


def _by_root_mean_square(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return (x, epsilon) where the node divides x by the root of its mean square."""
    for dividend, mean_square, epsilon in _over_root(node):
        x = skip_float_casts(dividend)
        if x is not None and _is_square(_mean_over_last(skip_float_casts(mean_square)), x):
            return x, epsilon
    return None


def _over_root(node: ir.Node) -> Iterator[tuple[ir.Value | None, ir.Value | None, float]]:
    """Yield every (a, b, epsilon) where the node is a / Sqrt(b + epsilon)."""
    first, second = node.inputs
    orders = [(first, second)] if node.op_type == "Div" else [(first, second), (second, first)]
    for dividend, other in orders:
        root = (
            producer_of(skip_float_casts(other), "Sqrt")
            if node.op_type == "Div"
            else _inverse_root(skip_float_casts(other))
        )
        total = None if root is None else producer_of(skip_float_casts(root.inputs[0]), "Add")
        if total is None:
            continue
        for term, number in (total.inputs, reversed(total.inputs)):
            if (epsilon := scalar(number)) is not None:
                yield dividend, term, epsilon


def _inverse_root(value: ir.Value | None) -> ir.Node | None:
    """Return the Sqrt node where value = 1 / Sqrt(...) or Reciprocal(Sqrt(...))."""
    node = producer_of(value, "Reciprocal", "Div")
    if node is None or (node.op_type == "Div" and scalar(node.inputs[0]) != 1.0):
        return None
    return producer_of(node.inputs[-1], "Sqrt")


def _mean_over_last(value: ir.Value | None) -> ir.Value | None:
    """Return x where value = ReduceMean(x) over the last axis, kept as 1."""
    node = producer_of(value, "ReduceMean")
    if node is None or not node.attributes.get_int("keepdims", 1) or len(node.inputs) < 2:
        return None
    x, axes = node.inputs[0], constant_value(node.inputs[1])
    if x is None or x.shape is None or axes is None or axes.size != 1:
        return None
    return x if int(axes.item()) in (-1, x.shape.rank() - 1) else None


def _is_square(value: ir.Value | None, of: ir.Value | None) -> bool:
    node = producer_of(skip_float_casts(value), "Pow", "Mul")
    if node is None:
        return False
    first, second = skip_float_casts(node.inputs[0]), node.inputs[1]
    return first is of and (scalar(second) == 2.0 if node.op_type == "Pow" else skip_float_casts(second) is of)


def _affine(value: ir.Value, op_type: str, channels: int) -> tuple[ir.Value, ir.Value | None]:
    """Return the result of an operator on `value` and a constant (D,) along the last axis, and the constant."""
    node = sole_user(value, op_type)
    if node is None:
        return value, None
    other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
    if other is None or other is value or not is_weight(other) or other.shape is None:
        return value, None
    sizes = tuple(other.shape.numpy())
    vector = sizes[-1:] == (channels,) and all(size == 1 for size in sizes[:-1])
    return (node.outputs[0], other) if vector and same_shape(node.outputs[0], value) else (value, None)


def _vector(graph: ir.Graph, value: ir.Value, channels: int) -> ir.Value:
    """Return a constant of `channels` elements as a vector."""
    tensor = tensor_of(value)
    if value.shape is not None and value.shape.rank() == 1:
        return value
    return derived_initializer(
        graph, f"{value.name}.vector", lambda: read(tensor).reshape(channels), tensor.dtype, (channels,)
    )


def _filled(graph: ir.Graph, channels: int, dtype: ir.DataType, number: int) -> ir.Value:
    return constant(graph, np.full(channels, number), dtype.numpy(), f"{channels}_of_{number}_{dtype.name.lower()}")


class LayerNormWithShift(WalkRule):
    """LayerNormalization(x, gamma) -> LayerNormalization(x, gamma, zeros).

    Shapes: x (..., D), gamma (D,). ONNX Runtime 1.31's own fusion of an addition with a norm without shift
    crashes on the CPU, and SkipLayerNormalization is matched with a shift.
    """

    roots = frozenset({"LayerNormalization"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        x, gamma, graph = node.inputs[0], node.inputs[1], node.graph
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            return NOT_A_CANDIDATE
        if x is None or gamma is None or gamma.dtype is None or not isinstance(graph, ir.Graph):
            return NOT_A_CANDIDATE
        channels = static_dim(gamma, 0)
        if channels is None or len(dims(gamma) or ()) != 1 or len(node.outputs) != 1:
            return NOT_A_CANDIDATE
        inputs = [x, gamma, _filled(graph, channels, gamma.dtype, 0)]
        norm = insert(node, "LayerNormalization", inputs, node.attributes, shape=node.outputs[0].shape)
        replace(node.outputs[0], norm)
        return REWRITTEN
