"""sdonnx::BiasSplitGelu(x (...,2D), bias (2D,)): a, b = split(x + bias) -> a * gelu(b) (...,D); Shazeer 2020.

ONNX Runtime's operator of this name has kernels for five widths (`bias_split_gelu.py`); this one has no list of widths,
and the bias is optional. The kernel is kernels/src/bias_split_gelu.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import input_of, insert, insert_multi, optional_input, static_dim
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import OWN_DOMAIN, KernelCase

__all__ = ["OWN_BIAS_SPLIT_GELU", "check_own_bias_split_gelu"]


def check_own_bias_split_gelu(x: ir.Value, bias: ir.Value | None) -> str | None:
    """Return why the kernel does not accept x (...,2D) and a bias (2D,), None if it does.

    A thread computes eight columns, so D is a multiple of 8.
    """
    width = static_dim(x, -1) if bias is None else static_dim(bias, 0)
    if width is None or width % 16:
        return f"the width {width}: the kernel accepts multiples of 16"
    if bias is not None and bias.shape is not None and bias.shape.rank() != 1:
        return "the bias is not a vector"
    failures = (OWN_BIAS_SPLIT_GELU.check_dtype(value) for value in (x, bias) if value is not None)
    return next(filter(None, failures), None)


def _limits(node: ir.Node) -> str | None:
    return check_own_bias_split_gelu(input_of(node, 0), optional_input(node, 1))


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, bias = input_of(node, 0), optional_input(node, 1)
    total = x if bias is None else insert(node, "Add", [x, bias])
    value, gate = insert_multi(node, "Split", [total], {"axis": -1, "num_outputs": 2}, 2)
    return [insert(node, "Mul", [value, insert(node, "Gelu", [gate])])]


def _kernel_cases() -> Iterator[KernelCase]:
    # One vector; blocks of 128, 160 and 256 threads, whole and not; widths with and without a kernel of ONNX Runtime.
    widths = (16, 80, 512, 2048, 2560, 3072, 4096, 5120, 10240)
    cases = [*product(widths, ((3, 7),), (True,)), *product((80, 2560), ((1, 1), (2, 3, 5)), (False, True))]
    cases += [(64, rows, True) for rows in ((1, 1023), (1, 1024), (1, 1027), (32, 33))]
    for width, rows, has_bias in cases:
        name = f"D={width} {'x'.join(map(str, rows))} bias={has_bias}"
        shapes = ((*rows, width), (width,) if has_bias else None)
        yield KernelCase("BiasSplitGelu", name, shapes, domain=OWN_DOMAIN)
    yield KernelCase("BiasSplitGelu", "D=2560 0 rows", ((2, 0, 2560), (2560,)), domain=OWN_DOMAIN)


OWN_BIAS_SPLIT_GELU = Contract(
    "BiasSplitGelu",
    _lower,
    _kernel_cases,
    first_use=("D=2560 3x7 bias=True", "D=64 1x1027 bias=True"),
    limits=_limits,
    domain=OWN_DOMAIN,
    dtypes=frozenset({ir.DataType.FLOAT16}),
    broadcasts=True,
)
