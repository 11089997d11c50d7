"""BiasSplitGelu, ConcatChannels, UpsampleNearest: the reference bodies against torch, and the limits of the kernels."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest, half

from sdonnx.operators.contrib_elementwise import SPLIT_GELU_WIDTHS
from sdonnx.operators.kernel_case import Fill, KernelCase
from sdonnx.operators.sdonnx_domain.elementwise import (
    BIAS_SPLIT_GELU,
    check_bias_split_gelu,
    check_concat_channels,
    check_upsample_nearest,
)


def bias_split_gelu(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    value, gate = (x if bias is None else x + bias).chunk(2, -1)
    return value * F.gelu(gate)


BIAS_SPLIT_GELU_TEST = OperatorTest(
    torch=lambda inputs, _: [bias_split_gelu(*inputs)],
    refused=tuple(
        KernelCase("BiasSplitGelu", str(width), ((2, 3, width), (width,)), domain="sdonnx") for width in (8, 24, 2568)
    ),
)


def test_bias_split_gelu_widths_without_a_kernel_of_onnxruntime_have_cases() -> None:
    widths = {shape[-1] for case in BIAS_SPLIT_GELU.kernel_cases() if (shape := case.shapes[0]) is not None}
    assert widths & SPLIT_GELU_WIDTHS
    assert widths - SPLIT_GELU_WIDTHS


@pytest.mark.parametrize(
    ("x", "bias", "reason"),
    [
        (half("B", "S", "D"), None, "the width None: the kernel accepts multiples of 16"),
        (half("B", "S", 24), half(24), "the width 24: the kernel accepts multiples of 16"),
        (half("B", "S", 32), half(32, 1), "the bias is not a vector"),
        (half("B", "S", 32, dtype=ir.DataType.BFLOAT16), half(32), "the input is BFLOAT16, the kernel accepts"),
        (half("B", "S", 32), half(32, dtype=ir.DataType.FLOAT), "the input is FLOAT, the kernel accepts"),
    ],
)
def test_bias_split_gelu_refuses(x: ir.Value, bias: ir.Value | None, reason: str) -> None:
    assert reason in (check_bias_split_gelu(x, bias) or "")


def concat_channels(
    x: torch.Tensor, y: torch.Tensor, bias_x: torch.Tensor | None, bias_y: torch.Tensor | None
) -> torch.Tensor:
    if len(y):
        y = y.repeat(len(x) // len(y), *[1] * (y.ndim - 1))
    return torch.cat([x if bias_x is None else x + bias_x, y if bias_y is None else y + bias_y], -1)


CONCAT_CHANNELS_TEST = OperatorTest(
    torch=lambda inputs, _: [concat_channels(*inputs)],
    refused=tuple(
        KernelCase("ConcatChannels", f"{left} {right}", ((2, 3, left), (2, 3, right)), domain="sdonnx")
        for left, right in ((12, 16), (16, 4))
    ),
)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([half("B", 16), half("B", "D")], "16 and None channels: the kernel accepts multiples of 8"),
        ([half("B", 12), half("B", 16)], "12 and 16 channels: the kernel accepts multiples of 8"),
        ([half("B", 16), half("B", 8), half(8)], "a bias of shape [8] for 16 channels"),
        ([half("B", 16), half("B", 8), None, half(1, 8)], "a bias of shape [1, 8] for 8 channels"),
        ([half("B", 16, dtype=ir.DataType.FLOAT), half("B", 8)], "the input is FLOAT, the kernel accepts FLOAT16"),
        (
            [half("B", 16), half("B", 8), None, half(8, dtype=ir.DataType.FLOAT)],
            "the input is FLOAT, the kernel accepts FLOAT16",
        ),
    ],
)
def test_concat_channels_refuses(inputs: list[ir.Value], reason: str) -> None:
    assert check_concat_channels(*inputs) == reason


def test_concat_channels_accepts_biases_of_either_input() -> None:
    x, y = half("B", "H", "W", 16), half("B", "H", "W", 8)
    for biases in ((), (half(16),), (None, half(8)), (half(16), half(8))):
        assert check_concat_channels(x, y, *biases) is None


def upsample_nearest(x: torch.Tensor, sizes: torch.Tensor | None) -> torch.Tensor:
    doubled = x.repeat_interleave(2, 1).repeat_interleave(2, 2)
    return doubled if sizes is None else doubled[:, : sizes[1], : sizes[2]]


UPSAMPLE_NEAREST_TEST = OperatorTest(
    torch=lambda inputs, _: [upsample_nearest(*inputs)],
    refused=(
        KernelCase("UpsampleNearest", "12 channels", ((2, 3, 4, 12),), domain="sdonnx"),
        KernelCase("UpsampleNearest", "3 axes", ((2, 3, 16),), domain="sdonnx"),
    ),
)


@pytest.mark.parametrize(
    ("x", "sizes", "reason"),
    [
        (half("B", "H", 16), None, "the input has 3 dimensions, the kernel accepts 4"),
        (half("B", "H", "W", "C"), None, "None channels: the kernel accepts multiples of 8"),
        (half("B", "H", "W", 12), None, "12 channels: the kernel accepts multiples of 8"),
        (half("B", "H", "W", 16), half(4), "the sizes are FLOAT16, the kernel accepts INT64"),
        (half("B", "H", "W", 16, dtype=ir.DataType.FLOAT), None, "the input is FLOAT, the kernel accepts FLOAT16"),
    ],
)
def test_upsample_nearest_refuses(x: ir.Value, sizes: ir.Value | None, reason: str) -> None:
    assert check_upsample_nearest(x, sizes) == reason


@pytest.mark.parametrize("fill", [Fill.DOUBLED_SIZES, Fill.ODD_SIZES, Fill.ODD_HEIGHT])
def test_upsample_nearest_sizes_of_cases_are_integers(fill: str) -> None:
    case = KernelCase("UpsampleNearest", "sizes", ((2, 3, 5, 16), (4,)), fills={1: fill}, domain="sdonnx")
    sizes = case.make_inputs()[1]
    assert sizes is not None
    assert sizes.dtype == case.integers[1] == "int64"
    assert sizes.tolist() == {
        Fill.DOUBLED_SIZES: [2, 6, 10, 16], Fill.ODD_SIZES: [2, 5, 9, 16], Fill.ODD_HEIGHT: [2, 5, 10, 16]
    }[fill]  # fmt: skip


@pytest.mark.parametrize("height", [1, 2, 3, 10, 77, 1000])
def test_upsample_nearest_resize_to_an_odd_height_reads_every_row_twice_but_the_last(height: int) -> None:
    """The equation of the contract, in whole numbers."""
    assert [i * height // (2 * height - 1) for i in range(2 * height - 1)] == [i // 2 for i in range(2 * height - 1)]


OPERATOR_TESTS = {
    "BiasSplitGelu": BIAS_SPLIT_GELU_TEST,
    "ConcatChannels": CONCAT_CHANNELS_TEST,
    "UpsampleNearest": UPSAMPLE_NEAREST_TEST,
}
