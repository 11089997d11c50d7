"""GroupNorm: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.graphs import assert_same_function, copied, graph, normal, operators, relative_error, run
from support.operator_tests import OperatorTest

from sdonnx.fusions.fusion_table import fuse
from sdonnx.operators.contrib_norms import MAX_GROUP_CHANNELS, check_group_norm, norm_attributes
from sdonnx.operators.kernel_case import KernelCase

TOLERANCE = 1e-5


def group_norm(inputs: Sequence[torch.Tensor], attributes: Mapping[str, Any]) -> torch.Tensor:
    """F.group_norm of x (B,H,W,C)."""
    x, gamma, beta = inputs
    planes = F.group_norm(x.permute(0, 3, 1, 2), attributes["groups"], gamma, beta, attributes["epsilon"])
    return (F.silu(planes) if attributes["activation"] else planes).permute(0, 2, 3, 1)


OPERATOR_TEST = OperatorTest(
    torch=lambda inputs, attributes: [group_norm(inputs, attributes)],
    refused=(
        KernelCase("GroupNorm", "96 in 32 groups", ((1, 8, 8, 96), (96,), (96,)), norm_attributes(32, 0, 1e-5)),
        KernelCase("GroupNorm", "514 a group", ((1, 8, 8, 1028), (1028,), (1028,)), norm_attributes(2, 0, 1e-5)),
    ),
)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-1])
def test_agrees_with_torch(silu: bool, epsilon: float) -> None:
    x, gamma, beta = normal(2, 4, 7, 12) + 3, normal(12, seed=1), normal(12, seed=2)
    model = graph(
        "float[B,H,W,12] x",
        "float[B,H,W,12] y",
        f"y = com.microsoft.GroupNorm<groups=3, epsilon={epsilon}, activation={int(silu)}, channels_last=1>(x, g, b)",
        g=gamma,
        b=beta,
    )
    tensors = [torch.from_numpy(array) for array in (x, gamma, beta)]
    expected = group_norm(tensors, norm_attributes(3, int(silu), epsilon)).numpy()
    assert relative_error(run(model, {"x": x})["y"], expected) < TOLERANCE


def test_sums_in_float32() -> None:
    """The squares of a thousand values of 20 sum to more than fp16 holds."""
    x = (normal(1, 16, 16, 8) + 20).astype(np.float16)
    gamma, beta = normal(8, seed=1), normal(8, seed=2)
    model = graph(
        "float16[1,16,16,8] x",
        "float16[1,16,16,8] y",
        "y = com.microsoft.GroupNorm<groups=2, epsilon=0.00001, activation=1, channels_last=1>(x, g, b)",
        g=gamma,
        b=beta,
    )
    found = run(model, {"x": x})["y"]
    assert found.dtype == np.float16
    tensors = [torch.from_numpy(array) for array in (x.astype(np.float32), gamma, beta)]
    # Rounding the result to fp16 costs 5e-4.
    assert relative_error(found, group_norm(tensors, norm_attributes(2, 1, 1e-5)).numpy()) < 6e-4


def image(*shape: int | str | None, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


@pytest.mark.parametrize(
    ("x", "channels", "groups", "reason"),
    [
        (ir.Value(name="x"), 64, 32, "the input has no known dimensions, the kernel accepts 4"),
        (image("B", "S", 64), 64, 32, "the input has 3 dimensions, the kernel accepts 4"),
        (image("B", 64, "D", "H", "W"), 64, 32, "the input has 5 dimensions, the kernel accepts 4"),
        (image("B", "C", "H", "W"), None, 32, "the number of channels is not known"),
        (image("B", 96, "H", "W"), 96, 32, "96 channels in 32 groups: the kernel accepts an even number of channels a"),
        (image("B", 48, "H", "W"), 48, 32, "48 channels in 32 groups: the kernel accepts an even number of channels a"),
        (image("B", 32, "H", "W"), 32, 32, "32 channels in 32 groups: the kernel accepts an even number of channels a"),
        (
            image("B", 514, "H", "W"),
            514,
            1,
            "514 channels in 1 groups: the kernel accepts at most 512 channels a group",
        ),
        (
            image("B", 64, "H", "W", dtype=ir.DataType.BFLOAT16),
            64,
            32,
            "is BFLOAT16, the kernel accepts FLOAT, FLOAT16",
        ),
        (image("B", 64, "H", "W", dtype=ir.DataType.DOUBLE), 64, 32, "is DOUBLE, the kernel accepts FLOAT, FLOAT16"),
    ],
)
def test_refuses_inputs_without_a_kernel(x: ir.Value, channels: int | None, groups: int, reason: str) -> None:
    assert reason in (check_group_norm(x, channels, groups) or "")


@pytest.mark.parametrize(("channels", "groups"), [(2 * MAX_GROUP_CHANNELS, 2), (2 * MAX_GROUP_CHANNELS + 4, 2), (6, 2)])
def test_groups_that_are_too_large_or_odd_are_not_fused(channels: int, groups: int) -> None:
    model = graph(
        f"float[B,{channels},H,W] x",
        f"float[B,{channels},H,W] y",
        f"c = Conv<kernel_shape=[1,1], group={channels}>(x, w) y = GroupNormalization<num_groups={groups}>(c, g, b)",
        f"float[B,{channels},H,W] y",
        w=normal(channels, 1, 1, 1),
        g=normal(channels, seed=1),
        b=normal(channels, seed=2),
    )
    fused = copied(model)
    outcomes = fuse(fused, "cuda")
    accepted = channels == 2 * MAX_GROUP_CHANNELS
    assert operators(fused, "GroupNorm") == {"GroupNorm": int(accepted)}
    reasons = [failure.reason for outcome in outcomes for failure in outcome.failures]
    assert any(f"{channels} channels in {groups} groups" in reason for reason in reasons) != accepted
    assert_same_function(fused, model, 1e-4, sizes={"B": 2, "H": 3, "W": 5})
