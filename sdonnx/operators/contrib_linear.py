"""NhwcConv and FusedMatMul of ONNX Runtime.

NhwcConv(x (B,H,W,C), w (M,kH,kW,C/group), bias (M,)) -> (B,H,W,M).

FusedMatMul(a, b) -> alpha * (a @ b); no rule emits its transpositions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import constant, dtype_of, graph_of, insert
from sdonnx.operators.contract import FLOATS_AND_BFLOAT16, Contract, channels_last_conv
from sdonnx.operators.kernel_case import Fill, KernelCase

__all__ = [
    "FUSED_MAT_MUL",
    "NHWC_CONV",
]

_CONVOLUTIONS = {  # channels in and out, kernel, strides, pads, dilations, groups
    "first": (4, 320, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "last": (320, 4, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "wide": (640, 640, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "halving": (320, 320, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "halving unpadded": (128, 128, (3, 3), (2, 2), (0, 0), (1, 1), 1),
    "1x1": (8, 8, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1 strided": (32, 64, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "5x5": (32, 64, (5, 5), (1, 1), (2, 2), (1, 1), 1),
    "1x3": (32, 64, (1, 3), (1, 1), (0, 1), (1, 1), 1),
    "stride of 3": (32, 64, (3, 3), (3, 3), (1, 1), (1, 1), 1),
    "oblong stride": (32, 64, (3, 3), (1, 2), (1, 1), (1, 1), 1),
    "dilated": (32, 64, (3, 3), (1, 1), (2, 2), (2, 2), 1),
    "grouped": (32, 64, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "depthwise": (32, 32, (3, 3), (1, 1), (1, 1), (1, 1), 32),
    "odd channels": (3, 5, (3, 3), (1, 1), (1, 1), (1, 1), 1),
}


def _lower_nhwc_conv(node: ir.Node) -> list[ir.Value | None]:
    return [channels_last_conv(node, node.attributes)]


def _nhwc_conv_cases() -> Iterator[KernelCase]:
    cases = list(product(_CONVOLUTIONS, ((2, 10, 14),), (False, True)))
    cases += [*product(("5x5", "halving"), ((1, 7, 7), (3, 1, 9), (1, 1, 1)), (True,)), ("first", (1, 64, 64), True)]
    for name, image, biased in cases:
        channels, out, kernel, strides, pads, dilations, group = _CONVOLUTIONS[name]
        yield KernelCase(
            "NhwcConv",
            f"{name} {'x'.join(map(str, image))} bias={biased}",
            ((*image, channels), (out, *kernel, channels // group), *([(out,)] if biased else [])),
            {
                "kernel_shape": list(kernel),
                "strides": list(strides),
                "pads": [*pads, *pads],
                "dilations": list(dilations),
                "group": group,
            },
            weights=(1, 2),
            fills={1: Fill.UNIT_GAIN},
        )


NHWC_CONV = Contract(
    "NhwcConv",
    _lower_nhwc_conv,
    _nhwc_conv_cases,
    first_use=("halving 2x10x14 bias=True",),
    row_inputs=frozenset({0}),
    expensive=True,
)


def _lower_fused_mat_mul(node: ir.Node) -> list[ir.Value | None]:
    result = insert(node, "MatMul", [node.inputs[0], node.inputs[1]], shape=node.outputs[0].shape)
    dtype = dtype_of(result)
    alpha = node.attributes.get_float("alpha", 1.0)
    factor = constant(graph_of(node), alpha, dtype.numpy(), f"alpha_{alpha:g}_{dtype.name.lower()}")
    return [insert(node, "Mul", [result, factor])]


def _fused_mat_mul_cases() -> Iterator[KernelCase]:
    for inner, outer, rows in product((64, 4096), (64, 1152), ((1, 1), (3, 7), (2, 304))):
        shapes = ((*rows, inner), (inner, outer))
        name = f"{rows[0]}x{rows[1]} {inner}x{outer}"
        yield KernelCase("FusedMatMul", name, shapes, {"alpha": 2.0**-6}, weights=(1,))


FUSED_MAT_MUL = Contract(
    "FusedMatMul",
    _lower_fused_mat_mul,
    _fused_mat_mul_cases,
    first_use=("3x7 64x1152",),
    dtypes=FLOATS_AND_BFLOAT16,
    cpu=True,
    expensive=True,
)
