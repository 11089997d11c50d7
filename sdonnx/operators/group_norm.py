"""GroupNorm(x (B,H,W,C), gamma (C,), beta (C,)) -> (B,H,W,C), followed by SiLU if `activation`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import onnx_ir as ir

from sdonnx.graph.edit import dims, dtype_of, input_of, insert, static_dim
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.reference_body import TO_NCHW, TO_NHWC

__all__ = [
    "GROUP_NORM",
    "MAX_GROUP_CHANNELS",
    "check_group_norm",
    "group_limits",
    "norm_attributes",
    "normalized_groups",
    "stable_epsilon",
]

# group_norm_common_base.h: a block holds whole groups, and at most 512 channels (kMaxSize).
MAX_GROUP_CHANNELS = 512


def check_group_norm(x: ir.Value, channels: int | None, groups: int) -> str | None:
    """Return why GroupNorm's kernel does not accept x, (B,C,H,W) or (B,H,W,C); None if it does.

    group_norm_impl.cu works on pairs of channels: every group must hold an even number of channels, and fit into one
    block of MAX_GROUP_CHANNELS channels.
    """
    sizes = dims(x)
    if sizes is None or len(sizes) != 4:
        return f"the input has {'no known' if sizes is None else len(sizes)} dimensions, the kernel accepts 4"
    if channels is None:
        return "the number of channels is not known"
    if channels % groups or (channels // groups) % 2:
        return f"{channels} channels in {groups} groups: the kernel accepts an even number of channels a group"
    if channels // groups > MAX_GROUP_CHANNELS:
        return (
            f"{channels} channels in {groups} groups: the kernel accepts at most {MAX_GROUP_CHANNELS} channels a group"
        )
    return GROUP_NORM.check_dtype(x)


def group_limits(node: ir.Node) -> str | None:
    """Return why no kernel accepts the groups of a GroupNorm or SkipGroupNorm, None if one does."""
    x = input_of(node, 0)
    return check_group_norm(x, static_dim(x, 3), node.attributes.get_int("groups"))


def normalized_groups(node: ir.Node, x: ir.Value) -> ir.Value:
    """Insert GroupNormalization of x (B,H,W,C) in float32, then SiLU if `activation`; Wu and He 2018."""
    dtype, float32 = dtype_of(x), ir.DataType.FLOAT
    wide = insert(node, "Cast", [x], {"to": float32}, dtype=float32, shape=x.shape)
    planes = insert(node, "Transpose", [wide], {"perm": TO_NCHW})
    attributes = {
        "num_groups": node.attributes.get_int("groups"),
        "epsilon": node.attributes.get_float("epsilon", 1e-5),
    }
    normal = insert(node, "GroupNormalization", [planes, node.inputs[1], node.inputs[2]], attributes)
    if node.attributes.get_int("activation", 0):
        normal = insert(node, "Mul", [normal, insert(node, "Sigmoid", [normal])])
    last = insert(node, "Transpose", [normal], {"perm": TO_NHWC})
    return insert(node, "Cast", [last], {"to": dtype}, dtype=dtype, shape=x.shape)


def _lower(node: ir.Node) -> list[ir.Value | None]:
    return [normalized_groups(node, input_of(node, 0))]


def norm_attributes(groups: int, activation: int, epsilon: float) -> dict[str, Any]:
    """Return the attributes of GroupNorm and SkipGroupNorm."""
    return {"groups": groups, "epsilon": epsilon, "activation": activation, "channels_last": 1}


def stable_epsilon(channels: int, groups: int) -> float:
    """Return an epsilon for which rounding does not dominate.

    The kernels compute the variance as E[x^2] - E[x]^2: for few close numbers it is lost in their rounding.
    """
    return 1e-3 if channels // groups < 8 else 1e-5


def _kernel_cases() -> Iterator[KernelCase]:
    # Channels per group: 2, 4, 6, 10 ... 80 in 32 groups; then sizes that fill, or nearly fill, a block or half of it.
    sizes = [(channels, 32) for channels in (64, 128, 192, 256, 320, 512, 640, 960, 1280, 1920, 2048, 2560)]
    sizes += [(2, 1), (8, 4), (320, 16), (508, 2), (512, 2), (516, 2)]
    sizes += [(2 * MAX_GROUP_CHANNELS, 2), (MAX_GROUP_CHANNELS, 1)]
    images = {
        (1280, 32): [(1, 1, 1), (3, 1, 1), (3, 1, 7), (1, 7, 1), (1, 77, 1), (3, 33, 31)],
        (320, 32): [(1, 64, 64)],
        (64, 32): [(1, 1, 1), (3, 1, 7), (1, 1, 4096)],
    }
    for (channels, groups), activation in product(sizes, (0, 1)):
        for image in [(2, 9, 13), *(images.get((channels, groups), []) if activation else [])]:
            yield KernelCase(
                "GroupNorm",
                f"C={channels} G={groups} {'x'.join(map(str, image))} activation={activation}",
                ((*image, channels), (channels,), (channels,)),
                norm_attributes(groups, activation, stable_epsilon(channels, groups)),
            )


GROUP_NORM = Contract(
    "GroupNorm",
    _lower,
    _kernel_cases,
    first_use=("C=320 G=32 2x9x13 activation=1",),
    limits=group_limits,
    float32_inputs=frozenset({1, 2}),
    row_inputs=frozenset({0}),
)
