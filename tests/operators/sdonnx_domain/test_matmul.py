"""MatMul, StackedMatMul: the reference bodies against torch, and the limits of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest, half

from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.sdonnx_domain.matmul import check_mat_mul, check_stacked_mat_mul


def mat_mul(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, weight, bias, residual = inputs
    total = F.linear(x, weight.T, bias)
    total = total if residual is None else total + residual
    return [F.gelu(total, approximate="tanh") if attributes["gelu"] else total]


MAT_MUL_TEST = OperatorTest(
    torch=mat_mul,
    refused=(
        KernelCase("MatMul", "K=12", ((2, 3, 12), (12, 16)), {"gelu": 0}, domain="sdonnx"),
        KernelCase("MatMul", "N=12", ((2, 3, 16), (16, 12)), {"gelu": 0}, domain="sdonnx"),
        KernelCase("MatMul", "gelu", ((2, 3, 16), (16, 16), None, (2, 3, 16)), {"gelu": 1}, domain="sdonnx"),
    ),
)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "reason"),
    [
        (half("B", "S", 16), half(2, 16, 16), None, "the second factor is not a matrix"),
        (half("B", "S", 12), half(12, 16), None, "a weight of 12 x 16: the kernel accepts multiples of 8"),
        (half("B", "S", 16), half(16, 16), half(1), "the bias is not a vector with a number for each column"),
        (half("B", "S", 16), half(16, 16), half(16, dtype=ir.DataType.FLOAT), "the input is FLOAT"),
        (half("B", "S", 16, dtype=ir.DataType.FLOAT), half(16, 16), None, "the input is FLOAT"),
    ],
)
def test_mat_mul_refuses(x: ir.Value, weight: ir.Value, bias: ir.Value | None, reason: str) -> None:
    assert reason in (check_mat_mul(x, weight, bias) or "")


STACKED_MAT_MUL_TEST = OperatorTest(
    torch=lambda inputs, _: [torch.einsum("bsk,gkn->gbsn", *inputs)],
    refused=(
        KernelCase("StackedMatMul", "K=12", ((2, 3, 12), (3, 12, 16)), domain="sdonnx"),
        KernelCase("StackedMatMul", "N=12", ((2, 3, 16), (3, 16, 12)), domain="sdonnx"),
        KernelCase("StackedMatMul", "one weight", ((2, 3, 16), (16, 16)), domain="sdonnx"),
    ),
)


@pytest.mark.parametrize(
    ("x", "weights", "reason"),
    [
        (half("N", 16), half(3, 16, 16), "the first factor is not known to have three axes"),
        (half("B", "S", 16), half(16, 16), "the weights are not a stack of matrices"),
        (half("B", "S", 12), half(3, 12, 16), "weights of 12 x 16: the kernel accepts multiples of 8"),
        (half("B", "S", 16), half(3, 16, "N"), "weights of 16 x None: the kernel accepts multiples of 8"),
        (half("B", "S", 16, dtype=ir.DataType.FLOAT), half(3, 16, 16), "the input is FLOAT"),
        (half("B", "S", 16), half(3, 16, 16, dtype=ir.DataType.FLOAT), "the input is FLOAT"),
    ],
)
def test_stacked_mat_mul_refuses(x: ir.Value, weights: ir.Value, reason: str) -> None:
    assert reason in (check_stacked_mat_mul(x, weights) or "")


OPERATOR_TESTS = {"MatMul": MAT_MUL_TEST, "StackedMatMul": STACKED_MAT_MUL_TEST}
