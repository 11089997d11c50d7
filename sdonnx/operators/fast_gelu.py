"""FastGelu(x (...,D), bias (D,)) -> gelu(x + bias) by the tanh approximation; Hendrycks and Gimpel 2016."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import input_of, insert, optional_input, static_dim
from sdonnx.operators.contract import FLOATS_AND_BFLOAT16, Contract
from sdonnx.operators.kernel_case import KernelCase

__all__ = ["FAST_GELU", "check_fast_gelu"]


def check_fast_gelu(x: ir.Value) -> str | None:
    """Return why FastGelu's kernel does not accept x (..., D), None if it does.

    fast_gelu_impl.cu works on pairs in fp16. Without pairs it also computes the tanh in fp16, with twice the error of a
    rounded result (relative error 4e-3 at a width of 63, H200).
    """
    width = static_dim(x, -1)
    if width is None or width % 2:
        return f"the width {width}: the kernel is exact only for even widths"
    return FAST_GELU.check_dtype(x)


def _limits(node: ir.Node) -> str | None:
    return check_fast_gelu(input_of(node, 0))


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, bias = node.inputs[0], optional_input(node, 1)
    total = x if bias is None else insert(node, "Add", [x, bias])
    return [insert(node, "Gelu", [total], {"approximate": "tanh"})]


def _kernel_cases() -> Iterator[KernelCase]:
    for width, rows, has_bias in product((8, 62, 1152, 4608, 10240), ((1, 1), (3, 7), (2, 304)), (False, True)):
        name = f"D={width} {rows[0]}x{rows[1]} bias={has_bias}"
        yield KernelCase("FastGelu", name, ((*rows, width), (width,) if has_bias else None))


FAST_GELU = Contract(
    "FastGelu",
    _lower,
    _kernel_cases,
    first_use=("D=1152 3x7 bias=True",),
    limits=_limits,
    dtypes=FLOATS_AND_BFLOAT16,
    cpu=True,
    broadcasts=True,
)
