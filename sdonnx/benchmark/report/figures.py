"""Figures: plotly's traces and layout as plain dictionaries, with the same numbers as a table.

The page's script replaces the names @ink and @paper by the colours of the light or dark scheme.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sdonnx.benchmark.report.html_tables import Table

__all__ = [
    "INK",
    "PAPER",
    "Figure",
    "Key",
    "Panel",
    "Trace",
    "bars",
    "columns_layout",
    "ends",
    "lines_layout",
    "literal",
    "rows_layout",
]

INK = "@ink"
PAPER = "@paper"

Trace = dict[str, Any]
Layout = dict[str, Any]

_LABEL_CHARACTERS = 18  # per line of a label, for a plot that is 330 pixels wide on a phone

_ROW_PIXELS = 46  # height of a row; the bar is three fifths of it
_AXIS_PIXELS = 52  # height of the axis labels and title below a plot


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a label and its colour."""

    label: str
    colour: str


@dataclass(frozen=True)
class Figure:
    """A plot.

    Attributes:
        title: the title within the panel.
        alt: the text alternative.
        data: plotly's traces.
        layout: plotly's layout.
        table: the numbers.
        legend: the meaning of the colours, if the axis does not show it.
    """

    title: str
    alt: str
    data: list[Trace]
    layout: Layout
    table: Table
    legend: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Panel:
    """Figures of one measure. `note` explains them; `open` shows their tables expanded."""

    title: str
    note: str
    figures: tuple[Figure, ...] = field(default_factory=tuple)
    open: bool = False


def literal(text: str) -> str:
    """Escape a text for plotly, which interprets some HTML tags and entities."""
    return html.escape(text, quote=False)


def _label(text: str) -> str:
    lines = textwrap.wrap(text, _LABEL_CHARACTERS, max_lines=3, placeholder=" …") or [""]
    return "<br>".join(literal(line) for line in lines)


def rows_layout(names: Sequence[str], unit: str) -> Layout:
    """Return the layout of horizontal bars: row i is at y = i, the first on top, with numbers after the bars."""
    return {
        "height": _ROW_PIXELS * len(names) + _AXIS_PIXELS + 8,
        "margin": {"l": 8, "r": 72, "t": 8, "b": _AXIS_PIXELS, "pad": 6},
        "bargap": 0,
        "xaxis": {
            "title": {"text": unit},
            "rangemode": "tozero",
            "nticks": 5,
            "tickangle": 0,
            "separatethousands": True,
        },
        # Numbers instead of categories keep rows with equal or numeric names separate.
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": [_label(name) for name in names],
            "range": [len(names) - 0.45, -0.55],
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
        },
    }


def columns_layout(names: Sequence[str], title: str, unit: str) -> Layout:
    """Return the layout of vertical bars: column i is at x = i."""
    layout = lines_layout(title, unit)
    layout["xaxis"] |= {
        "tickvals": list(range(len(names))),
        "ticktext": [_label(name) for name in names],
        "range": [-0.6, len(names) - 0.4],
        "showgrid": False,
        "zeroline": False,
    }
    return layout


def lines_layout(title: str, unit: str, ticks: dict[float, str] | None = None) -> Layout:
    """Return the layout of a line chart with axes that start at zero, and ticks at the measured x values."""
    layout: Layout = {
        "height": 340,
        "margin": {"l": 8, "r": 20, "t": 12, "b": _AXIS_PIXELS},
        "xaxis": {"title": {"text": title}, "rangemode": "tozero", "automargin": True},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero", "automargin": True, "nticks": 7},
    }
    if ticks is not None:
        layout["xaxis"] |= {"tickvals": list(ticks), "ticktext": [_label(text) for text in ticks.values()]}
    return layout


def bars(positions: Sequence[float], lengths: Sequence[float], starts: Sequence[float], thickness: float) -> Trace:
    """Return horizontal bars, one for each row; set their colour with `marker`."""
    return {
        "type": "bar",
        "orientation": "h",
        "x": list(lengths),
        "y": list(positions),
        "base": list(starts),
        "width": thickness,
        "hoverinfo": "text",
    }


def ends(positions: Sequence[float], at: Sequence[float], texts: Sequence[str]) -> Trace:
    """Return the numbers after the bars."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": list(at),
        "y": list(positions),
        "text": [f"\u2002{literal(text)}" for text in texts],
        "textposition": "middle right",
        "cliponaxis": False,
        "hoverinfo": "skip",
        "textfont": {"color": INK},
    }
