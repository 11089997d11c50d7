"""sdonnx::StackedMatMul: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from support.operator_tests import OperatorTest

from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.own_stacked_mat_mul import check_own_stacked_mat_mul

OPERATOR_TEST = OperatorTest(
    torch=lambda inputs, _: [torch.einsum("bsk,gkn->gbsn", *inputs)],
    refused=(
        KernelCase("StackedMatMul", "K=12", ((2, 3, 12), (3, 12, 16)), domain="sdonnx"),
        KernelCase("StackedMatMul", "N=12", ((2, 3, 16), (3, 16, 12)), domain="sdonnx"),
        KernelCase("StackedMatMul", "one weight", ((2, 3, 16), (16, 16)), domain="sdonnx"),
    ),
)


def value(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


@pytest.mark.parametrize(
    ("x", "weights", "reason"),
    [
        (value("N", 16), value(3, 16, 16), "the first factor is not known to have three axes"),
        (value("B", "S", 16), value(16, 16), "the weights are not a stack of matrices"),
        (value("B", "S", 12), value(3, 12, 16), "weights of 12 x 16: the kernel accepts multiples of 8"),
        (value("B", "S", 16), value(3, 16, "N"), "weights of 16 x None: the kernel accepts multiples of 8"),
        (value("B", "S", 16, dtype=ir.DataType.FLOAT), value(3, 16, 16), "the input is FLOAT"),
        (value("B", "S", 16), value(3, 16, 16, dtype=ir.DataType.FLOAT), "the input is FLOAT"),
    ],
)
def test_refuses(x: ir.Value, weights: ir.Value, reason: str) -> None:
    assert reason in (check_own_stacked_mat_mul(x, weights) or "")
