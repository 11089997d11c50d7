"""Spelled-out group norms -> GroupNormalization -> GroupNorm, with the SiLU after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.fusions.channels_last import ChannelsLastWalk, nhwc_shape
from sdonnx.graph.edit import (
    MICROSOFT,
    add_initializer,
    constant,
    dims,
    input_of,
    insert,
    is_weight,
    producer_node,
    replace,
    static_dim,
)
from sdonnx.graph.match import (
    NOT_A_CANDIDATE,
    REWRITTEN,
    Refused,
    Rule,
    WalkResult,
    WalkRule,
    producer_of,
    same_dims,
    same_shape,
    sole_user,
)
from sdonnx.graph.passes import constant_target
from sdonnx.graph.tensors import lazy, read
from sdonnx.operators.contrib_norms import check_group_norm

__all__ = [
    "FlatGroupNormToGroupNorm",
    "InstanceNormToGroupNorm",
    "SiluIntoGroupNorm",
    "group_normalization_to_group_norm",
]


class InstanceNormToGroupNorm(WalkRule):
    """Reshape(InstanceNormalization(Reshape(x, (B,G,-1)), s, t), (B,C,...)) * gamma + beta -> GroupNormalization(x).

    Shapes: x (B,C,...), s and t (G,), gamma and beta (C,1,...) or (1,C,1,...). Wu and He 2018,
    "Group Normalization". Scale and shift of the groups, ones and zeros in torch's exports, go into
    the channels' scale and shift: gamma s, gamma t + beta.
    """

    roots = frozenset({"InstanceNormalization"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        grouped, back = producer_of(node.inputs[0], "Reshape"), sole_user(node.outputs[0], "Reshape")
        if grouped is None or back is None or grouped.inputs[0] is None:
            return NOT_A_CANDIDATE  # a norm of each channel by itself
        x, flat, graph = grouped.inputs[0], grouped.outputs[0], node.graph
        before, folded, channels, groups = dims(x), dims(flat), static_dim(x, 1), static_dim(flat, 1)
        if before is None or folded is None or len(before) < 3 or not isinstance(graph, ir.Graph) or x.dtype is None:
            return Refused("the shape of the input is not known")
        if channels is None or groups is None or channels % groups or before[0] != folded[0]:
            return Refused(f"the reshape from {x.shape} to {flat.shape} does not group channels")
        after = dims(back.outputs[0])
        if after is None or len(after) < 3 or not same_dims(before[:2], after[:2]):
            return Refused(f"the reshape back has the shape {back.outputs[0].shape}, the input has {x.shape}")
        flattened = None
        if not same_shape(back.outputs[0], x):
            flattened = constant_target(ir.Shape(before), ir.Shape(after))
            if flattened is None:
                return Refused(f"the reshape back has the shape {back.outputs[0].shape}, the input has {x.shape}")
        scale, shift = node.inputs[1], node.inputs[2]
        if not is_weight(scale) or not is_weight(shift):
            return Refused("scale and shift of the groups are not constant")
        last, gamma = _channel_affine(back.outputs[0], "Mul", channels)
        last, beta = _channel_affine(last, "Add", channels)
        tensors = [None if value is None else value.const_value for value in (scale, shift, gamma, beta)]
        made = [
            add_initializer(graph, f"{last.name}.{name}", lazy(make, x.dtype, (channels,)))
            for name, make in _merged(tensors, channels // groups, channels, x.dtype).items()
        ]
        end = producer_node(last)
        attributes = {"num_groups": groups, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
        norm = insert(end, "GroupNormalization", [x, *made], attributes, shape=x.shape)
        if flattened is not None:  # diffusers' attention flattens the image first
            name = "shape_" + "_".join(str(size).replace("-", "m") for size in flattened)
            target = constant(graph, flattened, np.int64, name)
            norm = insert(end, "Reshape", [norm, target], shape=last.shape)
        replace(last, norm)
        return REWRITTEN


def _channel_affine(value: ir.Value, op_type: str, channels: int) -> tuple[ir.Value, ir.Value | None]:
    """Return the result of an operator on `value` (B,C,...) and a constant (C,1,...), and the constant."""
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
    """Return functions that compute scale and shift of the channels, with the groups' scale and shift in them."""
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


class FlatGroupNormToGroupNorm(Rule):
    """GroupNormalization(Reshape(x, (B,C,H*W))) -> Reshape(GroupNormalization(x), (B,C,H*W)).

    Shapes: x (B,C,H,W). diffusers' VAE normalizes the flattened image.
    """

    def pattern(self, op: Any, x: Any, shape: Any, gamma: Any, beta: Any) -> Any:
        flat = op.Reshape(x, shape, _allow_other_attributes=True)
        return op.GroupNormalization(flat, gamma, beta, _allow_other_attributes=True, _outputs=["norm"])

    keeps_nodes = True  # the flat image is also the residual

    def check(self, x: ir.Value, norm: ir.Value, **_: Any) -> str | None:
        return None if _flattens_last_two(x, norm) else "the reshape does more than flatten height and width"

    def rewrite(self, op: Any, x: ir.Value, shape: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> Any:
        node = producer_node(norm)
        normal = op.GroupNormalization(x, gamma, beta, **node.attributes)
        normal.shape, normal.type = x.shape, x.type
        return op.Reshape(normal, shape)


def _flattens_last_two(x: ir.Value, flat: ir.Value) -> bool:
    before, after = dims(x), dims(flat)
    if before is None or after is None or len(before) != 4 or len(after) != 3:
        return False
    return same_dims(before[:2], after[:2])


def group_normalization_to_group_norm(walk: ChannelsLastWalk, node: ir.Node) -> WalkResult:
    """GroupNormalization(x, gamma, beta) -> GroupNorm(x, gamma, beta).

    Shapes: x (B,C,H,W) -> (B,H,W,C), gamma and beta (C,).
    """
    x = input_of(node, 0)
    _, gamma, beta = node.inputs
    groups = node.attributes.get_int("num_groups")
    if (reason := check_group_norm(x, static_dim(x, 1), groups)) is not None:
        return Refused(reason)
    if not all(static_dim(value, 0) == static_dim(x, 1) for value in (gamma, beta) if value is not None):
        return Refused("scale and shift do not have one element per channel")  # before opset 21: one per group
    attributes = {
        "groups": groups,
        "epsilon": node.attributes.get_float("epsilon", 1e-5),
        "activation": 0,
        "channels_last": 1,
    }
    shape = nhwc_shape(node.outputs[0])
    inputs = [walk.twin(x, node), gamma, beta]
    walk.set_twin(node, insert(node, "GroupNorm", inputs, attributes, domain=MICROSOFT, shape=shape))
    return REWRITTEN


class SiluIntoGroupNorm(Rule):
    """n = GroupNorm(x); n * Sigmoid(n) -> GroupNorm(x, activation=1).

    Shapes: x (B,H,W,C).
    """

    def pattern(self, op: Any, x: Any, gamma: Any, beta: Any) -> Any:
        norm = op.GroupNorm(
            x, gamma, beta, activation=0, _domain=MICROSOFT, _allow_other_attributes=True, _outputs=["norm"]
        )
        return op.Mul(norm, op.Sigmoid(norm))

    def rewrite(self, op: Any, x: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> Any:
        node = producer_node(norm)
        attributes = {name: value for name, value in node.attributes.items() if name != "activation"}
        return op.GroupNorm(x, gamma, beta, **attributes, activation=1, _domain=MICROSOFT)
