"""Figures: a drawing with its text alternative, its legend and the same numbers as a table."""

from __future__ import annotations

from dataclasses import dataclass

from sdonnx.benchmark.report.drawing import Drawing
from sdonnx.benchmark.report.html_tables import Table

__all__ = ["Figure", "Key", "Panel"]


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a label and its colour."""

    label: str
    colour: str


@dataclass(frozen=True)
class Figure:
    """A plot.

    Attributes:
        title: the workload.
        name: what is shown, as the drawing's title.
        alt: the text alternative.
        drawing: the plot.
        table: the numbers.
        legend: the meaning of the colours, if the drawing does not name them.
        notes: remarks on the numbers.
    """

    title: str
    name: str
    alt: str
    drawing: Drawing
    table: Table
    legend: tuple[Key, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Panel:
    """Figures of one measure. `note` explains them; `open` shows their tables expanded."""

    title: str
    note: str
    figures: tuple[Figure, ...] = ()
    open: bool = False
