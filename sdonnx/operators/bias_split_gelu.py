"""BiasSplitGelu(x (B,S,2D), bias (2D,)): a, b = split(x + bias) -> a * gelu(b) (B,S,D); Shazeer 2020."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import input_of, insert, insert_multi, static_dim
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import KernelCase

__all__ = ["BIAS_SPLIT_GELU", "NO_KERNEL", "SPLIT_GELU_WIDTHS", "check_bias_split_gelu"]

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


def _limits(node: ir.Node) -> str | None:
    return check_bias_split_gelu(input_of(node, 0))


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, bias = node.inputs
    total = insert(node, "Add", [x, bias])
    value, gate = insert_multi(node, "Split", [total], {"axis": -1, "num_outputs": 2}, 2)
    return [insert(node, "Mul", [value, insert(node, "Gelu", [gate])])]


def _kernel_cases() -> Iterator[KernelCase]:
    for width, (batch, length) in product(sorted(SPLIT_GELU_WIDTHS), ((1, 1), (3, 7), (2, 77))):
        yield KernelCase("BiasSplitGelu", f"D={width} {batch}x{length}", ((batch, length, width), (width,)))
    yield KernelCase("BiasSplitGelu", "D=2560 1x4096", ((1, 4096, 2560), (2560,)))


BIAS_SPLIT_GELU = Contract(
    "BiasSplitGelu", _lower, _kernel_cases, first_use=("D=2560 3x7",), limits=_limits, broadcasts=True
)
