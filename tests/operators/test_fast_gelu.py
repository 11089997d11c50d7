"""FastGelu: torch's implementation for the kernel cases, and the kernel's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest

from sdonnx.operators.contrib_elementwise import check_fast_gelu


def fast_gelu(inputs: Any, _: Mapping[str, Any]) -> list[torch.Tensor]:
    x, bias = inputs
    return [F.gelu(x if bias is None else x + bias, approximate="tanh")]


OPERATOR_TEST = OperatorTest(torch=fast_gelu)


@pytest.mark.parametrize("width", [63, "D"])
def test_refuses_widths_that_are_odd_or_unknown(width: int | str) -> None:
    x = ir.Value(name="x", shape=ir.Shape(["B", width]), type=ir.TensorType(ir.DataType.FLOAT16))
    assert "the kernel is exact only for even widths" in (check_fast_gelu(x) or "")
