"""sdonnx::LayerNorm: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest

from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.own_layer_norm import MAX_LAYER_NORM_CHANNELS, OWN_LAYER_NORM, check_own_layer_norm


def layer_norm(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, gamma, beta = inputs
    return [F.layer_norm(x, gamma.shape, gamma, beta, attributes["epsilon"])]


OPERATOR_TEST = OperatorTest(
    torch=layer_norm,
    refused=tuple(
        KernelCase("LayerNorm", str(width), ((2, 3, width), (width,), (width,)), domain="sdonnx")
        for width in (4, 12, 63, 2056, 4096)
    ),
)


def vector(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Value:
    return ir.Value(name="v", shape=ir.Shape(shape), type=ir.TensorType(dtype))


def test_every_number_of_vectors_of_a_lane_has_a_case() -> None:
    """The kernel is compiled once for each."""
    widths = {shape[0] for case in OWN_LAYER_NORM.kernel_cases() if (shape := case.shapes[1]) is not None}
    assert {-(-width // 256) for width in widths} == set(range(1, MAX_LAYER_NORM_CHANNELS // 256 + 1))


@pytest.mark.parametrize(
    ("x", "gamma", "beta", "reason"),
    [
        (vector("B", "S", "D"), vector("D"), None, "gamma is not a vector of a known size"),
        (vector("B", "S", 64), vector(8, 8), None, "gamma is not a vector of a known size"),
        (vector("B", "S", 60), vector(60), None, "60 channels: the kernel accepts multiples of 8 up to 2048"),
        (vector("B", "S", 2056), vector(2056), None, "2056 channels"),
        (vector("B", "S", 64), vector(64), vector(1), "beta does not have the shape of gamma"),
        (vector("B", "S", 64, dtype=ir.DataType.FLOAT), vector(64), None, "the input is FLOAT, the kernel accepts"),
        (vector("B", "S", 64), vector(64, dtype=ir.DataType.FLOAT), None, "the input is FLOAT, the kernel accepts"),
    ],
)
def test_refuses(x: ir.Value, gamma: ir.Value, beta: ir.Value | None, reason: str) -> None:
    assert reason in (check_own_layer_norm(x, gamma, beta) or "")
