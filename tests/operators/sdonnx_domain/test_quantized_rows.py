"""Rows: the reference bodies against torch, and the limits of the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.kernel_library import emulated_library, options_with
from support.operator_tests import OperatorTest, feeds_of, half, lowered_results, model_bytes

from sdonnx.metrics import relative_error
from sdonnx.operators.kernel_case import OUR_DOMAIN, Array, KernelCase, rounded
from sdonnx.operators.kernel_case_graphs import model_of
from sdonnx.operators.operator_table import OUR_KERNEL_CASES
from sdonnx.operators.sdonnx_domain.matmul_8bit import EightBits
from sdonnx.operators.sdonnx_domain.quantized_rows import check_rows

TYPES = {EightBits.E4M3: torch.float8_e4m3fn, EightBits.E5M2: torch.float8_e5m2, EightBits.INT8: torch.int8}
CASES = [case for case in OUR_KERNEL_CASES if case.op_type.endswith("Rows")]


def values_of(bits: Array, number_format: EightBits) -> torch.Tensor:
    """Return the numbers of patterns, as torch reads them."""
    return torch.from_numpy(np.ascontiguousarray(bits)).view(TYPES[number_format]).float()


def sum_of(inputs: Sequence[torch.Tensor | None], attributes: Mapping[str, Any]) -> torch.Tensor:
    """Return the sum of SumRows."""
    x, x_scales, w_scales, bias, residual = inputs[:5]
    assert x is not None
    assert x_scales is not None
    assert w_scales is not None
    assert residual is not None
    total: torch.Tensor = x * x_scales * w_scales * 2.0 ** attributes["exponent"]
    return (total if bias is None else total + bias) + residual


def wide_rows(inputs: Sequence[torch.Tensor | None], attributes: Mapping[str, Any]) -> torch.Tensor:
    """Return the values to quantize: x itself (2 inputs), its split gelu (3), its norm (4), a sum or its norm (8)."""
    x, *others = inputs
    assert x is not None
    if len(inputs) == 8:
        total, (gamma, beta) = sum_of(inputs, attributes), inputs[5:7]
        if gamma is None:
            return total
        return F.layer_norm(total, total.shape[-1:], gamma, beta)
    if len(inputs) == 4:
        return F.layer_norm(x, x.shape[-1:], others[0], others[1])
    if len(inputs) == 3:
        values, gates = x.add(0 if others[0] is None else others[0]).chunk(2, -1)
        return values * F.gelu(gates)
    return x


def rows(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    wide, number_format = wide_rows(inputs, attributes), EightBits(attributes["format"])
    factor = float(np.float32(1 / number_format.max_value))
    scales = (wide.abs().amax(-1, keepdim=True) * factor).clamp(min=1e-12)
    scales = scales if inputs[-1] is None else torch.full_like(scales, float(inputs[-1]))
    quotient = (wide / scales).clamp(-number_format.max_value, number_format.max_value)
    narrow = quotient.round() if number_format is EightBits.INT8 else quotient
    sums = [sum_of(inputs, attributes)] if len(inputs) == 8 else []
    return [narrow.to(TYPES[number_format]).view(torch.uint8), scales, *sums]


def refused(op_type: str, width: int) -> KernelCase:
    return KernelCase(op_type, f"width {width}", ((2, 3, width),), {"format": 0}, outputs=2, domain=OUR_DOMAIN)


ROWS_TEST = OperatorTest(
    torch=rows,
    refused=(refused("QuantizeRows", 24), refused("QuantizeRows", 5136), refused("SplitGeluRows", 48)),
    tolerance=2e-3,  # sums of norms are in another order, which moves few numbers over a tie
)


def inputs_of(case: KernelCase) -> list[Array | None]:
    return rounded(case.make_inputs(), "float16")


def emulated_results(case: KernelCase, inputs: Sequence[Array | None]) -> list[Array]:
    model = model_of(case, "float16", inputs)
    session = onnxruntime.InferenceSession(
        model_bytes(model), options_with(emulated_library()), providers=["CPUExecutionProvider"]
    )
    results: list[Array] = session.run(None, feeds_of(model, inputs))
    return results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_are_those_of_torch(case: KernelCase) -> None:
    """Patterns as numbers, times their scales; patterns of neighbouring numbers are compared elsewhere."""
    inputs = inputs_of(case)
    number_format = EightBits(case.attributes["format"])
    tensors = [None if array is None else torch.from_numpy(array) for array in inputs]
    bits, scales = rows(tensors, case.attributes)[:2]
    expected = values_of(bits.numpy(), number_format) * scales
    wide, is_plain = wide_rows(tensors, case.attributes), case.op_type == "QuantizeRows"
    for found_bits, found, *sums in (lowered_results(case, inputs), emulated_results(case, inputs)):
        assert found_bits.dtype == np.uint8
        assert relative_error(found, scales.numpy()) < 1e-5
        ours = (values_of(found_bits, number_format) * torch.from_numpy(found)).numpy()
        assert relative_error(ours, expected.numpy()) < (1e-6 if is_plain else 3e-3)
        assert relative_error(ours, wide.numpy()) < 0.13 or inputs[-1] is not None
        assert len(sums) == (case.op_type == "SumRows")
        for each in sums:
            assert relative_error(each, sum_of(tensors, case.attributes).numpy()) < 1e-3


def test_rows_of_zeros_and_small_numbers() -> None:
    case = next(case for case in CASES if case.name == "3x7x320 e4m3 scale=False")
    x = np.zeros((3, 7, 320), np.float32)
    x[0, 1] = 6e-8
    x[1, 2, 5] = -65504
    found, expected = emulated_results(case, [x, None]), lowered_results(case, [x, None])
    for results in (found, expected):
        values = values_of(results[0], EightBits.E4M3).numpy() * results[1]
        assert np.isfinite(values).all()
        assert values[1, 2, 5] == pytest.approx(-65504, rel=1e-6)
        assert not values[2].any()
        assert values[0, 1] == pytest.approx(np.full(320, 6e-8), rel=0.1)


@pytest.mark.parametrize("number_format", EightBits)
def test_every_pattern(number_format: EightBits) -> None:
    """All numbers of a format, the halves between neighbours, and numbers beyond it."""
    values = number_format.values()
    known = np.unique(values[np.isfinite(values) & (np.abs(values) <= number_format.max_value)])
    numbers = np.concatenate([known, (known[1:] + known[:-1]) / 2, known * 1.7])
    numbers = np.resize(numbers[np.abs(numbers) < 6e4], (1, 3, 320)).astype(np.float32)
    case = KernelCase(
        "QuantizeRows", "patterns", ((1, 3, 320), ()), {"format": int(number_format)}, outputs=2, domain=OUR_DOMAIN
    )
    inputs: list[Array | None] = [numbers.astype(np.float16).astype(np.float32), np.ones((), np.float32)]
    (bits, _), (reference, _) = emulated_results(case, inputs), lowered_results(case, inputs)
    quotient = torch.from_numpy(inputs[0]).clamp(-number_format.max_value, number_format.max_value)
    quotient = quotient.round() if number_format is EightBits.INT8 else quotient
    expected = quotient.to(TYPES[number_format]).float()
    assert torch.equal(values_of(bits, number_format), expected)
    assert torch.equal(values_of(reference, number_format), expected)


@pytest.mark.parametrize("number_format", EightBits)
def test_quotients_are_rounded_correctly(number_format: EightBits) -> None:
    """The kernel divides by a reciprocal and one correction; the bit patterns equal a division's."""
    draw = np.random.default_rng(3)
    wide = draw.standard_normal((2, 400, 512)) * np.exp(draw.normal(0, 4, (2, 400, 1)))
    x = np.clip(wide, -6e4, 6e4).astype(np.float16).astype(np.float32)
    case = KernelCase(
        "QuantizeRows", "quotients", (x.shape, None), {"format": int(number_format)}, outputs=2, domain=OUR_DOMAIN
    )
    (bits, scales), (expected, expected_scales) = emulated_results(case, [x, None]), lowered_results(case, [x, None])
    assert scales.tobytes() == expected_scales.tobytes()
    assert bits.tobytes() == expected.tobytes()


def test_rows_that_are_refused() -> None:
    assert "rows of 24 numbers" in (check_rows(half("B", 24), 24) or "")
    assert "rows of 5136 numbers" in (check_rows(half("B", 5136), 5136) or "")
    assert "rows of None numbers" in (check_rows(half("B", "K"), None) or "")
    assert "the input is FLOAT" in (check_rows(half("B", 32, dtype=ir.DataType.FLOAT), 32) or "")
    assert check_rows(half("B", 5120), 5120) is None


OPERATOR_TESTS = dict.fromkeys(("QuantizeRows", "LayerNormRows", "SplitGeluRows", "SumRows"), ROWS_TEST)
