"""QuickGelu(x (...,D)) -> x * sigmoid(alpha x), alpha = 1.702; Hendrycks and Gimpel 2016, section 2."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import constant, dtype_of, input_of, insert, required
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import KernelCase

__all__ = ["QUICK_GELU", "QUICK_GELU_ALPHA"]

QUICK_GELU_ALPHA = 1.702


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, alpha = input_of(node, 0), node.attributes.get_float("alpha", QUICK_GELU_ALPHA)
    dtype = dtype_of(x)
    number = constant(required(node.graph), alpha, dtype.numpy(), f"alpha_{alpha:g}_{dtype.name.lower()}")
    return [insert(node, "Mul", [x, insert(node, "Sigmoid", [insert(node, "Mul", [x, number])])])]


def _kernel_cases() -> Iterator[KernelCase]:
    for width, rows in product((1, 63, 128, 3072, 4096), ((1, 1), (3, 7), (2, 77))):
        name = f"D={width} {rows[0]}x{rows[1]}"
        yield KernelCase("QuickGelu", name, ((*rows, width),), {"alpha": QUICK_GELU_ALPHA})


QUICK_GELU = Contract("QuickGelu", _lower, _kernel_cases, first_use=("D=3072 2x77",), cpu=True, broadcasts=True)
