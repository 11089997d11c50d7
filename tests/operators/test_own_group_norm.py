"""sdonnx::GroupNorm: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest

from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.own_group_norm import check_own_group_norm, check_own_table


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


def refused(channels: int, groups: int) -> KernelCase:
    vector = (channels,)
    attributes = {"groups": groups, "activation": 0, "epsilon": 1e-5}
    shapes = ((2, 3, 4, channels), vector, vector)
    return KernelCase("GroupNorm", f"{channels} in {groups}", shapes, attributes, domain="sdonnx")


OPERATOR_TEST = OperatorTest(
    torch=group_norm,
    refused=tuple(
        refused(*sizes) for sizes in ((64, 32), (96, 32), (160, 32), (60, 6), (4104, 27), (1040, 130), (64, 7))
    ),
)


def value(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


def vector(size: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return value(size, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "gamma", "groups", "reason"),
    [
        (value("B", "S", 64), vector(64), 8, "the input has 3 dimensions, the kernel accepts 4"),
        (value("B", "H", "W", "C"), vector("C"), 8, "the number of channels is not known"),
        (value("B", "H", "W", 60), vector(60), 6, "60 channels: the kernel accepts multiples of 8 up to 4096"),
        (value("B", "H", "W", 64), vector(64), 32, "64 channels in 32 groups: the kernel accepts up to 128 groups"),
        (value("B", "H", "W", 72), vector(72), 8, "72 channels in 8 groups"),
        (value("B", "H", "W", 64), vector(64, ir.DataType.FLOAT16), 8, "gamma is FLOAT16, the kernel accepts FLOAT"),
        (value("B", "H", "W", 64, dtype=ir.DataType.FLOAT), vector(64), 8, "the input is FLOAT, the kernel accepts"),
    ],
)
def test_refuses(x: ir.Value, gamma: ir.Value, groups: int, reason: str) -> None:
    assert reason in (check_own_group_norm(x, gamma, groups) or "")


INDEX = value(1, dtype=ir.DataType.INT64)


@pytest.mark.parametrize(
    ("table", "index", "offset", "reason"),
    [
        (value("N", 64), INDEX, 8, "the table is not known to have a number per channel in each row"),
        (value("N", 64), INDEX, -8, "the table is not known to have a number per channel in each row"),
        (value("N", "W"), INDEX, 0, "the table is not known to have a number per channel in each row"),
        (value("N", 1, 64), INDEX, 0, "the table is not known to have a number per channel in each row"),
        (
            value("N", 128),
            INDEX,
            4,
            "the channels begin at 4 in rows of 128 numbers: the kernel accepts multiples of 8",
        ),
        (value("N", 68), INDEX, 0, "the channels begin at 0 in rows of 68 numbers: the kernel accepts multiples of 8"),
        (value("N", 64), value(2, dtype=ir.DataType.INT64), 0, "the index is not one INT64"),
        (value("N", 64), value(1, dtype=ir.DataType.INT32), 0, "the index is not one INT64"),
        (value("N", 64, dtype=ir.DataType.FLOAT), INDEX, 0, "the input is FLOAT, the kernel accepts FLOAT16"),
        (value("N", 128), INDEX, 64, None),
    ],
)
def test_limits_of_tables(table: ir.Value, index: ir.Value, offset: int, reason: str | None) -> None:
    assert check_own_table(table, index, offset, 64) == reason
