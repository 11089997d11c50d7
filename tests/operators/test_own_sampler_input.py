"""sdonnx::SamplerInput: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
from support.operator_tests import OperatorTest

from sdonnx.operators.own_sampler_input import check_own_sampler_input


def sampler_input(inputs: Any, channels_last: int) -> list[torch.Tensor]:
    state, parameters, index = inputs
    row = parameters[index]
    sample = state[0] * row[0, 2]
    return [sample.permute(0, 2, 3, 1) if channels_last else sample, row]


OPERATOR_TEST = OperatorTest(torch=lambda inputs, attributes: sampler_input(inputs, attributes["channels_last"]))


def value(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


STATE, TABLE, INDEX = value(5, "B", 4, "H", "W"), value("calls", "P"), value(1, dtype=ir.DataType.INT64)


@pytest.mark.parametrize(
    ("state", "table", "index", "reason"),
    [
        (value(4, "B", 4, "H", "W"), TABLE, INDEX, "the state is not known to be (5,B,C,H,W)"),
        (value("B", 4, "H", "W"), TABLE, INDEX, "the state is not known to be (5,B,C,H,W)"),
        (STATE, value("calls", "P", dtype=ir.DataType.FLOAT16), INDEX, "the state and the parameters are not FLOAT"),
        (STATE, TABLE, value(1, dtype=ir.DataType.INT32), "the index is not INT64"),
        (STATE, TABLE, INDEX, None),
    ],
)
def test_limits(state: ir.Value, table: ir.Value, index: ir.Value, reason: str | None) -> None:
    found = check_own_sampler_input(state, table, index)
    assert found is None if reason is None else reason in (found or "")
