"""Elementwise operators of ONNX Runtime: BiasAdd, BiasSplitGelu, FastGelu and QuickGelu.

BiasAdd(x (B,S,C), bias (C,), skip (B,S,C)) -> x + bias + skip.

BiasSplitGelu(x (B,S,2D), bias (2D,)): a, b = split(x + bias) -> a * gelu(b) (B,S,D); Shazeer 2020.

FastGelu(x (...,D), bias (D,)) -> gelu(x + bias) by the tanh approximation; Hendrycks and Gimpel 2016.

QuickGelu(x (...,D)) -> x * sigmoid(alpha x), alpha = 1.702; Hendrycks and Gimpel 2016, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import constant, dtype_of, input_of, insert, insert_multi, optional_input, required, static_dim
from sdonnx.operators.contract import FLOATS_AND_BFLOAT16, Contract
from sdonnx.operators.kernel_case import KernelCase

__all__ = [
    "BIAS_ADD",
    "BIAS_SPLIT_GELU",
    "FAST_GELU",
    "NO_KERNEL",
    "QUICK_GELU",
    "QUICK_GELU_ALPHA",
    "SPLIT_GELU_WIDTHS",
    "check_bias_split_gelu",
    "check_fast_gelu",
]


def _lower_bias_add(node: ir.Node) -> list[ir.Value | None]:
    x, bias, skip = node.inputs
    return [insert(node, "Add", [insert(node, "Add", [x, bias]), skip])]


def _bias_add_cases() -> Iterator[KernelCase]:
    sizes = [*product((1, 8, 63, 320, 321, 640, 1280, 2560), ((1, 1), (3, 7))), *product((320, 1001), ((1, 4096),))]
    for channels, (batch, length) in sizes:
        x = (batch, length, channels)
        yield KernelCase("BiasAdd", f"C={channels} {batch}x{length}", (x, (channels,), x))


BIAS_ADD = Contract("BiasAdd", _lower_bias_add, _bias_add_cases, first_use=("C=320 3x7",), broadcasts=True)


NO_KERNEL = "has no kernel"
"""Part of the reason why layers of a width are left, which no export can change."""

# bias_split_gelu_impl.cu instantiates its kernel only for these widths of x (twice the hidden width).
SPLIT_GELU_WIDTHS = frozenset({2560, 5120, 6144, 10240, 12288})


def check_bias_split_gelu(x: ir.Value) -> str | None:
    """Return why BiasSplitGelu's kernel does not accept x (B,S,2D), None if it does."""
    width = static_dim(x, -1)
    if x.shape is None or x.shape.rank() != 3:
        return "the input does not have 3 dimensions"
    if width not in SPLIT_GELU_WIDTHS:
        return f"the width {width} {NO_KERNEL}, which exist for {', '.join(map(str, sorted(SPLIT_GELU_WIDTHS)))}"
    return BIAS_SPLIT_GELU.check_dtype(x)


def _bias_split_gelu_limits(node: ir.Node) -> str | None:
    return check_bias_split_gelu(input_of(node, 0))


def _lower_bias_split_gelu(node: ir.Node) -> list[ir.Value | None]:
    x, bias = node.inputs
    total = insert(node, "Add", [x, bias])
    value, gate = insert_multi(node, "Split", [total], {"axis": -1, "num_outputs": 2}, 2)
    return [insert(node, "Mul", [value, insert(node, "Gelu", [gate])])]


def _bias_split_gelu_cases() -> Iterator[KernelCase]:
    for width, (batch, length) in product(sorted(SPLIT_GELU_WIDTHS), ((1, 1), (3, 7), (2, 77))):
        yield KernelCase("BiasSplitGelu", f"D={width} {batch}x{length}", ((batch, length, width), (width,)))
    yield KernelCase("BiasSplitGelu", "D=2560 1x4096", ((1, 4096, 2560), (2560,)))


BIAS_SPLIT_GELU = Contract(
    "BiasSplitGelu",
    _lower_bias_split_gelu,
    _bias_split_gelu_cases,
    first_use=("D=2560 3x7",),
    limits=_bias_split_gelu_limits,
    broadcasts=True,
)


def check_fast_gelu(x: ir.Value) -> str | None:
    """Return why FastGelu's kernel does not accept x (..., D), None if it does.

    fast_gelu_impl.cu works on pairs in fp16. Without pairs it also computes the tanh in fp16, with twice the error of a
    rounded result (relative error 4e-3 at a width of 63, H200).
    """
    width = static_dim(x, -1)
    if width is None or width % 2:
        return f"the width {width}: the kernel is exact only for even widths"
    return FAST_GELU.check_dtype(x)


def _fast_gelu_limits(node: ir.Node) -> str | None:
    return check_fast_gelu(input_of(node, 0))


def _lower_fast_gelu(node: ir.Node) -> list[ir.Value | None]:
    x, bias = node.inputs[0], optional_input(node, 1)
    total = x if bias is None else insert(node, "Add", [x, bias])
    return [insert(node, "Gelu", [total], {"approximate": "tanh"})]


def _fast_gelu_cases() -> Iterator[KernelCase]:
    for width, rows, has_bias in product((8, 62, 1152, 4608, 10240), ((1, 1), (3, 7), (2, 304)), (False, True)):
        name = f"D={width} {rows[0]}x{rows[1]} bias={has_bias}"
        yield KernelCase("FastGelu", name, ((*rows, width), (width,) if has_bias else None))


FAST_GELU = Contract(
    "FastGelu",
    _lower_fast_gelu,
    _fast_gelu_cases,
    first_use=("D=1152 3x7 bias=True",),
    limits=_fast_gelu_limits,
    dtypes=FLOATS_AND_BFLOAT16,
    cpu=True,
    broadcasts=True,
)


QUICK_GELU_ALPHA = 1.702


def _lower_quick_gelu(node: ir.Node) -> list[ir.Value | None]:
    x, alpha = input_of(node, 0), node.attributes.get_float("alpha", QUICK_GELU_ALPHA)
    dtype = dtype_of(x)
    number = constant(required(node.graph), alpha, dtype.numpy(), f"alpha_{alpha:g}_{dtype.name.lower()}")
    return [insert(node, "Mul", [x, insert(node, "Sigmoid", [insert(node, "Mul", [x, number])])])]


def _quick_gelu_cases() -> Iterator[KernelCase]:
    for width, rows in product((1, 63, 128, 3072, 4096), ((1, 1), (3, 7), (2, 77))):
        name = f"D={width} {rows[0]}x{rows[1]}"
        yield KernelCase("QuickGelu", name, ((*rows, width),), {"alpha": QUICK_GELU_ALPHA})


QUICK_GELU = Contract(
    "QuickGelu", _lower_quick_gelu, _quick_gelu_cases, first_use=("D=3072 2x77",), cpu=True, broadcasts=True
)
