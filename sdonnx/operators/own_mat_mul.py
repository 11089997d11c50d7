"""sdonnx::MatMul(x (...,K), w (K,N), bias (N,), residual (...,N)) -> x @ w + bias + residual, or gelu(x @ w + bias).

`gelu` is the tanh approximation of Hendrycks and Gimpel 2016, which cuBLASLt computes; it excludes a residual, to which
cuBLASLt would apply it as well. bias and residual are optional. The kernel is cuBLASLt's, by kernels/src/mat_mul.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from sdonnx.graph.edit import input_of, insert, optional_input, static_dim
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import OWN_DOMAIN, Fill, KernelCase

__all__ = ["OWN_MAT_MUL", "check_own_mat_mul"]


def check_own_mat_mul(x: ir.Value, weight: ir.Value, bias: ir.Value | None) -> str | None:
    """Return why the kernel does not accept a product of x (...,K) and a weight (K,N), None if it does."""
    if weight.shape is None or weight.shape.rank() != 2:
        return "the second factor is not a matrix"
    inner, outer = static_dim(weight, 0), static_dim(weight, 1)
    if inner is None or outer is None or inner % 8 or outer % 8:
        return f"a weight of {inner} x {outer}: the kernel accepts multiples of 8"
    if bias is not None and (bias.shape is None or bias.shape.rank() != 1 or static_dim(bias, 0) != outer):
        return "the bias is not a vector with a number for each column"
    failures = (OWN_MAT_MUL.check_dtype(value) for value in (x, weight, bias) if value is not None)
    return next(filter(None, failures), None)


def _limits(node: ir.Node) -> str | None:
    if node.attributes.get_int("gelu", 0) and optional_input(node, 3) is not None:
        return "gelu excludes a residual"
    return check_own_mat_mul(input_of(node, 0), input_of(node, 1), optional_input(node, 2))


def _lower(node: ir.Node) -> list[ir.Value | None]:
    total = insert(node, "MatMul", [node.inputs[0], node.inputs[1]], shape=node.outputs[0].shape)
    for index in (2, 3):
        if (term := optional_input(node, index)) is not None:
            total = insert(node, "Add", [total, term], shape=node.outputs[0].shape)
    if node.attributes.get_int("gelu", 0):
        total = insert(node, "Gelu", [total], {"approximate": "tanh"})
    return [total]


def _kernel_cases() -> Iterator[KernelCase]:
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
        yield KernelCase(
            "MatMul",
            f"{'x'.join(map(str, rows))} {inner}x{outer} bias={has_bias} residual={has_residual} gelu={gelu}",
            (
                (*rows, inner),
                (inner, outer),
                (outer,) if has_bias else None,
                (*rows, outer) if has_residual else None,
            ),
            {"gelu": gelu},
            fills={1: Fill.UNIT_GAIN_COLUMNS},
            domain=OWN_DOMAIN,
        )


OWN_MAT_MUL = Contract(
    "MatMul",
    _lower,
    _kernel_cases,
    first_use=("3x7 64x320 bias=True residual=True gelu=0", "3x7 64x320 bias=True residual=False gelu=1"),
    limits=_limits,
    domain=OWN_DOMAIN,
    dtypes=frozenset({ir.DataType.FLOAT16}),
    row_inputs=frozenset({0, 3}),
    expensive=True,
)
