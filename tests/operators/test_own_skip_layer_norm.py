"""sdonnx::SkipLayerNorm: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest

from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.own_layer_norm import MAX_LAYER_NORM_CHANNELS
from sdonnx.operators.own_skip_layer_norm import OWN_SKIP_LAYER_NORM, check_own_skip_layer_norm


def skip_layer_norm(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    x, skip, gamma, beta, bias, gate = inputs
    skip = skip.repeat(len(x) // len(skip), *[1] * (x.ndim - 1))
    total = x * (1 if gate is None else gate) + skip + (0 if bias is None else bias)
    return [F.layer_norm(total, gamma.shape, gamma, beta, attributes["epsilon"]), total]


OPERATOR_TEST = OperatorTest(
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


def vector(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Value:
    return ir.Value(name="v", shape=ir.Shape(shape), type=ir.TensorType(dtype))


def test_every_number_of_vectors_of_a_lane_has_a_case() -> None:
    """The kernel is compiled once for each."""
    widths = {shape[0] for case in OWN_SKIP_LAYER_NORM.kernel_cases() if (shape := case.shapes[2]) is not None}
    assert {-(-width // 256) for width in widths} == set(range(1, MAX_LAYER_NORM_CHANNELS // 256 + 1))


FLOAT = ir.DataType.FLOAT


@pytest.mark.parametrize(
    ("x", "gamma", "bias", "gate", "reason"),
    [
        (vector("B", "S", 60), vector(60), None, None, "60 channels: the kernel accepts multiples of 8 up to 2048"),
        (vector("B", "S", 64), vector(64), vector(32), None, "bias does not have the shape of gamma"),
        (vector("B", "S", 64), vector(64), None, vector(1, 64), "gate does not have the shape of gamma"),
        (vector("B", "S", 64), vector(64), None, vector(64, dtype=FLOAT), "the input is FLOAT, the kernel accepts"),
        (vector("B", "S", 64, dtype=FLOAT), vector(64), None, None, "the input is FLOAT, the kernel accepts"),
    ],
)
def test_refuses(x: ir.Value, gamma: ir.Value, bias: ir.Value | None, gate: ir.Value | None, reason: str) -> None:
    assert reason in (check_own_skip_layer_norm(x, gamma, None, bias, gate) or "")
