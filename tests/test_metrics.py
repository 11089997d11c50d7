"""Metrics of arrays with known distances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sdonnx.metrics import relative_error

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
