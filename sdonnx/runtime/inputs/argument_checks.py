"""Range checks of call arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from sdonnx.errors import OptionError

__all__ = ["require_multiple", "require_number"]


def require_number(name: str, value: Any, minimum: float = -np.inf, maximum: float = np.inf) -> None:
    """Raise OptionError unless the value is a finite number between `minimum` and `maximum`."""
    fits = isinstance(value, int | float | np.number) and not isinstance(value, bool) and np.isfinite(value)
    if not fits or not minimum <= value <= maximum:
        bounds = "a finite number" if minimum == -np.inf else f"a number from {minimum:g} to {maximum:g}"
        raise OptionError(f"{name} is {value!r}", bounds, "pass another number")


def require_multiple(name: str, value: Any, factor: int) -> None:
    """Raise OptionError unless the value is a positive multiple of `factor`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value <= 0 or value % factor:
        raise OptionError(f"{name} is {value!r}", f"a multiple of {factor}", f"choose a multiple of {factor}")
