"""SamplerInput, SamplerStep: the reference bodies against torch, and the limits of the kernels."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
from support.operator_tests import OperatorTest, single

from sdonnx.operators.sdonnx_domain.sampler import check_sampler_input, check_sampler_step


def sampler_input(inputs: Any, channels_last: int) -> list[torch.Tensor]:
    state, parameters, index = inputs
    row = parameters[index]
    sample = state[0] * row[0, 2]
    return [sample.permute(0, 2, 3, 1) if channels_last else sample, row]


SAMPLER_INPUT_TEST = OperatorTest(torch=lambda inputs, attributes: sampler_input(inputs, attributes["channels_last"]))


STATE, TABLE, INDEX = (single(5, "B", 4, "H", "W"), single("calls", "P"), single(1, dtype=ir.DataType.INT64))


@pytest.mark.parametrize(
    ("state", "table", "index", "reason"),
    [
        (single(4, "B", 4, "H", "W"), TABLE, INDEX, "the state is not known to be (5,B,C,H,W)"),
        (single("B", 4, "H", "W"), TABLE, INDEX, "the state is not known to be (5,B,C,H,W)"),
        (STATE, single("calls", "P", dtype=ir.DataType.FLOAT16), INDEX, "the state and the parameters are not FLOAT"),
        (STATE, TABLE, single(1, dtype=ir.DataType.INT32), "the index is not INT64"),
        (STATE, TABLE, INDEX, None),
    ],
)
def test_sampler_input_limits(state: ir.Value, table: ir.Value, index: ir.Value, reason: str | None) -> None:
    found = check_sampler_input(state, table, index)
    assert found is None if reason is None else reason in (found or "")


def sampler_step(inputs: Any, channels_last: int) -> list[torch.Tensor]:
    prediction, state, noise, row, known, mask = inputs
    if channels_last:
        prediction = prediction.permute(0, 3, 1, 2)
    copies = prediction[:, : state.shape[2]].reshape(-1, *noise.shape)
    weights, matrix = row[0, 3:13].reshape(5, 2), row[0, 13:].reshape(5, -1)
    updated = torch.einsum("rk,k...->r...", matrix, torch.cat([state, noise[None], copies]))
    kept = torch.einsum("rk,k...->r...", weights, known)
    return [torch.where(mask, kept, updated), row[0, :1].to(torch.int64)]


SAMPLER_STEP_TEST = OperatorTest(torch=lambda inputs, attributes: sampler_step(inputs, attributes["channels_last"]))


LATENTS = ("B", 4, "H", "W")
ACCEPTED = (
    single("N", 4, "H", "W", dtype=ir.DataType.FLOAT16),
    single(5, *LATENTS),
    single(*LATENTS),
    single(1, "P"),
    single(2, *LATENTS),
    single(5, *LATENTS, dtype=ir.DataType.BOOL),
)


@pytest.mark.parametrize(
    ("index", "other", "reason"),
    [
        (0, single("N", "T", 4, dtype=ir.DataType.FLOAT16), "the prediction is not known to have four axes"),
        (0, single("N", 4, "H", "W"), "the input is FLOAT, the kernel accepts FLOAT16"),
        (1, single(3, *LATENTS), "the state is not known to be (5,B,C,H,W)"),
        (2, single(*LATENTS, dtype=ir.DataType.FLOAT16), "are not FLOAT"),
        (5, single(5, *LATENTS), "the mask is not BOOL"),
        (0, ACCEPTED[0], None),
    ],
)
def test_sampler_step_limits(index: int, other: ir.Value, reason: str | None) -> None:
    inputs = list(ACCEPTED)
    inputs[index] = other
    found = check_sampler_step(*inputs)
    assert found is None if reason is None else reason in (found or "")


OPERATOR_TESTS = {"SamplerInput": SAMPLER_INPUT_TEST, "SamplerStep": SAMPLER_STEP_TEST}
