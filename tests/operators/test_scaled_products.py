"""Our own operators for 8-bit factors: reference bodies against torch's types, and emulated kernels against both."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from filelock import FileLock
from support.operator_tests import lowered_results, model_bytes, quiet_options

from sdonnx.metrics import relative_error
from sdonnx.operators.case import OWN_DOMAIN, Array, Fill, KernelCase, rounded
from sdonnx.operators.case_graphs import model_of
from sdonnx.operators.eight_bits import EightBits
from sdonnx.operators.operator_table import SCALED_CONTRACTS, contract_of
from sdonnx.operators.own_rows import check_rows
from sdonnx.operators.own_scaled_mat_mul import check_own_scaled_mat_mul

SOURCES = Path(__file__).resolve().parents[2] / "kernels" / "scaled"
TYPES = {EightBits.E4M3: torch.float8_e4m3fn, EightBits.E5M2: torch.float8_e5m2, EightBits.INT8: torch.int8}
ROWS = [case for name in ("QuantizeRows", "LayerNormRows", "SplitGeluRows")
        for case in SCALED_CONTRACTS[name].kernel_cases()]  # fmt: skip
PRODUCTS = list(SCALED_CONTRACTS["ScaledMatMul"].kernel_cases())

every_case = pytest.mark.parametrize("case", [*ROWS, *PRODUCTS], ids=str)


@functools.cache
def emulated() -> Path:
    """Return the library of these kernels for the CPU."""
    for tool in ("g++", "make"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, which builds the emulated kernels")
    root = Path(os.environ.get("SDONNX_TEST_CACHE") or tempfile.gettempdir()) / "sdonnx-scaled"
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "lock"):
        command = ["make", "-C", str(SOURCES), "--no-print-directory", "emulated", f"OUT={root}"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "libsdonnx_scaled_emulated.so"


def inputs_of(case: KernelCase) -> list[Array | None]:
    return rounded(case.make_inputs(), "float16", sorted(SCALED_CONTRACTS[case.op_type].float32_inputs))


def values_of(bits: Array, number_format: EightBits) -> torch.Tensor:
    """Return the numbers of patterns, as torch reads them."""
    return torch.from_numpy(np.ascontiguousarray(bits)).view(TYPES[number_format]).float()


def wide_rows(case: KernelCase, inputs: list[Array | None]) -> torch.Tensor:
    """Return what a case quantizes."""
    x, *others = (None if array is None else torch.from_numpy(array) for array in inputs)
    assert x is not None
    if case.op_type == "LayerNormRows":
        return F.layer_norm(x, x.shape[-1:], others[0], others[1])
    if case.op_type == "SplitGeluRows":
        values, gates = x.add(0 if others[0] is None else others[0]).chunk(2, -1)
        return values * F.gelu(gates)
    return x


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_rows_are_those_of_torch(case: KernelCase) -> None:
    inputs = inputs_of(case)
    number_format = EightBits(case.attributes["format"])
    wide, given = wide_rows(case, inputs), inputs[-1] if "scale=True" in case.name else None
    factor = float(np.float32(1 / number_format.max_value))
    scales = (wide.abs().amax(-1, keepdim=True) * factor).clamp(min=1e-12)
    scales = scales if given is None else torch.full_like(scales, float(given))
    quotient = (wide / scales).clamp(-number_format.max_value, number_format.max_value)
    narrow = quotient.round() if number_format is EightBits.INT8 else quotient
    expected = narrow.to(TYPES[number_format]).float() * scales
    bits, found = lowered_results(case, inputs)
    assert bits.dtype == np.uint8
    assert bits.shape == expected.shape
    assert relative_error(found, scales.numpy()) < 1e-6
    ours = values_of(bits, number_format) * torch.from_numpy(found)
    # Sums of norms are in another order, which moves few numbers over a tie.
    assert relative_error(ours.numpy(), expected.numpy()) < (1e-6 if case.op_type == "QuantizeRows" else 3e-3)
    assert relative_error(ours.numpy(), wide.numpy()) < 0.13 or given is not None


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products_are_those_of_torch(case: KernelCase) -> None:
    inputs = inputs_of(case)
    q, scales, w, w_scales, bias, residual = inputs
    left, right = (values_of(bits, EightBits(case.attributes[name]))
                   for bits, name in ((q, "x_format"), (w, "w_format")) if bits is not None)  # fmt: skip
    assert scales is not None
    assert w_scales is not None
    total = left.double() @ right.double().T * torch.from_numpy(scales) * torch.from_numpy(w_scales)
    total = total if bias is None else total + torch.from_numpy(bias)
    total = total if residual is None else total + torch.from_numpy(residual)
    total = F.gelu(total, approximate="tanh") if case.attributes["gelu"] else total
    (found,) = lowered_results(case, inputs)
    assert relative_error(found, total.float().numpy()) < 2e-5


def emulated_results(case: KernelCase, inputs: list[Array | None]) -> list[Array]:
    options = quiet_options()
    options.register_custom_ops_library(str(emulated()))
    model = model_of(case, "float16", inputs)
    session = onnxruntime.InferenceSession(model_bytes(model), options, providers=["CPUExecutionProvider"])
    feeds = {}
    for value in session.get_inputs():
        array = inputs[int(value.name[1:])]
        assert array is not None
        feeds[value.name] = array.astype(np.float16) if value.type == "tensor(float16)" else array
    results: list[Array] = session.run(None, feeds)
    return results


@every_case
def test_emulated_kernels_agree_with_the_reference_body(case: KernelCase) -> None:
    if case.op_type == "ScaledMatMul" and "5120x64" in case.name:
        pytest.skip("the emulated product takes seconds")
    inputs = inputs_of(case)
    found, expected = emulated_results(case, inputs), lowered_results(case, inputs)
    assert [each.shape for each in found] == [each.shape for each in expected]
    if case.op_type == "ScaledMatMul":
        assert relative_error(found[0].astype(np.float32), expected[0]) < 2e-3
        return
    number_format = EightBits(case.attributes["format"])
    assert relative_error(found[1], expected[1]) < 1e-5
    ours, theirs = (values_of(bits, number_format).numpy() * scales for bits, scales in (found, expected))
    assert relative_error(ours, theirs) < (1e-6 if case.op_type == "QuantizeRows" else 3e-3)


def test_rows_of_zeros_and_small_numbers() -> None:
    case = next(case for case in ROWS if case.name == "3x7x320 e4m3 scale=False")
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
        "QuantizeRows", "patterns", ((1, 3, 320), ()), {"format": int(number_format)}, outputs=2, domain=OWN_DOMAIN
    )
    inputs: list[Array | None] = [numbers.astype(np.float16).astype(np.float32), np.ones((), np.float32)]
    (bits, _), (reference, _) = emulated_results(case, inputs), lowered_results(case, inputs)
    quotient = torch.from_numpy(inputs[0]).clamp(-number_format.max_value, number_format.max_value)
    quotient = quotient.round() if number_format is EightBits.INT8 else quotient
    expected = quotient.to(TYPES[number_format]).float()
    assert torch.equal(values_of(bits, number_format), expected)
    assert torch.equal(values_of(reference, number_format), expected)


def half(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


@pytest.mark.parametrize(
    ("attributes", "shapes", "reason"),
    [
        ({"gelu": 1}, [(2, 16), (2, 1), (16, 16), (16,), (16,), (2, 16)], "gelu excludes a residual"),
        ({"x_format": 2, "w_format": 0}, [(2, 16), (2, 1), (16, 16), (16,)], "int8 is multiplied by int8 only"),
        ({"x_format": 1, "w_format": 1}, [(2, 16), (2, 1), (16, 16), (16,)], "no GPU multiplies e5m2 by e5m2"),
        ({}, [(2, 24), (2, 1), (16, 24), (16,)], "a weight of 16 x 24: the kernel accepts multiples of 16"),
        ({}, [(2, 16), (2, 1), (24, 16), (24,)], "a weight of 24 x 16"),
    ],
)
def test_products_that_are_refused(attributes: dict[str, Any], shapes: list[tuple[int, ...]], reason: str) -> None:
    fills = {0: Fill.E4M3_BITS, 1: Fill.SCALES, 2: Fill.E4M3_BITS, 3: Fill.SCALES}
    case = KernelCase("ScaledMatMul", "refused", tuple(shapes), attributes, fills=fills, domain=OWN_DOMAIN)
    inputs = rounded(case.make_inputs(), "float16", (1, 3))
    node = next(iter(model_of(case, "float16", inputs).graph))
    contract = contract_of(node)
    assert contract is not None
    assert reason in (contract.check(node) or "")
    if "no GPU" not in reason:  # cuBLASLt refuses that
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail):
            emulated_results(case, inputs)


def test_rows_that_are_refused() -> None:
    assert "rows of 24 numbers" in (check_rows(half("B", 24), 24) or "")
    assert "rows of 5136 numbers" in (check_rows(half("B", 5136), 5136) or "")
    assert "rows of None numbers" in (check_rows(half("B", "K"), None) or "")
    assert "the input is FLOAT" in (check_rows(half("B", 32, dtype=ir.DataType.FLOAT), 32) or "")
    assert check_rows(half("B", 5120), 5120) is None
    assert check_own_scaled_mat_mul(half(16, 16), half(8)) == "the bias is not a vector with a number for each column"
    wide = half(16, dtype=ir.DataType.FLOAT)
    assert check_own_scaled_mat_mul(half(16, 16), wide) == "the bias is FLOAT, the kernel accepts FLOAT16"
