"""Norms of ONNX Runtime: GroupNorm, SkipGroupNorm, SkipLayerNormalization and SkipSimplifiedLayerNormalization.

GroupNorm(x (B,H,W,C), gamma (C,), beta (C,)) -> (B,H,W,C), followed by SiLU if `activation`.

SkipGroupNorm(x (B,H,W,C), gamma, beta, skip, bias): s = x + skip + bias -> GroupNorm(s), s.

SkipLayerNormalization(x, skip, gamma, beta, bias): s = x + skip + bias -> LayerNorm(s), -, -, s.

SkipSimplifiedLayerNormalization(x, skip, gamma, bias): s = x + skip + bias -> RMSNorm(s), -, -, s.

Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, dtype_of, graph_of, input_of, insert, optional_input, static_dim
from sdonnx.operators.contract import FLOATS_AND_BFLOAT16, TO_NCHW, TO_NHWC, Contract
from sdonnx.operators.kernel_case import KernelCase

__all__ = [
    "GROUP_NORM",
    "MAX_GROUP_CHANNELS",
    "MEAN_AND_DEVIATION",
    "SKIP_GROUP_NORM",
    "SKIP_LAYER_NORMALIZATION",
    "SKIP_SIMPLIFIED_LAYER_NORMALIZATION",
    "check_group_norm",
    "group_limits",
    "norm_attributes",
    "normalized_groups",
    "stable_epsilon",
    "sum_with_skip",
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


def _lower_group_norm(node: ir.Node) -> list[ir.Value | None]:
    return [normalized_groups(node, input_of(node, 0))]


def norm_attributes(groups: int, activation: int, epsilon: float) -> dict[str, Any]:
    """Return the attributes of GroupNorm and SkipGroupNorm."""
    return {"groups": groups, "epsilon": epsilon, "activation": activation, "channels_last": 1}


def stable_epsilon(channels: int, groups: int) -> float:
    """Return an epsilon for which rounding does not dominate.

    The kernels compute the variance as E[x^2] - E[x]^2: for few close numbers it is lost in their rounding.
    """
    return 1e-3 if channels // groups < 8 else 1e-5


def _group_norm_cases() -> Iterator[KernelCase]:
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
    _lower_group_norm,
    _group_norm_cases,
    first_use=("C=320 G=32 2x9x13 activation=1",),
    limits=group_limits,
    float32_inputs=frozenset({1, 2}),
    row_inputs=frozenset({0}),
)


def _lower_skip_group_norm(node: ir.Node) -> list[ir.Value | None]:
    """Insert the body; skip is (B,H,W,C), (B,1,1,C) or (B,C)."""
    x, skip, bias = input_of(node, 0), input_of(node, 3), optional_input(node, 4)
    if skip.shape is not None and skip.shape.rank() == 2:
        skip = insert(node, "Unsqueeze", [skip, constant(graph_of(node), [1, 2], np.int64, "axes_1_2")])
    total = insert(node, "Add", [x, skip], shape=x.shape)
    if bias is not None:
        total = insert(node, "Add", [total, bias], shape=x.shape)
    return [normalized_groups(node, total), total]


def _skip_group_norm_cases() -> Iterator[KernelCase]:
    cases = [(320, (3, 5, 7), *form) for form in product(("image", "row", "matrix"), (False, True), (1, 2), (0, 1))]
    cases += [(channels, (2, 9, 13), "image", True, 2, 1) for channels in (64, 512, 1280, 1920, 2560, 1024)]
    cases += [(640, image, "row", True, 2, 1) for image in ((1, 1, 1), (3, 1, 1), (3, 1, 7), (1, 64, 64))]
    for channels, image, form, biased, outputs, activation in cases:
        groups = 2 if channels == 1024 else 32
        skip = {"image": (*image, channels), "row": (image[0], 1, 1, channels), "matrix": (image[0], channels)}[form]
        vector = (channels,)
        yield KernelCase(
            "SkipGroupNorm",
            f"C={channels} G={groups} {'x'.join(map(str, image))} skip={form} bias={biased} outputs={outputs} "
            f"activation={activation}",
            ((*image, channels), vector, vector, skip, *([vector] if biased else [])),
            norm_attributes(groups, activation, stable_epsilon(channels, groups)),
            outputs,
        )


SKIP_GROUP_NORM = Contract(
    "SkipGroupNorm",
    _lower_skip_group_norm,
    _skip_group_norm_cases,
    first_use=("C=320 G=32 3x5x7 skip=image bias=True outputs=2 activation=1",),
    limits=group_limits,
    float32_inputs=frozenset({1, 2}),
    row_inputs=frozenset({0, 3}),
)


MEAN_AND_DEVIATION = frozenset({1, 2})
"""The outputs of the norms that only training reads."""


def sum_with_skip(node: ir.Node, x: ir.Value | None, skip: ir.Value | None, bias: ir.Value | None) -> ir.Value:
    """Insert x + skip + bias."""
    total = insert(node, "Add", [x, skip])
    return total if bias is None else insert(node, "Add", [total, bias])


def _lower_skip_layer_normalization(node: ir.Node) -> list[ir.Value | None]:
    x, skip, gamma = node.inputs[:3]
    beta, bias = optional_input(node, 3), optional_input(node, 4)
    total = sum_with_skip(node, x, skip, bias)
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-12)}
    return [insert(node, "LayerNormalization", [total, gamma, beta], attributes), None, None, total]


def _skip_layer_normalization_cases() -> Iterator[KernelCase]:
    widths = (8, 63, 64, 65, 320, 384, 640, 768, 1001, 1024, 1280, 2048, 5120, 12288)
    cases = [(width, (3, 7), True, True, 4) for width in widths]
    cases += [(320, (2, 77), *form) for form in product((False, True), (False, True), (1, 4))]
    cases += [(1280, rows, True, True, 4) for rows in ((1, 1), (3, 1), (1, 4096))]
    for width, rows, has_beta, has_bias, outputs in cases:
        x, vector = (*rows, width), (width,)
        yield KernelCase(
            "SkipLayerNormalization",
            f"D={width} {rows[0]}x{rows[1]} beta={has_beta} bias={has_bias} outputs={outputs}",
            (x, x, vector, vector if has_beta else None, vector if has_bias else None),
            {"epsilon": 1e-5},
            outputs,
        )
    for width, outputs in product((320, 1152), (1, 4)):  # positions, the same for every image
        vectors = ((width,),) * 3
        name = f"D={width} 3x7 skip=1x7 beta=True bias=True outputs={outputs}"
        shapes = ((3, 7, width), (1, 7, width), *vectors)
        yield KernelCase("SkipLayerNormalization", name, shapes, {"epsilon": 1e-5}, outputs)


SKIP_LAYER_NORMALIZATION = Contract(
    "SkipLayerNormalization",
    _lower_skip_layer_normalization,
    _skip_layer_normalization_cases,
    first_use=("D=320 3x7 beta=True bias=True outputs=4",),
    dtypes=FLOATS_AND_BFLOAT16,
    unused_outputs=MEAN_AND_DEVIATION,
    cpu=True,
    broadcasts=True,
)


def _lower_skip_simplified_layer_normalization(node: ir.Node) -> list[ir.Value | None]:
    x, skip, gamma = node.inputs[:3]
    total = sum_with_skip(node, x, skip, optional_input(node, 3))
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-12)}
    return [insert(node, "RMSNormalization", [total, gamma], attributes), None, None, total]


def _skip_simplified_layer_normalization_cases() -> Iterator[KernelCase]:
    cases = [(width, (3, 7), True, 4) for width in (8, 63, 64, 65, 288, 768, 1024, 2048, 4096, 5120)]
    cases += [(4096, (2, 304), *form) for form in product((False, True), (1, 4))]
    cases += [(1152, rows, False, 4) for rows in ((1, 1), (1, 4096))]
    for width, rows, has_bias, outputs in cases:
        x, vector = (*rows, width), (width,)
        yield KernelCase(
            "SkipSimplifiedLayerNormalization",
            f"D={width} {rows[0]}x{rows[1]} bias={has_bias} outputs={outputs}",
            (x, x, vector, vector if has_bias else None),
            {"epsilon": 1e-6},
            outputs,
        )
    for outputs in (1, 4):
        name, vectors = f"D=768 3x7 skip=1x7 bias=True outputs={outputs}", ((768,),) * 2
        shapes = ((3, 7, 768), (1, 7, 768), *vectors)
        yield KernelCase("SkipSimplifiedLayerNormalization", name, shapes, {"epsilon": 1e-6}, outputs)


SKIP_SIMPLIFIED_LAYER_NORMALIZATION = Contract(
    "SkipSimplifiedLayerNormalization",
    _lower_skip_simplified_layer_normalization,
    _skip_simplified_layer_normalization_cases,
    first_use=("D=768 3x7 bias=True outputs=4",),
    dtypes=FLOATS_AND_BFLOAT16,
    unused_outputs=MEAN_AND_DEVIATION,
    cpu=True,
    broadcasts=True,
)
