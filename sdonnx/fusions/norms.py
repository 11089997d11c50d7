"""Spelled-out norms -> LayerNormalization and GroupNormalization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.graph.edit import (
    add_initializer,
    constant,
    constant_value,
    derived_initializer,
    dims,
    insert,
    is_weight,
    replace,
    static_dim,
)
from sdonnx.graph.match import Idiom, producer_of, same_dims, same_shape, scalar, sole_user
from sdonnx.graph.passes import constant_target
from sdonnx.graph.tensors import lazy, read

__all__ = ["InstanceNormToGroupNorm", "LayerNormWithShift", "MeansToLayerNorm", "SquaresToRmsNorm"]


class MeansToLayerNorm(Idiom):
    """(x - Mean(x)) / Sqrt(Mean((x - Mean(x))^2) + epsilon) * gamma + beta -> LayerNormalization(x, gamma, beta).

    Shapes: x (..., D), gamma and beta (D,). Ba et al. 2016, "Layer Normalization".
    """

    roots = frozenset({"Div", "Mul"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite from the quotient on, with the factor and the term after it."""
        found = _normalized(node)
        if found is None:
            return ""
        x, epsilon = found
        return _rewrite(node, "LayerNormalization", x, epsilon, (("Mul", 1), ("Add", 0)))


