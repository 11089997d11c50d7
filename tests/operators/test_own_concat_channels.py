"""sdonnx::ConcatChannels: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from support.operator_tests import OperatorTest

from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.own_concat_channels import check_own_concat_channels


def concat_channels(
    x: torch.Tensor, y: torch.Tensor, bias_x: torch.Tensor | None, bias_y: torch.Tensor | None
) -> torch.Tensor:
    if len(y):
        y = y.repeat(len(x) // len(y), *[1] * (y.ndim - 1))
    return torch.cat([x if bias_x is None else x + bias_x, y if bias_y is None else y + bias_y], -1)


OPERATOR_TEST = OperatorTest(
    torch=lambda inputs, _: [concat_channels(*inputs)],
    refused=tuple(
        KernelCase("ConcatChannels", f"{left} {right}", ((2, 3, left), (2, 3, right)), domain="sdonnx")
        for left, right in ((12, 16), (16, 4))
    ),
)


def value(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([value("B", 16), value("B", "D")], "16 and None channels: the kernel accepts multiples of 8"),
        ([value("B", 12), value("B", 16)], "12 and 16 channels: the kernel accepts multiples of 8"),
        ([value("B", 16), value("B", 8), value(8)], "a bias of shape [8] for 16 channels"),
        ([value("B", 16), value("B", 8), None, value(1, 8)], "a bias of shape [1, 8] for 8 channels"),
        ([value("B", 16, dtype=ir.DataType.FLOAT), value("B", 8)], "the input is FLOAT, the kernel accepts FLOAT16"),
        (
            [value("B", 16), value("B", 8), None, value(8, dtype=ir.DataType.FLOAT)],
            "the input is FLOAT, the kernel accepts FLOAT16",
        ),
    ],
)
def test_refuses(inputs: list[ir.Value], reason: str) -> None:
    assert check_own_concat_channels(*inputs) == reason


def test_accepts_biases_of_either_input() -> None:
    x, y = value("B", "H", "W", 16), value("B", "H", "W", 8)
    for biases in ((), (value(16),), (None, value(8)), (value(16), value(8))):
        assert check_own_concat_channels(x, y, *biases) is None
