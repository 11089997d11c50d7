"""Conversions by torch, compared with NumPy's."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from sdonnx.graph import tensors
from sdonnx.graph.tensors import cast, transposed
from sdonnx.operators.kernel_case import Array

# NumPy converts arrays of the first size, torch arrays of the second.
sizes = pytest.mark.parametrize("shape", [(3, 5, 2, 4), (32, 64, 5, 7)])


def values_of(shape: tuple[int, ...], dtype: type) -> Array:
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        return (rng.standard_normal(shape) * 10.0 ** rng.integers(-9, 6, shape)).astype(dtype)


@sizes
@pytest.mark.parametrize(("before", "after"), [(np.float32, np.float16), (np.float16, np.float32)])
def test_cast_rounds_like_numpy(shape: tuple[int, ...], before: type, after: type) -> None:
    """Values that round to zero, to subnormal numbers and to infinity included; the result is contiguous."""
    values = values_of(shape, before)
    values.reshape(-1)[:4] = [np.inf, -np.inf, -0.0, 65519 if before is np.float32 else 1]
    with np.errstate(over="ignore"):
        expected: Array = values.astype(after)
    assert np.isinf(expected).sum() > 2
    for each, wanted in ((values, expected), (values.transpose(3, 1, 0, 2), expected.transpose(3, 1, 0, 2))):
        found = cast(each, after)
        assert found.dtype == after
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found.view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8))


def test_cast_copies() -> None:
    values = values_of((300, 300), np.float32)
    found = cast(values, np.float32)
    values[:] = 0
    assert found.any()


@sizes
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32])
def test_transposed_is_contiguous(shape: tuple[int, ...], dtype: type) -> None:
    values: Array = np.random.default_rng(0).integers(-99, 99, shape).astype(dtype)
    for axes in ((0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 2, 3)):
        found = transposed(values, axes)
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, values.transpose(axes))


def test_memory_that_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors here: torch warns of read-only memory, and refuses steps backwards."""
    values = values_of((300, 300), np.float16).clip(-1, 1).astype(np.float32)
    fixed = values.copy()
    fixed.flags.writeable = False
    for each in (fixed, values[::-1]):
        np.testing.assert_array_equal(cast(each, np.float16), each.astype(np.float16))
        np.testing.assert_array_equal(transposed(each, (1, 0)), each.T)
    monkeypatch.delitem(sys.modules, "torch")
    assert tensors._tensor_of(values) is None
    np.testing.assert_array_equal(transposed(values, (1, 0)), values.T)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert tensors._tensor_of(values) is not None