class SquaresToRmsNorm(Idiom):
    """x / Sqrt(Mean(x^2) + epsilon) * gamma -> RMSNormalization(x, gamma).

    Shapes: x (..., D), gamma (D,). Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """

    roots = frozenset({"Div", "Mul"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite from the quotient on, with the factor after it."""
        found = _by_root_mean_square(node)
        if found is None:
            return ""
        x, epsilon = found
        return _rewrite(node, "RMSNormalization", x, epsilon, (("Mul", 1),))


def _rewrite(
    node: ir.Node, op_type: str, x: ir.Value, epsilon: float, parameters: tuple[tuple[str, int], ...]
) -> str | None:
    """Put a norm of x in the place of the quotient `node`; or return why not.

    Args:
        node: the quotient.
        op_type: the norm.
        x: what is normalized, over its last axis.
        epsilon: what is added under the root.
        parameters: (operator, number) of each parameter, in their order: the operator that applies it after the
            quotient, and the number that it is filled with where there is none.
    """
    channels, graph = static_dim(x, -1), node.graph
    if channels is None or not isinstance(graph, ir.Graph) or x.dtype is None or dims(x) is None:
        return "the size of the last axis is not known"
    last = node.outputs[0]
    if last.dtype != x.dtype:  # TorchScript computes the norm of fp16 in double
        cast = sole_user(last, "Cast")
        if cast is None or cast.outputs[0].dtype != x.dtype:
            return f"the norm of {x.dtype} gives {last.dtype}"
        last = cast.outputs[0]
    if not same_shape(last, x):
        return "a constant adds dimensions"
    inputs = [x]
    for operator, number in parameters:
        last, given = _affine(last, operator, channels)
        vector = _filled(graph, channels, x.dtype, number) if given is None else _vector(graph, given, channels)
        inputs.append(vector)
    after = last.producer()
    assert after is not None
    norm = insert(after, op_type, inputs, {"axis": -1, "epsilon": epsilon}, shape=x.shape)
    replace(last, norm)
    return None


def _normalized(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return (x, epsilon) where the node divides x - Mean(x) by its standard deviation."""
    for deviation, mean_square, epsilon in _over_root(node):
        centred = producer_of(_bare(deviation), "Sub")
        x = None if centred is None else centred.inputs[0]
        if centred is None or x is None or _mean_over_last(_bare(centred.inputs[1])) is not x:
            continue
        if _is_square(_mean_over_last(_bare(mean_square)), _bare(deviation)):
            return x, epsilon
    return None


def _by_root_mean_square(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return (x, epsilon) where the node divides x by the root of its mean square."""
    for dividend, mean_square, epsilon in _over_root(node):
        x = _bare(dividend)
        if x is not None and _is_square(_mean_over_last(_bare(mean_square)), x):
            return x, epsilon
    return None


def _over_root(node: ir.Node) -> Iterator[tuple[ir.Value | None, ir.Value | None, float]]:
    """Yield every (a, b, epsilon) where the node is a / Sqrt(b + epsilon)."""
    first, second = node.inputs
    orders = [(first, second)] if node.op_type == "Div" else [(first, second), (second, first)]
    for dividend, other in orders:
        root = producer_of(_bare(other), "Sqrt") if node.op_type == "Div" else _inverse_root(_bare(other))
        total = None if root is None else producer_of(_bare(root.inputs[0]), "Add")
        if total is None:
            continue
        for term, number in (total.inputs, reversed(total.inputs)):
            if (epsilon := scalar(number)) is not None:
                yield dividend, term, epsilon


def _bare(value: ir.Value | None) -> ir.Value | None:
    """Look through casts between floating-point types."""
    while (cast := producer_of(value, "Cast")) is not None:
        source = cast.inputs[0]
        if source is None or source.dtype is None or not source.dtype.is_floating_point():
            break
        value = source
    return value


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
    node = producer_of(_bare(value), "Pow", "Mul")
    if node is None:
        return False
    first, second = _bare(node.inputs[0]), node.inputs[1]
    return first is of and (scalar(second) == 2.0 if node.op_type == "Pow" else _bare(second) is of)


def _affine(value: ir.Value, op_type: str, channels: int) -> tuple[ir.Value, ir.Value | None]:
    """Return what follows `value` and the constant, one number a channel of the last axis, that it is given."""
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
    tensor = value.const_value
    assert tensor is not None
    if value.shape is not None and value.shape.rank() == 1:
        return value
    return derived_initializer(
        graph, f"{value.name}.vector", lambda: read(tensor).reshape(channels), tensor.dtype, (channels,)
    )


def _filled(graph: ir.Graph, channels: int, dtype: ir.DataType, number: int) -> ir.Value:
    return constant(graph, np.full(channels, number), dtype.numpy(), f"{channels}_of_{number}_{dtype.name.lower()}")


class LayerNormWithShift(Idiom):
    """LayerNormalization(x, gamma) -> LayerNormalization(x, gamma, zeros).

    Shapes: x (..., D), gamma (D,). ONNX Runtime 1.31's own fusion of an addition with a norm that has no shift
    crashes on the CPU, and SkipLayerNormalization is matched with one.
    """

    roots = frozenset({"LayerNormalization"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Add the shift."""
        x, gamma, graph = node.inputs[0], node.inputs[1], node.graph
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            return ""
        if x is None or gamma is None or gamma.dtype is None or not isinstance(graph, ir.Graph):
            return ""
        channels = static_dim(gamma, 0)
        if channels is None or len(dims(gamma) or ()) != 1 or len(node.outputs) != 1:
            return ""
        inputs = [x, gamma, _filled(graph, channels, gamma.dtype, 0)]
        norm = insert(node, "LayerNormalization", inputs, node.attributes, shape=node.outputs[0].shape)
        replace(node.outputs[0], norm)
        return None


class InstanceNormToGroupNorm(Idiom):
    """Reshape(InstanceNormalization(Reshape(x, (B,G,-1)), s, t), (B,C,...)) * gamma + beta -> GroupNormalization(x).

    Shapes: x (B,C,...), s and t (G,), gamma and beta (C,1,...) or (1,C,1,...). Wu and He 2018,
    "Group Normalization". Scale and shift of the groups, ones and zeros in torch's exports, go into
    those of the channels: gamma s, gamma t + beta.
    """

    roots = frozenset({"InstanceNormalization"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite from the first reshape to the shift."""
        grouped, back = producer_of(node.inputs[0], "Reshape"), sole_user(node.outputs[0], "Reshape")
        if grouped is None or back is None or grouped.inputs[0] is None:
            return ""  # a norm of each channel by itself
        x, flat, graph = grouped.inputs[0], grouped.outputs[0], node.graph
        before, folded, channels, groups = dims(x), dims(flat), static_dim(x, 1), static_dim(flat, 1)
        if before is None or folded is None or len(before) < 3 or not isinstance(graph, ir.Graph) or x.dtype is None:
            return "the shape of the input is not known"
        if channels is None or groups is None or channels % groups or before[0] != folded[0]:
            return f"the reshape from {x.shape} to {flat.shape} does not gather channels into groups"
        after = dims(back.outputs[0])
        if after is None or len(after) < 3 or not same_dims(before[:2], after[:2]):
            return f"the reshape back gives {back.outputs[0].shape}, the input was {x.shape}"
        flattened = None
        if not same_shape(back.outputs[0], x):
            flattened = constant_target(ir.Shape(before), ir.Shape(after))
            if flattened is None:
                return f"the reshape back gives {back.outputs[0].shape}, the input was {x.shape}"
        scale, shift = node.inputs[1], node.inputs[2]
        if not is_weight(scale) or not is_weight(shift):
            return "scale and shift of the groups are not constant"
        last, gamma = _channel_affine(back.outputs[0], "Mul", channels)
        last, beta = _channel_affine(last, "Add", channels)
        tensors = [None if value is None else value.const_value for value in (scale, shift, gamma, beta)]
        made = [
            add_initializer(graph, f"{last.name}.{name}", lazy(make, x.dtype, (channels,)))
            for name, make in _merged(tensors, channels // groups, channels, x.dtype).items()
        ]
        end = last.producer()
        assert end is not None
        attributes = {"num_groups": groups, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
        norm = insert(end, "GroupNormalization", [x, *made], attributes, shape=x.shape)
        if flattened is not None:  # diffusers' attention flattens the image first
            name = "shape_" + "_".join(str(size).replace("-", "m") for size in flattened)
            target = constant(graph, flattened, np.int64, name)
            norm = insert(end, "Reshape", [norm, target], shape=last.shape)
        replace(last, norm)
        return None


def _channel_affine(value: ir.Value, op_type: str, channels: int) -> tuple[ir.Value, ir.Value | None]:
    """Return what follows `value` (B,C,...) and the constant, one number a channel, that it is given."""
    node = sole_user(value, op_type)
    rank = len(dims(value) or ())
    if node is None:
        return value, None
    other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
    if other is None or other is value or not is_weight(other) or other.shape is None:
        return value, None
    sizes = tuple(other.shape.numpy())
    wanted = (channels,) + (1,) * (rank - 2)
    per_channel = sizes in (wanted, (1, *wanted))
    return (node.outputs[0], other) if per_channel else (value, None)


def _merged(
    tensors: list[ir.TensorProtocol | None], repeats: int, channels: int, dtype: ir.DataType
) -> dict[str, Callable[[], npt.NDArray[Any]]]:
    """Return what computes scale and shift of the channels from those of the groups and their own."""
    scale, shift, gamma, beta = tensors

    def per_channel(tensor: ir.TensorProtocol | None, default: float) -> npt.NDArray[Any]:
        return np.full(channels, default, dtype.numpy()) if tensor is None else read(tensor).reshape(-1)

    def of_group(tensor: ir.TensorProtocol | None) -> npt.NDArray[Any]:
        return np.repeat(per_channel(tensor, 1.0), repeats)

    def gammas() -> npt.NDArray[Any]:
        return np.asarray(per_channel(gamma, 1.0) * of_group(scale), dtype.numpy())

    def betas() -> npt.NDArray[Any]:
        shifted = per_channel(gamma, 1.0) * of_group(shift)
        return np.asarray(shifted + per_channel(beta, 0.0), dtype.numpy())

    return {"scale": gammas, "bias": betas}
