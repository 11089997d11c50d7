"""LayerNorm, SkipLayerNorm, GroupNorm: the reference bodies against torch, and the limits of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest, half

from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.sdonnx_domain.norms import (
    LAYER_NORM,
    MAX_LAYER_NORM_CHANNELS,
    SKIP_LAYER_NORM,
    check_group_norm,
    check_layer_norm,
    check_skip_layer_norm,
    check_table_row,
)


def layer_norm(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, gamma, beta = inputs
    return [F.layer_norm(x, gamma.shape, gamma, beta, attributes["epsilon"])]


LAYER_NORM_TEST = OperatorTest(
    torch=layer_norm,
    refused=tuple(
        KernelCase("LayerNorm", str(width), ((2, 3, width), (width,), (width,)), domain="sdonnx")
        for width in (4, 12, 63, 2056, 4096)
    ),
)


def test_layer_norm_every_number_of_vectors_of_a_lane_has_a_case() -> None:
    """The kernel is compiled once for each."""
    widths = {shape[0] for case in LAYER_NORM.kernel_cases() if (shape := case.shapes[1]) is not None}
    assert {-(-width // 256) for width in widths} == set(range(1, MAX_LAYER_NORM_CHANNELS // 256 + 1))


@pytest.mark.parametrize(
    ("x", "gamma", "beta", "reason"),
    [
        (half("B", "S", "D"), half("D"), None, "gamma is not a vector of a known size"),
        (half("B", "S", 64), half(8, 8), None, "gamma is not a vector of a known size"),
        (half("B", "S", 60), half(60), None, "60 channels: the kernel accepts multiples of 8 up to 2048"),
        (half("B", "S", 2056), half(2056), None, "2056 channels"),
        (half("B", "S", 64), half(64), half(1), "beta does not have the shape of gamma"),
        (half("B", "S", 64, dtype=ir.DataType.FLOAT), half(64), None, "the input is FLOAT, the kernel accepts"),
        (half("B", "S", 64), half(64, dtype=ir.DataType.FLOAT), None, "the input is FLOAT, the kernel accepts"),
    ],
)
def test_layer_norm_refuses(x: ir.Value, gamma: ir.Value, beta: ir.Value | None, reason: str) -> None:
    assert reason in (check_layer_norm(x, gamma, beta) or "")


def skip_layer_norm(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, skip, gamma, beta, bias, gate = inputs
    skip = skip.repeat(len(x) // len(skip), *[1] * (x.ndim - 1))
    total = x * (1 if gate is None else gate) + skip + (0 if bias is None else bias)
    return [F.layer_norm(total, gamma.shape, gamma, beta, attributes["epsilon"]), total]


SKIP_LAYER_NORM_TEST = OperatorTest(
    torch=skip_layer_norm,
    refused=(
        *(
            KernelCase(
                "SkipLayerNorm", str(width), ((2, 3, width), (2, 3, width), (width,)), outputs=2, domain="sdonnx"
            )
            for width in (4, 12, 63, 2056, 4096)
        ),
        *(
            KernelCase(
                "SkipLayerNorm",
                f"input {index}",
                ((2, 3, 64), (2, 3, 64), (64,), *[None] * (index - 3), (32,)),
                outputs=2,
                domain="sdonnx",
            )
            for index in (3, 4, 5)
        ),
    ),
)


def test_skip_layer_norm_every_number_of_vectors_of_a_lane_has_a_case() -> None:
    """The kernel is compiled once for each."""
    widths = {shape[0] for case in SKIP_LAYER_NORM.kernel_cases() if (shape := case.shapes[2]) is not None}
    assert {-(-width // 256) for width in widths} == set(range(1, MAX_LAYER_NORM_CHANNELS // 256 + 1))


FLOAT = ir.DataType.FLOAT


@pytest.mark.parametrize(
    ("x", "gamma", "bias", "gate", "reason"),
    [
        (half("B", "S", 60), half(60), None, None, "60 channels: the kernel accepts multiples of 8 up to 2048"),
        (half("B", "S", 64), half(64), half(32), None, "bias does not have the shape of gamma"),
        (half("B", "S", 64), half(64), None, half(1, 64), "gate does not have the shape of gamma"),
        (half("B", "S", 64), half(64), None, half(64, dtype=FLOAT), "the input is FLOAT, the kernel accepts"),
        (half("B", "S", 64, dtype=FLOAT), half(64), None, None, "the input is FLOAT, the kernel accepts"),
    ],
)
def test_skip_layer_norm_refuses(
    x: ir.Value, gamma: ir.Value, bias: ir.Value | None, gate: ir.Value | None, reason: str
) -> None:
    assert reason in (check_skip_layer_norm(x, gamma, None, bias, gate) or "")


def group_norm(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, gamma, beta, skip, bias, *index = inputs
    if index:
        skip = skip[index[0], attributes["offset"] :][:, : x.shape[-1]]
    if skip is not None:
        x = x + (skip[:, None, None] if skip.ndim == 2 else skip)
    if bias is not None:
        x = x + bias
    y = F.group_norm(x.permute(0, 3, 1, 2), attributes["groups"], gamma, beta, attributes["epsilon"])
    y = F.silu(y) if attributes["activation"] else y
    return [y.permute(0, 2, 3, 1), x]


def refused_group_norm(channels: int, groups: int) -> KernelCase:
    vector = (channels,)
    attributes = {"groups": groups, "activation": 0, "epsilon": 1e-5}
    shapes = ((2, 3, 4, channels), vector, vector)
    return KernelCase("GroupNorm", f"{channels} in {groups}", shapes, attributes, domain="sdonnx")


GROUP_NORM_TEST = OperatorTest(
    torch=group_norm,
    refused=tuple(
        refused_group_norm(*sizes)
        for sizes in ((64, 32), (96, 32), (160, 32), (60, 6), (4104, 27), (1040, 130), (64, 7))
    ),
)


def vector(size: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return half(size, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "gamma", "groups", "reason"),
    [
        (half("B", "S", 64), vector(64), 8, "the input has 3 dimensions, the kernel accepts 4"),
        (half("B", "H", "W", "C"), vector("C"), 8, "the number of channels is not known"),
        (half("B", "H", "W", 60), vector(60), 6, "60 channels: the kernel accepts multiples of 8 up to 4096"),
        (half("B", "H", "W", 64), vector(64), 32, "64 channels in 32 groups: the kernel accepts up to 128 groups"),
        (half("B", "H", "W", 72), vector(72), 8, "72 channels in 8 groups"),
        (half("B", "H", "W", 64), vector(64, ir.DataType.FLOAT16), 8, "gamma is FLOAT16, the kernel accepts FLOAT"),
        (half("B", "H", "W", 64, dtype=ir.DataType.FLOAT), vector(64), 8, "the input is FLOAT, the kernel accepts"),
    ],
)
def test_group_norm_refuses(x: ir.Value, gamma: ir.Value, groups: int, reason: str) -> None:
    assert reason in (check_group_norm(x, gamma, groups) or "")


INDEX = half(1, dtype=ir.DataType.INT64)


@pytest.mark.parametrize(
    ("table", "index", "offset", "reason"),
    [
        (half("N", 64), INDEX, 8, "the table is not known to have a number per channel in each row"),
        (half("N", 64), INDEX, -8, "the table is not known to have a number per channel in each row"),
        (half("N", "W"), INDEX, 0, "the table is not known to have a number per channel in each row"),
        (half("N", 1, 64), INDEX, 0, "the table is not known to have a number per channel in each row"),
        (half("N", 128), INDEX, 4, "the channels begin at 4 in rows of 128 numbers: the kernel accepts multiples of 8"),
        (half("N", 68), INDEX, 0, "the channels begin at 0 in rows of 68 numbers: the kernel accepts multiples of 8"),
        (half("N", 64), half(2, dtype=ir.DataType.INT64), 0, "the index is not one INT64"),
        (half("N", 64), half(1, dtype=ir.DataType.INT32), 0, "the index is not one INT64"),
        (half("N", 64, dtype=ir.DataType.FLOAT), INDEX, 0, "the input is FLOAT, the kernel accepts FLOAT16"),
        (half("N", 128), INDEX, 64, None),
    ],
)
def test_group_norm_limits_of_tables(table: ir.Value, index: ir.Value, offset: int, reason: str | None) -> None:
    assert check_table_row(table, index, offset, 64) == reason


OPERATOR_TESTS = {"LayerNorm": LAYER_NORM_TEST, "SkipLayerNorm": SKIP_LAYER_NORM_TEST, "GroupNorm": GROUP_NORM_TEST}
