"""Parameters that CI leaves to the weekly run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["weekly"]


def weekly(cases: Iterable[Any], *each_time: Any, ids: Iterable[str] | None = None) -> list[Any]:
    """Return parameters of which CI tests some, and the weekly run all.

    Args:
        cases: values of a parameter.
        each_time: those that CI tests.
        ids: names of the cases; by default pytest's own.
    """
    values = list(cases)
    names = [None] * len(values) if ids is None else list(ids)
    return [
        pytest.param(case, marks=[] if case in each_time else [pytest.mark.weekly], id=name)
        for case, name in zip(values, names, strict=True)
    ]
