"""8-bit numbers as bytes, compared with the optimizer's bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from sdonnx.folder.stored_numbers import STORED_FORMATS
from sdonnx.quantization.quantization_types import FORMATS

every_format = pytest.mark.parametrize("name", FORMATS)


def test_formats_are_those_of_the_optimizer() -> None:
    assert STORED_FORMATS.keys() == FORMATS.keys()
    assert all(STORED_FORMATS[name].max_value == each.max_value for name, each in FORMATS.items())


@every_format
def test_values_are_rounded_as_by_the_optimizer(name: str) -> None:
    """All float16 numbers, their neighbors in float32, and random float32 numbers of all magnitudes."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    neighbors = [np.nextafter(halves, np.float32(limit)) for limit in (-np.inf, np.inf)]
    random = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
    values = np.concatenate([halves, *neighbors, random[np.isfinite(random)]])
    before = values.copy()
    expected = FORMATS[name].rounded(values)
    found = STORED_FORMATS[name].rounded(values)
    assert np.array_equal(found, expected.view(np.uint8))
    assert np.array_equal(values, before)


@every_format
def test_numbers_are_restored(name: str) -> None:
    stored = np.arange(256, dtype=np.uint8)
    expected = stored.view(FORMATS[name].dtype.numpy()).astype(np.float32)
    is_number = np.abs(expected) <= FORMATS[name].max_value
    assert is_number.sum() > 240
    assert np.array_equal(STORED_FORMATS[name].restored(stored)[is_number], expected[is_number])
