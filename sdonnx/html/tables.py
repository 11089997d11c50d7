"""Tables with a column for each engine and a row for each measure; a row has one unit and precision.

The machine and the packages of a measurement are facts of the record of its environment.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DASH",
    "MB",
    "Heading",
    "Measure",
    "Row",
    "Table",
    "Text",
    "aligned",
    "decimals_for",
    "device_name",
    "fixed",
    "installed_packages",
    "machine_facts",
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
"""Formats the values of a measure, so that their decimals agree."""


@dataclass(frozen=True)
class Heading:
    """A column heading.

    Attributes:
        name: the heading.
        colour: colour of the swatch before it; None for no swatch.
        verdict: a word after it for a column without trusted values, such as "failed".
    """

    name: str
    colour: str | None = None
    verdict: str | None = None


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: the row heading.
        cells: the formatted cells.
        group: the heading over this row and its neighbours of the same group; empty for none.
        colour: colour of the swatch before the name; None for no swatch.
        verdict: a word after the name, such as "failed".
    """

    name: str
    cells: tuple[str, ...] = ()
    group: str = ""
    colour: str | None = None
    verdict: str | None = None


@dataclass(frozen=True)
class Table:
    """A table; `head` is the heading of the column of row headings."""

    caption: str
    head: str
    columns: tuple[Heading, ...]
    rows: tuple[Row, ...]

    @property
    def groups(self) -> Iterator[tuple[str, list[Row]]]:
        """Consecutive rows of one group, with its heading."""
        for group, rows in itertools.groupby(self.rows, key=lambda row: row.group):
            yield group, list(rows)


@dataclass(frozen=True)
class Measure:
    """A row of a table before formatting.

    Attributes:
        group: the group heading; empty for no group.
        name: the row heading.
        values: one value for each column; None if it was not measured.
        text: formats the row.
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
    """Return a format in which the smallest number has the given significant digits."""

    def text(values: Sequence[float | None]) -> list[str]:
        decimals = decimals_for(values, significant, maximum)
        return [number(value, decimals) for value in values]

    return text


def fixed(decimals: int) -> Text:
    """Return a format with the given decimals."""
    return lambda values: [number(value, decimals) for value in values]


def whole(values: Sequence[float | None]) -> list[str]:
    """Format values without decimals."""
    return [number(value, 0) for value in values]


def percent(values: Sequence[float | None]) -> list[str]:
    """Format shares, 0 to 1, as percentages."""
    return [DASH if value is None or not math.isfinite(value) else f"{number(value * 100, 1)} %" for value in values]


def ratio(value: float) -> str:
    """Format a ratio: 0.98, 2.85, 12.3."""
    return number(value, decimals_for([value], 3, 2))


def make_table(caption: str, head: str, columns: Sequence[Heading], measures: Iterable[Measure]) -> Table:
    """Return a table of the measures. Measures without any value are omitted."""
    rows = [Row(each.name, tuple(each.text(each.values)), each.group) for each in measures]
    measured = [row for row in rows if any(cell != DASH for cell in row.cells)]
    return Table(caption, head, tuple(columns), tuple(measured))


_GIB = 1024**3

_TRADEMARKS = re.compile(r"\((R|TM)\)", re.IGNORECASE)


def device_name(environment: Mapping[str, Any], *, on_gpu: bool = True) -> str:
    """Return the name of the GPU or, if there is none or it was not used, of the processor."""
    machine = _part(environment, "machine")
    name = _part(machine, "gpu").get("name") if on_gpu else None
    return _TRADEMARKS.sub("", str(name or machine.get("cpu") or "an unknown machine"))


def machine_facts(environment: Mapping[str, Any], clocks_mhz: Collection[int] = ()) -> list[tuple[str, str]]:
    """Return the known properties of the machine as names and values.

    Args:
        environment: the record.
        clocks_mhz: the clocks of the GPU during the runs.
    """
    machine, git = _part(environment, "machine"), _part(environment, "git")
    gpu, commit = _part(machine, "gpu"), git.get("commit")
    memory = gpu.get("memory_bytes")
    found = {
        "GPU": gpu.get("name"),
        "GPU memory": None if memory is None else f"{number(memory / _GIB, 1)} GiB",
        "driver": gpu.get("driver"),
        "GPU clocks": f"{min(clocks_mhz)} to {max(clocks_mhz)} MHz, during the runs" if clocks_mhz else None,
        "processor": machine.get("cpu"),
        "available processors": machine.get("cpus"),
        "system": machine.get("system"),
        "commit of sdonnx": f"{commit}, with changed files" if commit and git.get("changed") else commit,
    }
    return [(name, str(value)) for name, value in found.items() if value is not None]


def installed_packages(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the installed packages with their versions."""
    return [(name, str(version)) for name, version in _part(environment, "packages").items() if version is not None]


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a record, or an empty dictionary (a machine without a GPU)."""
    part = whole.get(name)
    return part if isinstance(part, Mapping) else {}
