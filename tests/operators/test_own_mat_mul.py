"""sdonnx::MatMul: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest

from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.own_mat_mul import check_own_mat_mul


def mat_mul(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, weight, bias, residual = inputs
    total = F.linear(x, weight.T, bias)
    total = total if residual is None else total + residual
    return [F.gelu(total, approximate="tanh") if attributes["gelu"] else total]


OPERATOR_TEST = OperatorTest(
    torch=mat_mul,
    refused=(
        KernelCase("MatMul", "K=12", ((2, 3, 12), (12, 16)), {"gelu": 0}, domain="sdonnx"),
        KernelCase("MatMul", "N=12", ((2, 3, 16), (16, 12)), {"gelu": 0}, domain="sdonnx"),
        KernelCase("MatMul", "gelu", ((2, 3, 16), (16, 16), None, (2, 3, 16)), {"gelu": 1}, domain="sdonnx"),
    ),
)


def value(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


@pytest.mark.parametrize(
    ("x", "weight", "bias", "reason"),
    [
        (value("B", "S", 16), value(2, 16, 16), None, "the second factor is not a matrix"),
        (value("B", "S", 12), value(12, 16), None, "a weight of 12 x 16: the kernel accepts multiples of 8"),
        (value("B", "S", 16), value(16, 16), value(1), "the bias is not a vector with a number for each column"),
        (value("B", "S", 16), value(16, 16), value(16, dtype=ir.DataType.FLOAT), "the input is FLOAT"),
        (value("B", "S", 16, dtype=ir.DataType.FLOAT), value(16, 16), None, "the input is FLOAT"),
    ],
)
def test_refuses(x: ir.Value, weight: ir.Value, bias: ir.Value | None, reason: str) -> None:
    assert reason in (check_own_mat_mul(x, weight, bias) or "")
