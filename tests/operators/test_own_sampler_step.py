"""sdonnx::SamplerStep: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
from support.operator_tests import OperatorTest

from sdonnx.operators.own_sampler_step import check_own_sampler_step


def sampler_step(inputs: Any, channels_last: int) -> list[torch.Tensor]:
    prediction, state, noise, row, known, mask = inputs
    if channels_last:
        prediction = prediction.permute(0, 3, 1, 2)
    copies = prediction[:, : state.shape[2]].reshape(-1, *noise.shape)
    weights, matrix = row[0, 3:13].reshape(5, 2), row[0, 13:].reshape(5, -1)
    updated = torch.einsum("rk,k...->r...", matrix, torch.cat([state, noise[None], copies]))
    kept = torch.einsum("rk,k...->r...", weights, known)
    return [torch.where(mask, kept, updated), row[0, :1].to(torch.int64)]


OPERATOR_TEST = OperatorTest(torch=lambda inputs, attributes: sampler_step(inputs, attributes["channels_last"]))


def value(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


LATENTS = ("B", 4, "H", "W")
ACCEPTED = (
    value("N", 4, "H", "W", dtype=ir.DataType.FLOAT16),
    value(5, *LATENTS),
    value(*LATENTS),
    value(1, "P"),
    value(2, *LATENTS),
    value(5, *LATENTS, dtype=ir.DataType.BOOL),
)


@pytest.mark.parametrize(
    ("index", "other", "reason"),
    [
        (0, value("N", "T", 4, dtype=ir.DataType.FLOAT16), "the prediction is not known to have four axes"),
        (0, value("N", 4, "H", "W"), "the input is FLOAT, the kernel accepts FLOAT16"),
        (1, value(3, *LATENTS), "the state is not known to be (5,B,C,H,W)"),
        (2, value(*LATENTS, dtype=ir.DataType.FLOAT16), "are not FLOAT"),
        (5, value(5, *LATENTS), "the mask is not BOOL"),
        (0, ACCEPTED[0], None),
    ],
)
def test_limits(index: int, other: ir.Value, reason: str | None) -> None:
    inputs = list(ACCEPTED)
    inputs[index] = other
    found = check_own_sampler_step(*inputs)
    assert found is None if reason is None else reason in (found or "")
