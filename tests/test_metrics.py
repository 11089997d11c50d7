"""Metrics of arrays with known distances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sdonnx.metrics import output_error, pattern_error, relative_error

REFERENCE = np.array([3.0, 0.0, 4.0], np.float32)


@pytest.mark.parametrize(
    ("values", "reference", "expected"),
    [
        ([3.0, 0.0, 4.0], REFERENCE, 0.0),
        ([3.0, 1.0, 4.0], REFERENCE, 0.2),
        ([0.0, 0.0, 0.0], REFERENCE, 1.0),
        ([3.0, math.nan, 4.0], REFERENCE, math.inf),
        ([3.0, math.inf, 4.0], REFERENCE, math.inf),
        ([0.0, 0.0, 0.0], np.zeros(3, np.float32), 0.0),
        ([0.0, 1e-30, 0.0], np.zeros(3, np.float32), math.inf),
    ],
)
def test_relative_error(values: list[float], reference: Any, expected: float) -> None:
    assert relative_error(np.array(values, np.float32), reference) == expected


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        relative_error(np.zeros(3), np.zeros((1, 3)))


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1, 2, 3, 0x83], [1, 2, 3, 0x83], 0.0),
        ([0x80, 2, 3, 4], [0, 2, 3, 4], 0.0),  # minus zero is zero
        ([1, 2, 3, 4], [0, 2, 3, 4], 0.25),
        ([0x81, 2, 3, 4], [0, 2, 3, 4], 0.25),  # the floating-point number below zero
        ([0x80, 2, 3, 4], [0x81, 3, 3, 4], 0.5),
        ([0xFF, 2, 3, 0x7F], [0, 2, 3, 0x7F], 0.25),  # int8: -1, and 127
        ([0x7F, 2, 3, 4], [0x7E, 2, 3, 4], math.inf),  # e4m3: NaN
        ([2, 2, 3, 4], [0, 2, 3, 4], math.inf),
        ([0x82, 2, 3, 4], [0, 2, 3, 4], math.inf),
        ([0x81, 2, 3, 4], [1, 2, 3, 4], math.inf),
    ],
)
def test_pattern_error(found: list[int], expected: list[int], error: float) -> None:
    patterns, reference = np.array(found, np.uint8), np.array(expected, np.uint8)
    assert pattern_error(patterns, reference) == error
    assert output_error(patterns, reference) == error


def test_pattern_error_of_other_shapes() -> None:
    with pytest.raises(ValueError, match="shapes"):
        pattern_error(np.zeros(3, np.uint8), np.zeros(4, np.uint8))
