"""SkipLayerNormalization(x, skip, gamma, beta, bias): s = x + skip + bias -> LayerNorm(s), -, -, s."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import insert, optional_input
from sdonnx.operators.contract import FLOATS_AND_BFLOAT16, Contract
from sdonnx.operators.kernel_case import KernelCase

__all__ = ["MEAN_AND_DEVIATION", "SKIP_LAYER_NORMALIZATION", "sum_with_skip"]

MEAN_AND_DEVIATION = frozenset({1, 2})
"""The outputs of the norms that only training reads."""


def sum_with_skip(node: ir.Node, x: ir.Value | None, skip: ir.Value | None, bias: ir.Value | None) -> ir.Value:
    """Insert x + skip + bias."""
    total = insert(node, "Add", [x, skip])
    return total if bias is None else insert(node, "Add", [total, bias])


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, skip, gamma = node.inputs[:3]
    beta, bias = optional_input(node, 3), optional_input(node, 4)
    total = sum_with_skip(node, x, skip, bias)
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-12)}
    return [insert(node, "LayerNormalization", [total, gamma, beta], attributes), None, None, total]


def _kernel_cases() -> Iterator[KernelCase]:
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
    _lower,
    _kernel_cases,
    first_use=("D=320 3x7 beta=True bias=True outputs=4",),
    dtypes=FLOATS_AND_BFLOAT16,
    unused_outputs=MEAN_AND_DEVIATION,
    cpu=True,
    broadcasts=True,
)
