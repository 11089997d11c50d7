"""Scales, quantization and dequantization against torch, bit for bit."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as arrays
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.dequantize import dequantize
from support.pipelines import refused

from sdonnx.errors import WeightsError
from sdonnx.folder.stored_numbers import quantize, scales_of
from sdonnx.metrics import relative_error
from sdonnx.quantization.quantization_types import FORMATS, NumberFormat

Array = npt.NDArray[Any]

TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


every_format = pytest.mark.parametrize("number_format", FORMATS.values(), ids=FORMATS)
every_axis = pytest.mark.parametrize("axis", [None, 0, 1, -1])
every_type = pytest.mark.parametrize("dtype", [np.float32, np.float16])


def in_torch(values: Array, number_format: NumberFormat) -> Array:
    """Return the bytes of values that torch casts, after clamping them to the finite range."""
    limited = torch.from_numpy(values).clamp(-number_format.max_value, number_format.max_value)
    limited = limited.round() if number_format.name == "int8" else limited
    cast: Array = limited.to(TORCH[number_format.name]).view(torch.uint8).numpy()
    return cast


def weights(dtype: type[np.floating[Any]]) -> st.SearchStrategy[Array]:
    width: Any = 32 if dtype is np.float32 else 16
    numbers = st.floats(allow_nan=False, allow_infinity=False, width=width)
    shapes = arrays.array_shapes(min_dims=2, max_dims=4, max_side=5)
    return arrays.arrays(dtype, shapes, elements=numbers)


def test_formats_are_those_of_torch() -> None:
    for name in ("e4m3", "e5m2"):
        assert FORMATS[name].max_value == torch.finfo(TORCH[name]).max
    assert FORMATS["int8"].max_value == torch.iinfo(torch.int8).max
    assert all(each.dtype.itemsize == 1 for each in FORMATS.values())


@every_format
def test_every_float16_is_rounded_as_by_torch(number_format: NumberFormat) -> None:
    """All finite float16 numbers, which include every tie of e4m3, and every subnormal one."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    values = halves[np.isfinite(halves)]
    ours = number_format.rounded(values)
    assert np.array_equal(ours.view(np.uint8), in_torch(values, number_format))
    assert np.isfinite(ours.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("e4m3", 17.0, 16.0),  # between 16 and 18
        ("e4m3", 19.0, 20.0),  # between 18 and 20
        ("e4m3", 2.0**-10, 0.0),  # between 0 and the smallest subnormal number
        ("e4m3", 1e9, 448.0),
        ("e5m2", 9.0, 8.0),  # between 8 and 10
        ("e5m2", 11.0, 12.0),  # between 10 and 12
        ("e5m2", -1e9, -57344.0),
        ("int8", 0.5, 0.0),
        ("int8", 1.5, 2.0),
        ("int8", -128.0, -127.0),
    ],
)
def test_ties_go_to_even_and_large_values_saturate(name: str, value: float, expected: float) -> None:
    assert float(FORMATS[name].rounded(np.array([value], np.float32))[0]) == expected


@every_format
@given(values=arrays.arrays(np.float32, 16, elements=st.floats(allow_nan=False, width=32)))
def test_every_float32_is_rounded_as_by_torch(number_format: NumberFormat, values: Array) -> None:
    assert np.array_equal(number_format.rounded(values).view(np.uint8), in_torch(values, number_format))


@every_format
@every_axis
@every_type
def test_quantized_weights_are_those_of_torch(number_format: NumberFormat, axis: int | None, dtype: Any) -> None:
    values = np.random.default_rng(0).standard_normal((24, 40)).astype(dtype)
    scales = scales_of(values, number_format, axis, dtype, "w")
    tensor = torch.from_numpy(values).float()
    kept = [] if axis is None else [axis % 2]
    largest = tensor.abs().amax([each for each in range(2) if each not in kept], keepdim=True)
    exact = (largest / number_format.max_value).numpy()
    shaped = scales.reshape(exact.shape).astype(np.float32)
    assert (shaped >= exact).all()
    assert relative_error(shaped, exact) <= (0 if dtype is np.float32 else 2.0**-10)
    stored = quantize(values, scales, number_format, axis)
    quotients = (tensor / torch.from_numpy(shaped)).numpy()
    assert np.array_equal(stored.view(np.uint8), in_torch(quotients, number_format))
    restored = (torch.from_numpy(stored.astype(np.float32)) * torch.from_numpy(shaped)).numpy().astype(dtype)
    assert np.array_equal(dequantize(stored, scales, axis), restored)


@every_format
@every_type
@given(data=st.data())
def test_restored_weights_are_finite_and_close(number_format: NumberFormat, dtype: Any, data: st.DataObject) -> None:
    values = data.draw(weights(dtype))
    axis = data.draw(st.sampled_from([None, *range(values.ndim)]))
    scales = scales_of(values, number_format, axis, dtype, "w")
    assert scales.dtype == dtype
    assert scales.shape == (() if axis is None else (values.shape[axis],))
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    restored = dequantize(quantize(values, scales, number_format, axis), scales, axis)
    assert np.isfinite(restored).all()
    # Half a step of the format at the largest value, and a few units in the last place of the type.
    step = {"e4m3": 16, "e5m2": 4096, "int8": 0.5}[number_format.name]
    along = np.float64(scales.reshape([-1 if each == axis else 1 for each in range(values.ndim)]))
    rounding = 4 * np.float64(np.finfo(dtype).eps) * np.abs(values.astype(np.float64))
    slack = rounding + 2 * np.float64(np.finfo(dtype).smallest_subnormal)
    assert (np.abs(restored.astype(np.float64) - values.astype(np.float64)) <= step * along + slack).all()


@every_format
def test_subnormal_weights_do_not_saturate(number_format: NumberFormat) -> None:
    """Their scales are a few units of the smallest number, rounded up."""
    unit = np.finfo(np.float32).smallest_subnormal
    values = (np.arange(1, 2000, dtype=np.float32) * unit)[:, None]
    scales = scales_of(values, number_format, 0, np.float32, "w")
    assert (scales.astype(np.float64) * number_format.max_value >= values[:, 0]).all()


@every_format
@every_axis
def test_channels_of_zeros_stay_zeros(number_format: NumberFormat, axis: int | None) -> None:
    values = np.zeros((3, 4), np.float16)
    scales = scales_of(values, number_format, axis, np.float16, "w")
    assert (scales == 1).all()
    assert not dequantize(quantize(values, scales, number_format, axis), scales, axis).any()


@every_format
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(number_format: NumberFormat, value: float) -> None:
    values = np.ones((3, 4), np.float16)
    values[1, 2] = value
    with refused(WeightsError, "down_blocks.0.conv.weight", "NaN or infinity"):
        scales_of(values, number_format, 0, np.float16, "down_blocks.0.conv.weight")
