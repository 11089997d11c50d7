"""What a figure is: plotly's traces and layout as plain dictionaries, with the same numbers as a table.

Colours that follow the page's scheme are names with an @, which the page's script replaces: @ink and @paper.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sdonnx.benchmark.report.tables import Table

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

_LABEL = 18  # characters of a line beside a plot that is 330 pixels wide on a phone

_ROW = 46  # pixels, of which the bar takes three fifths
_AXIS = 52  # pixels below a plot, for numbers and a title


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a colour and what has it."""

    label: str
    colour: str


@dataclass(frozen=True)
class Figure:
    """A plot.

    Attributes:
        title: what it shows, beside what its panel says.
        alt: what there is to see, for someone who cannot.
        data: plotly's traces.
        layout: plotly's layout.
        table: the numbers.
        legend: what the colours mean, where the axis does not say it.
    """

    title: str
    alt: str
    data: list[Trace]
    layout: Layout
    table: Table
    legend: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Panel:
    """Figures of one measure; `note` says how to read them, and `open` whether their tables are shown at once."""

    title: str
    note: str
    figures: tuple[Figure, ...] = field(default_factory=tuple)
    open: bool = False


def literal(text: str) -> str:
    """Return a text so that plotly shows it as it is: it reads a few HTML tags and entities."""
    return html.escape(text, quote=False)


def _label(text: str) -> str:
    lines = textwrap.wrap(text, _LABEL, max_lines=3, placeholder=" …") or [""]
    return "<br>".join(literal(line) for line in lines)


def rows_layout(names: Sequence[str], unit: str) -> Layout:
    """Return the layout of horizontal bars: row i lies at y = i, the first on top, and numbers stand after the bars."""
    return {
        "height": _ROW * len(names) + _AXIS + 8,
        "margin": {"l": 8, "r": 72, "t": 8, "b": _AXIS, "pad": 6},
        "bargap": 0,
        "xaxis": {
            "title": {"text": unit},
            "rangemode": "tozero",
            "nticks": 5,
            "tickangle": 0,
            "separatethousands": True,
        },
        # Numbers instead of categories: names that are alike, or look like numbers, stay rows of their own.
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
    """Return the layout of vertical bars: column i lies at x = i."""
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
    """Return the layout of lines that start at zero, with marks on the horizontal axis where they were measured."""
    layout: Layout = {
        "height": 340,
        "margin": {"l": 8, "r": 20, "t": 12, "b": _AXIS},
        "xaxis": {"title": {"text": title}, "rangemode": "tozero", "automargin": True},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero", "automargin": True, "nticks": 7},
    }
    if ticks is not None:
        layout["xaxis"] |= {"tickvals": list(ticks), "ticktext": [_label(text) for text in ticks.values()]}
    return layout


def bars(positions: Sequence[float], lengths: Sequence[float], starts: Sequence[float], thickness: float) -> Trace:
    """Return horizontal bars, one for each row; give them their colour with `marker`."""
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
    """Return the numbers that stand after bars."""
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
