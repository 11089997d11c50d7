"""sdonnx::StackedMatMul(x (B,S,K), weights (G,K,N)) -> x @ weights[g] for all G weights (G,B,S,N).

The kernel is cuBLASLt's, one strided batch of products that share x, by kernels/src/mat_mul.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, graph_of, input_of, insert, static_dim
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import OWN_DOMAIN, Fill, KernelCase

__all__ = ["OWN_STACKED_MAT_MUL", "check_own_stacked_mat_mul"]


def check_own_stacked_mat_mul(x: ir.Value, weights: ir.Value) -> str | None:
    """Return why the kernel does not accept products of x (B,S,K) and weights (G,K,N), None if it does."""
    if len(dims(x) or ()) != 3:
        return "the first factor is not known to have three axes"
    if len(dims(weights) or ()) != 3:
        return "the weights are not a stack of matrices"
    inner, outer = static_dim(weights, 1), static_dim(weights, 2)
    if inner is None or outer is None or inner % 8 or outer % 8:
        return f"weights of {inner} x {outer}: the kernel accepts multiples of 8"
    failures = (OWN_STACKED_MAT_MUL.check_dtype(value) for value in (x, weights))
    return next(filter(None, failures), None)


def _limits(node: ir.Node) -> str | None:
    return check_own_stacked_mat_mul(input_of(node, 0), input_of(node, 1))


def _lower(node: ir.Node) -> list[ir.Value | None]:
    axes = constant(graph_of(node), [1], np.int64, "integers_1")
    weights = insert(node, "Unsqueeze", [input_of(node, 1), axes])
    return [insert(node, "MatMul", [input_of(node, 0), weights], shape=node.outputs[0].shape)]


def _kernel_cases() -> Iterator[KernelCase]:
    """One weight and several; one row, and rows that are no multiple of a tile; sizes below and above a tile."""
    sizes = [(3, 64, 320, (3, 7)), (1, 64, 64, (2, 5)), (2, 40, 72, (1, 1)), (3, 8, 8, (2, 13))]
    sizes += [(3, 320, 320, rows) for rows in ((1, 1), (1, 304), (32, 3), (2, 65))]
    for count, inner, outer, rows in sizes:
        yield KernelCase(
            "StackedMatMul",
            f"{'x'.join(map(str, rows))} {count}x{inner}x{outer}",
            ((*rows, inner), (count, inner, outer)),
            fills={1: Fill.UNIT_GAIN_COLUMNS},
            domain=OWN_DOMAIN,
        )


OWN_STACKED_MAT_MUL = Contract(
    "StackedMatMul",
    _lower,
    _kernel_cases,
    first_use=("3x7 3x64x320",),
    limits=_limits,
    domain=OWN_DOMAIN,
    dtypes=frozenset({ir.DataType.FLOAT16}),
    output_rank=4,
    expensive=True,
)
