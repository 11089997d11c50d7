"""BiasAdd(x (B,S,C), bias (C,), skip (B,S,C)) -> x + bias + skip."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import insert
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import KernelCase

__all__ = ["BIAS_ADD"]


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, bias, skip = node.inputs
    return [insert(node, "Add", [insert(node, "Add", [x, bias]), skip])]


def _kernel_cases() -> Iterator[KernelCase]:
    sizes = [*product((1, 8, 63, 320, 321, 640, 1280, 2560), ((1, 1), (3, 7))), *product((320, 1001), ((1, 4096),))]
    for channels, (batch, length) in sizes:
        x = (batch, length, channels)
        yield KernelCase("BiasAdd", f"C={channels} {batch}x{length}", (x, (channels,), x))


BIAS_ADD = Contract("BiasAdd", _lower, _kernel_cases, first_use=("C=320 3x7",), broadcasts=True)
