"""MatMul and StackedMatMul of the domain sdonnx.

MatMul(x (...,K), w (K,N), bias (N,), residual (...,N)) -> x @ w + bias + residual, or gelu(x @ w + bias).

`gelu` is the tanh approximation of Hendrycks and Gimpel 2016, which cuBLASLt computes; it excludes a residual, to which
cuBLASLt would apply it as well. bias and residual are optional. The kernel is cuBLASLt's, by kernels/src/mat_mul.cuh.

StackedMatMul(x (B,S,K), weights (G,K,N)) -> x @ weights[g] for all G weights (G,B,S,N).

The kernel is cuBLASLt's, one strided batch of matmuls that share x, by kernels/src/mat_mul.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, graph_of, input_of, insert, optional_input, static_dim
from sdonnx.operators.contract import SdonnxContract, on_inputs, sdonnx_case
from sdonnx.operators.kernel_case import Fill, KernelCase

__all__ = ["MAT_MUL", "STACKED_MAT_MUL", "check_mat_mul", "check_stacked_mat_mul", "check_weight"]


def check_weight(weight: ir.Value, bias: ir.Value | None, columns: int, multiple: int) -> str | None:
    """Return why the kernels do not accept the sizes of a weight and a bias, None if they do.

    Args:
        weight: the second factor, a matrix.
        bias: a number for each column of the result; None for none.
        columns: the axis of the weight, 0 or 1, that becomes the columns of the result.
        multiple: what both sizes of the weight are multiples of.
    """
    if weight.shape is None or weight.shape.rank() != 2:
        return "the second factor is not a matrix"
    sizes = static_dim(weight, 0), static_dim(weight, 1)
    if any(size is None or size % multiple for size in sizes):
        return f"a weight of {sizes[0]} x {sizes[1]}: the kernel accepts multiples of {multiple}"
    if bias is not None and (bias.shape is None or bias.shape.rank() != 1 or static_dim(bias, 0) != sizes[columns]):
        return "the bias is not a vector with a number for each column"
    return None


def check_mat_mul(x: ir.Value, weight: ir.Value, bias: ir.Value | None) -> str | None:
    """Return why the kernel does not accept a matmul of x (...,K) and a weight (K,N), None if it does."""
    return check_weight(weight, bias, columns=1, multiple=8) or MAT_MUL.check_dtypes(x, weight, bias)


def _mat_mul_limits(node: ir.Node) -> str | None:
    if node.attributes.get_int("gelu", 0) and optional_input(node, 3) is not None:
        return "gelu excludes a residual"
    return check_mat_mul(input_of(node, 0), input_of(node, 1), optional_input(node, 2))


def _lower_mat_mul(node: ir.Node) -> list[ir.Value | None]:
    total = insert(node, "MatMul", [node.inputs[0], node.inputs[1]], shape=node.outputs[0].shape)
    for index in (2, 3):
        if (term := optional_input(node, index)) is not None:
            total = insert(node, "Add", [total, term], shape=node.outputs[0].shape)
    if node.attributes.get_int("gelu", 0):
        total = insert(node, "Gelu", [total], {"approximate": "tanh"})
    return [total]


def _mat_mul_cases() -> Iterator[KernelCase]:
    forms = (
        (False, False, 0),
        (True, False, 0),
        (False, True, 0),
        (True, True, 0),
        (False, False, 1),
        (True, False, 1),
    )
    cases: list[tuple[int, int, tuple[int, ...], bool, bool, int]] = [(64, 320, (3, 7), *form) for form in forms]
    cases += [(*sizes, (2, 13), True, False, 1) for sizes in ((1152, 4608), (8, 8), (40, 72))]
    cases += [(320, 320, rows, True, True, 0) for rows in ((1, 1), (1, 304), (32, 3), (2, 3, 5))]
    for inner, outer, rows, has_bias, has_residual, gelu in cases:
        yield sdonnx_case(
            "MatMul",
            f"{'x'.join(map(str, rows))} {inner}x{outer} bias={has_bias} residual={has_residual} gelu={gelu}",
            ((*rows, inner), (inner, outer), (outer,) if has_bias else None, (*rows, outer) if has_residual else None),
            {"gelu": gelu},
            fills={1: Fill.UNIT_GAIN_COLUMNS},
        )


MAT_MUL = SdonnxContract(
    "MatMul",
    _lower_mat_mul,
    _mat_mul_cases,
    first_use=("3x7 64x320 bias=True residual=True gelu=0", "3x7 64x320 bias=True residual=False gelu=1"),
    limits=_mat_mul_limits,
    row_inputs=frozenset({0, 3}),
    expensive=True,
)


def check_stacked_mat_mul(x: ir.Value, weights: ir.Value) -> str | None:
    """Return why the kernel does not accept matmuls of x (B,S,K) and weights (G,K,N), None if it does."""
    if len(dims(x) or ()) != 3:
        return "the first factor is not known to have three axes"
    if len(dims(weights) or ()) != 3:
        return "the weights are not a stack of matrices"
    inner, outer = static_dim(weights, 1), static_dim(weights, 2)
    if inner is None or outer is None or inner % 8 or outer % 8:
        return f"weights of {inner} x {outer}: the kernel accepts multiples of 8"
    return STACKED_MAT_MUL.check_dtypes(x, weights)


def _lower_stacked_mat_mul(node: ir.Node) -> list[ir.Value | None]:
    axes = constant(graph_of(node), [1], np.int64, "integers_1")
    weights = insert(node, "Unsqueeze", [input_of(node, 1), axes])
    return [insert(node, "MatMul", [input_of(node, 0), weights], shape=node.outputs[0].shape)]


def _stacked_mat_mul_cases() -> Iterator[KernelCase]:
    """One weight and several; one row, and rows that are no multiple of a tile; sizes below and above a tile."""
    sizes = [(3, 64, 320, (3, 7)), (1, 64, 64, (2, 5)), (2, 40, 72, (1, 1)), (3, 8, 8, (2, 13))]
    sizes += [(3, 320, 320, rows) for rows in ((1, 1), (1, 304), (32, 3), (2, 65))]
    for count, inner, outer, rows in sizes:
        yield sdonnx_case(
            "StackedMatMul",
            f"{'x'.join(map(str, rows))} {count}x{inner}x{outer}",
            ((*rows, inner), (count, inner, outer)),
            fills={1: Fill.UNIT_GAIN_COLUMNS},
        )


STACKED_MAT_MUL = SdonnxContract(
    "StackedMatMul",
    _lower_stacked_mat_mul,
    _stacked_mat_mul_cases,
    first_use=("3x7 3x64x320",),
    limits=on_inputs(check_stacked_mat_mul, 0, 1),
    output_rank=4,
    expensive=True,
)
