"""BiasSplitGelu: the reference body against torch, and the kernel's limits."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.graphs import graph, normal, relative_error, run
from support.operator_tests import OperatorTest

from sdonnx.operators.contrib_elementwise import BIAS_SPLIT_GELU, SPLIT_GELU_WIDTHS, check_bias_split_gelu
from sdonnx.operators.kernel_case import KernelCase

TOLERANCE = 1e-5


def bias_split_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    value, gate = (x + bias).chunk(2, -1)
    return value * F.gelu(gate)


OPERATOR_TEST = OperatorTest(
    torch=lambda inputs, _: [bias_split_gelu(*inputs)],
    refused=(KernelCase("BiasSplitGelu", "2048", ((1, 8, 2048), (2048,))),),
)


def test_every_width_of_the_kernel_has_a_case() -> None:
    assert {case.shapes[1] for case in BIAS_SPLIT_GELU.kernel_cases()} == {(width,) for width in SPLIT_GELU_WIDTHS}


def test_computes_the_exact_gelu() -> None:
    x, bias = normal(2, 5, 2560, scale=2.0), normal(2560, seed=1)
    model = graph("float[B,S,2560] x", "float[B,S,1280] y", "y = com.microsoft.BiasSplitGelu(x, b)", b=bias)
    value, gate = (torch.from_numpy(x) + torch.from_numpy(bias)).chunk(2, -1)
    found = run(model, {"x": x})["y"]
    assert relative_error(found, (value * F.gelu(gate)).numpy()) < TOLERANCE
    # The tanh approximation and the other order of the halves would be noticed.
    assert relative_error(found, (value * F.gelu(gate, approximate="tanh")).numpy()) > 10 * TOLERANCE
    assert relative_error(found, (gate * F.gelu(value)).numpy()) > 0.1


def value(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (ir.Value(name="x"), "the input does not have 3 dimensions"),
        (value("B", 2560), "the input does not have 3 dimensions"),
        (value("B", "H", "W", 2560), "the input does not have 3 dimensions"),
        (value("B", "S", "D"), "the width None has no kernel, which exist for 2560, 5120, 6144, 10240, 12288"),
        *((value("B", "S", width), f"the width {width} has no kernel") for width in (2, 1280, 2559, 2561, 7680, 24576)),
        (value("B", "S", 2560, dtype=ir.DataType.BFLOAT16), "is BFLOAT16, the kernel accepts FLOAT, FLOAT16"),
    ],
)
def test_refuses_inputs_without_a_kernel(x: ir.Value, reason: str) -> None:
    assert reason in (check_bias_split_gelu(x) or "")
