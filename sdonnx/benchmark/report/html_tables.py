"""Tables whose columns have one unit and one number of decimals."""

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
    "make_table",
    "number",
    "percent",
    "ratio",
    "whole",
]

DASH = "\N{EN DASH}"
"""Shown for values that were not measured."""

MB = 1024**2
"""As in ONNX Runtime's benchmark.py for Stable Diffusion."""

Text = Callable[[Sequence[float | None]], list[str]]
"""Formats a whole column, so that its decimals agree."""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: the row heading.
        cells: the formatted cells; empty if there is only a reason.
        colour: colour of the swatch before the name; None for no swatch.
        badges: short remarks next to the name.
        reason: the reason for missing or untrusted cells.
    """

    name: str
    cells: tuple[str, ...] = ()
    colour: str | None = None
    badges: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Table:
    """A table; `groups` are headings over several columns, with the number of columns."""

    caption: str
    head: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    groups: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Column:
    """A column of a table before formatting.

    Attributes:
        group: the group heading; empty for no group.
        name: the column heading.
        values: one value for each row; None if it was not measured.
        text: formats the column.
    """

    group: str
    name: str
    values: tuple[float | None, ...]
    text: Text


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def number(value: float | None, decimals: int) -> str:
    """Format a number with the given decimals, or a dash if it is missing or not finite."""
    if value is None or not math.isfinite(value):
        return DASH
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text


def decimals_for(values: Iterable[float | None], significant: int = 4, maximum: int = 3) -> int:
    """Return the decimals that show the smallest positive value with the given number of significant digits."""
    positive = [value for value in _finite(values) if value > 0]
    if not positive:
        return 0
    return min(max(significant - 1 - math.floor(math.log10(min(positive))), 0), maximum)


def aligned(significant: int = 4, maximum: int = 3) -> Text:
    """Return a column format in which the smallest number has the given significant digits."""

    def text(values: Sequence[float | None]) -> list[str]:
        decimals = decimals_for(values, significant, maximum)
        return [number(value, decimals) for value in values]

    return text


def fixed(decimals: int) -> Text:
    """Return a column format with the given decimals."""
    return lambda values: [number(value, decimals) for value in values]


def whole(values: Sequence[float | None]) -> list[str]:
    """Format a column without decimals."""
    return [number(value, 0) for value in values]


def percent(values: Sequence[float | None]) -> list[str]:
    """Format a column of shares, 0 to 1, as percentages."""
    return [DASH if value is None or not math.isfinite(value) else f"{number(value * 100, 1)} %" for value in values]


def ratio(value: float) -> str:
    """Format a ratio: 0.98, 2.85, 12.3."""
    return number(value, decimals_for([value], 3, 2))


def make_table(caption: str, head: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Return a table of the columns; the cells of the rows are replaced."""
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
