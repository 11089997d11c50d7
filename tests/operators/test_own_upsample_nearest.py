"""sdonnx::UpsampleNearest: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from support.operator_tests import OperatorTest

from sdonnx.operators.kernel_case import Fill, KernelCase
from sdonnx.operators.own_upsample_nearest import check_own_upsample_nearest


def upsample_nearest(x: torch.Tensor, sizes: torch.Tensor | None) -> torch.Tensor:
    doubled = x.repeat_interleave(2, 1).repeat_interleave(2, 2)
    return doubled if sizes is None else doubled[:, : sizes[1], : sizes[2]]


OPERATOR_TEST = OperatorTest(
    torch=lambda inputs, _: [upsample_nearest(*inputs)],
    refused=(
        KernelCase("UpsampleNearest", "12 channels", ((2, 3, 4, 12),), domain="sdonnx"),
        KernelCase("UpsampleNearest", "3 axes", ((2, 3, 16),), domain="sdonnx"),
    ),
)


def value(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


@pytest.mark.parametrize(
    ("x", "sizes", "reason"),
    [
        (value("B", "H", 16), None, "the input has 3 dimensions, the kernel accepts 4"),
        (value("B", "H", "W", "C"), None, "None channels: the kernel accepts multiples of 8"),
        (value("B", "H", "W", 12), None, "12 channels: the kernel accepts multiples of 8"),
        (value("B", "H", "W", 16), value(4), "the sizes are FLOAT16, the kernel accepts INT64"),
        (value("B", "H", "W", 16, dtype=ir.DataType.FLOAT), None, "the input is FLOAT, the kernel accepts FLOAT16"),
    ],
)
def test_refuses(x: ir.Value, sizes: ir.Value | None, reason: str) -> None:
    assert check_own_upsample_nearest(x, sizes) == reason


@pytest.mark.parametrize("fill", [Fill.DOUBLED_SIZES, Fill.ODD_SIZES, Fill.ODD_HEIGHT])
def test_sizes_of_cases_are_integers(fill: str) -> None:
    case = KernelCase("UpsampleNearest", "sizes", ((2, 3, 5, 16), (4,)), fills={1: fill}, domain="sdonnx")
    sizes = case.make_inputs()[1]
    assert sizes is not None
    assert sizes.dtype == case.integers[1] == "int64"
    assert sizes.tolist() == {
        Fill.DOUBLED_SIZES: [2, 6, 10, 16], Fill.ODD_SIZES: [2, 5, 9, 16], Fill.ODD_HEIGHT: [2, 5, 10, 16]
    }[fill]  # fmt: skip


@pytest.mark.parametrize("height", [1, 2, 3, 10, 77, 1000])
def test_resize_to_an_odd_height_reads_every_row_twice_but_the_last(height: int) -> None:
    """The equation of the contract, in whole numbers."""
    assert [i * height // (2 * height - 1) for i in range(2 * height - 1)] == [i // 2 for i in range(2 * height - 1)]
