"""ChannelsLastConv: the reference bodies against torch, and the limits of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest, half

from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.sdonnx_domain.convolution import check_channels_last_conv


def channels_last_conv(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, weight, *bias = inputs
    arguments = {"stride": attributes["stride"], "padding": attributes["pad"]}
    if x.numel() == 0:
        return [x.new_zeros(*x.shape[:3], len(weight))]
    image = F.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), *bias, **arguments)
    return [image.permute(0, 2, 3, 1)]


def case(name: str, x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None = None) -> KernelCase:
    return KernelCase("ChannelsLastConv", name, (x, weight, bias), domain="sdonnx")


CHANNELS_LAST_CONV_TEST = OperatorTest(
    torch=channels_last_conv,
    refused=(
        case("3 axes", (2, 4, 8), (8, 3, 3, 8)),
        case("other channels", (2, 4, 4, 8), (8, 3, 3, 16)),
        case("a long bias", (2, 4, 4, 8), (8, 3, 3, 8), (16,)),
    ),
)


IMAGE, WEIGHT = ("B", "H", "W", 16), (8, 3, 3, 16)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "reason"),
    [
        (half("B", "H", 16), half(*WEIGHT), None, "the image and the weights are not known to have four axes"),
        (half(*IMAGE), half(8, 16), None, "the image and the weights are not known to have four axes"),
        (half("B", "H", "W", "C"), half(*WEIGHT), None, "the channels of the image are not known to be those of"),
        (half(*IMAGE), half("M", 3, 3, 16), None, "the sizes of the weights are not known"),
        (half(*IMAGE), half(*WEIGHT), half(16), "the bias is not a vector with a number for each channel"),
        (half(*IMAGE), half(*WEIGHT), half(1, 8), "the bias is not a vector with a number for each channel"),
        (half(*IMAGE, dtype=ir.DataType.FLOAT), half(*WEIGHT), None, "the input is FLOAT, the kernel accepts FLOAT16"),
        (half(*IMAGE), half(*WEIGHT, dtype=ir.DataType.FLOAT), None, "the input is FLOAT, the kernel accepts FLOAT16"),
    ],
)
def test_refuses(x: ir.Value, weight: ir.Value, bias: ir.Value | None, reason: str) -> None:
    assert (check_channels_last_conv(x, weight, bias) or "").startswith(reason)


def test_accepts_channels_that_are_no_multiple_of_8() -> None:
    assert check_channels_last_conv(half("B", "H", "W", 4), half(5, 3, 3, 4), half(5)) is None


OPERATOR_TESTS = {"ChannelsLastConv": CHANNELS_LAST_CONV_TEST}
