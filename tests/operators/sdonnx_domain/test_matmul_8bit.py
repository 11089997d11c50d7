"""ScaledMatMul: the reference bodies against torch, and the limits of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest, failure_of, half

from sdonnx.operators.kernel_case import OUR_DOMAIN, Fill, KernelCase
from sdonnx.operators.kernel_case_graphs import model_of
from sdonnx.operators.sdonnx_domain.matmul_8bit import EightBits, check_scaled_mat_mul

TYPES = {EightBits.E4M3: torch.float8_e4m3fn, EightBits.E5M2: torch.float8_e5m2, EightBits.INT8: torch.int8}
BITS = {0: Fill.E4M3_BITS, 1: Fill.SCALES, 2: Fill.E4M3_BITS, 3: Fill.SCALES}


def scaled_mat_mul(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    padded: list[Any] = [*inputs, *[None] * (6 - len(inputs))]
    q, scales, w, w_scales, bias, residual = padded
    left = q.view(TYPES[EightBits(attributes["x_format"])]).double()
    right = w.view(TYPES[EightBits(attributes["w_format"])]).double()
    total = left @ right.T * 2.0 ** -attributes.get("exponent", 0)
    total = total if scales is None else total * scales * w_scales
    total = total if bias is None else total + bias
    total = total if residual is None else total + residual
    return [(F.gelu(total, approximate="tanh") if attributes.get("gelu") else total).float()]


def refused(name: str, attributes: Mapping[str, Any], *shapes: tuple[int, ...]) -> KernelCase:
    return KernelCase("ScaledMatMul", name, shapes, attributes, fills=BITS, domain=OUR_DOMAIN)


SQUARE = (2, 16), (2, 1), (16, 16), (16,)
SCALED_MAT_MUL_TEST = OperatorTest(
    torch=scaled_mat_mul,
    refused=(
        refused("gelu and a residual", {"gelu": 1}, *SQUARE, (16,), (2, 16)),
        refused("int8 and e4m3", {"x_format": 2, "w_format": 0}, *SQUARE),
        refused("K of 24", {}, (2, 24), (2, 1), (16, 24), (16,)),
        refused("N of 24", {}, (2, 16), (2, 1), (24, 16), (24,)),
    ),
)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        *zip(
            SCALED_MAT_MUL_TEST.refused,
            (
                "gelu excludes a residual",
                "int8 is multiplied by int8 only",
                "a weight of 16 x 24: the kernel accepts multiples of 16",
                "a weight of 24 x 16",
            ),
            strict=True,
        ),
        (refused("e5m2", {"x_format": 1, "w_format": 1}, *SQUARE), "no GPU multiplies e5m2 by e5m2"),
    ],
)
def test_products_that_are_refused(case: KernelCase, reason: str) -> None:
    assert reason in (failure_of(model_of(case, "float16", case.make_inputs())) or "")


def test_biases_that_are_refused() -> None:
    assert check_scaled_mat_mul(half(16, 16), half(8)) == "the bias is not a vector with a number for each column"
    wide = half(16, dtype=ir.DataType.FLOAT)
    assert check_scaled_mat_mul(half(16, 16), wide) == "the bias is FLOAT, the kernel accepts FLOAT16"


OPERATOR_TESTS = {"ScaledMatMul": SCALED_MAT_MUL_TEST}
