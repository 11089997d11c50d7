"""Numbers as a reader wants them: tables whose columns have one unit and one number of decimals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "DASH",
    "MB",
    "Column",
    "Row",
    "Table",
    "Text",
    "aligned",
    "decimals_for",
    "fixed",
    "number",
    "percent",
    "ratio",
    "table_of",
    "whole",
]

DASH = "\N{EN DASH}"
"""What was not measured."""

MB = 1024**2
"""As in ONNX Runtime's benchmark.py for Stable Diffusion."""

Text = Callable[[Sequence[float | None]], list[str]]
"""How a column is written, all of it at once so that its decimals agree."""


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        name: its heading.
        cells: as they are shown; none where there is only a reason.
        colour: of the swatch before the name; None for none.
        badges: short remarks beside the name.
        reason: why it has no cells, or why they must not be trusted.
    """

    name: str
    cells: tuple[str, ...] = ()
    colour: str | None = None
    badges: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Table:
    """A table; `groups` are headings over several columns, with how many these are."""

    caption: str
    head: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    groups: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Column:
    """A column of a table before it is written.

    Attributes:
        group: the heading over it; empty for none.
        name: its heading.
        values: from the top; None where it was not measured.
        text: how it is written.
    """

    group: str
    name: str
    values: tuple[float | None, ...]
    text: Text


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def number(value: float | None, decimals: int) -> str:
    """Return a number with that many decimals, a dash where there is none."""
    if value is None or not math.isfinite(value):
        return DASH
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text


def decimals_for(values: Iterable[float | None], significant: int = 4, most: int = 3) -> int:
    """Return how many decimals show the smallest number above zero with so many significant digits."""
    positive = [value for value in _finite(values) if value > 0]
    if not positive:
        return 0
    return min(max(significant - 1 - math.floor(math.log10(min(positive))), 0), most)


def aligned(significant: int = 4, most: int = 3) -> Text:
    """Return how to write a column so that its smallest number has so many significant digits."""

    def text(values: Sequence[float | None]) -> list[str]:
        decimals = decimals_for(values, significant, most)
        return [number(value, decimals) for value in values]

    return text


def fixed(decimals: int) -> Text:
    """Return how to write a column with that many decimals."""
    return lambda values: [number(value, decimals) for value in values]


def whole(values: Sequence[float | None]) -> list[str]:
    """Write a column without decimals."""
    return [number(value, 0) for value in values]


def percent(values: Sequence[float | None]) -> list[str]:
    """Write a column of shares, 0 to 1."""
    return [DASH if value is None or not math.isfinite(value) else f"{number(value * 100, 1)} %" for value in values]


def ratio(value: float) -> str:
    """Return a ratio: 0.98, 2.85, 12.3."""
    return number(value, decimals_for([value], 3, 2))


def table_of(caption: str, head: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Return a table of columns; what a row has as cells is replaced."""
    written = [column.text(column.values) for column in columns]
    cells = list(zip(*written, strict=True)) if written else [()] * len(rows)
    groups: list[tuple[str, int]] = []
    for column in columns:
        if groups and groups[-1][0] == column.group:
            groups[-1] = (column.group, groups[-1][1] + 1)
        else:
            groups.append((column.group, 1))
    return Table(
        caption,
        head,
        tuple(column.name for column in columns),
        tuple(Row(row.name, cell, row.colour, row.badges, row.reason) for row, cell in zip(rows, cells, strict=True)),
        tuple(groups) if any(group for group, _ in groups) else (),
    )
