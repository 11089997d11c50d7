"""SkipSimplifiedLayerNormalization(x, skip, gamma, bias): s = x + skip + bias -> RMSNorm(s), -, -, s.

Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import insert, optional_input
from sdonnx.operators.contract import FLOATS_AND_BFLOAT16, Contract
from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.skip_layer_normalization import MEAN_AND_DEVIATION, sum_with_skip

__all__ = ["SKIP_SIMPLIFIED_LAYER_NORMALIZATION"]


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, skip, gamma = node.inputs[:3]
    total = sum_with_skip(node, x, skip, optional_input(node, 3))
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-12)}
    return [insert(node, "RMSNormalization", [total, gamma], attributes), None, None, total]


def _kernel_cases() -> Iterator[KernelCase]:
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
    _lower,
    _kernel_cases,
    first_use=("D=768 3x7 bias=True outputs=4",),
    dtypes=FLOATS_AND_BFLOAT16,
    unused_outputs=MEAN_AND_DEVIATION,
    cpu=True,
    broadcasts=True,
)
