"""FusedMatMul(a, b) -> alpha * (a @ b); no rule emits its transpositions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import constant, dtype_of, graph_of, insert
from sdonnx.operators.contract import FLOATS_AND_BFLOAT16, Contract
from sdonnx.operators.kernel_case import KernelCase

__all__ = ["FUSED_MAT_MUL"]


def _lower(node: ir.Node) -> list[ir.Value | None]:
    result = insert(node, "MatMul", [node.inputs[0], node.inputs[1]], shape=node.outputs[0].shape)
    dtype = dtype_of(result)
    alpha = node.attributes.get_float("alpha", 1.0)
    factor = constant(graph_of(node), alpha, dtype.numpy(), f"alpha_{alpha:g}_{dtype.name.lower()}")
    return [insert(node, "Mul", [result, factor])]


def _kernel_cases() -> Iterator[KernelCase]:
    for inner, outer, rows in product((64, 4096), (64, 1152), ((1, 1), (3, 7), (2, 304))):
        shapes = ((*rows, inner), (inner, outer))
        name = f"{rows[0]}x{rows[1]} {inner}x{outer}"
        yield KernelCase("FusedMatMul", name, shapes, {"alpha": 2.0**-6}, weights=(1,))


FUSED_MAT_MUL = Contract(
    "FusedMatMul",
    _lower,
    _kernel_cases,
    first_use=("3x7 64x1152",),
    dtypes=FLOATS_AND_BFLOAT16,
    cpu=True,
    expensive=True,
)
