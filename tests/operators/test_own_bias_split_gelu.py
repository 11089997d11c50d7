"""sdonnx::BiasSplitGelu: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest

from sdonnx.operators.bias_split_gelu import SPLIT_GELU_WIDTHS
from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.own_bias_split_gelu import OWN_BIAS_SPLIT_GELU, check_own_bias_split_gelu


def bias_split_gelu(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    value, gate = (x if bias is None else x + bias).chunk(2, -1)
    return value * F.gelu(gate)


OPERATOR_TEST = OperatorTest(
    torch=lambda inputs, _: [bias_split_gelu(*inputs)],
    refused=tuple(
        KernelCase("BiasSplitGelu", str(width), ((2, 3, width), (width,)), domain="sdonnx") for width in (8, 24, 2568)
    ),
)


def value(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


def test_widths_without_a_kernel_of_onnxruntime_have_cases() -> None:
    widths = {shape[-1] for case in OWN_BIAS_SPLIT_GELU.kernel_cases() if (shape := case.shapes[0]) is not None}
    assert widths & SPLIT_GELU_WIDTHS
    assert widths - SPLIT_GELU_WIDTHS


@pytest.mark.parametrize(
    ("x", "bias", "reason"),
    [
        (value("B", "S", "D"), None, "the width None: the kernel accepts multiples of 16"),
        (value("B", "S", 24), value(24), "the width 24: the kernel accepts multiples of 16"),
        (value("B", "S", 32), value(32, 1), "the bias is not a vector"),
        (value("B", "S", 32, dtype=ir.DataType.BFLOAT16), value(32), "the input is BFLOAT16, the kernel accepts"),
        (value("B", "S", 32), value(32, dtype=ir.DataType.FLOAT), "the input is FLOAT, the kernel accepts"),
    ],
)
def test_refuses(x: ir.Value, bias: ir.Value | None, reason: str) -> None:
    assert reason in (check_own_bias_split_gelu(x, bias) or "")
