"""SkipGroupNorm(x (B,H,W,C), gamma, beta, skip, bias): s = x + skip + bias -> GroupNorm(s), s."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, graph_of, input_of, insert, optional_input
from sdonnx.operators.contract import Contract
from sdonnx.operators.group_norm import group_limits, norm_attributes, normalized_groups, stable_epsilon
from sdonnx.operators.kernel_case import KernelCase

__all__ = ["SKIP_GROUP_NORM"]


def _lower(node: ir.Node) -> list[ir.Value | None]:
    """Insert the body; skip is (B,H,W,C), (B,1,1,C) or (B,C)."""
    x, skip, bias = input_of(node, 0), input_of(node, 3), optional_input(node, 4)
    if skip.shape is not None and skip.shape.rank() == 2:
        skip = insert(node, "Unsqueeze", [skip, constant(graph_of(node), [1, 2], np.int64, "axes_1_2")])
    total = insert(node, "Add", [x, skip], shape=x.shape)
    if bias is not None:
        total = insert(node, "Add", [total, bias], shape=x.shape)
    return [normalized_groups(node, total), total]


def _kernel_cases() -> Iterator[KernelCase]:
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
    _lower,
    _kernel_cases,
    first_use=("C=320 G=32 3x5x7 skip=image bias=True outputs=2 activation=1",),
    limits=group_limits,
    float32_inputs=frozenset({1, 2}),
    row_inputs=frozenset({0, 3}),
)
