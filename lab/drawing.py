"""Line charts as paths and texts, which the page's template writes as SVG.

A chart is 340 units wide, about the width of a phone in CSS pixels, and its text has 11 or 12 units. It is scaled with
the page's columns, so that its text is legible on a phone and nothing is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from sdonnx.html.tables import decimals_for, number

__all__ = ["WIDTH", "Drawing", "Path", "Series", "Text", "line_chart"]

WIDTH = 340.0

_TICK = 11.0  # font size of labels
_WIDER = 1.25  # the reader's font may be wider than Pillow's; DejaVu Sans is by 18 %

_PLOT_HEIGHT = 190.0
_MARK = 4.5  # half the size of a marker


@dataclass(frozen=True)
class Path:
    """A shape.

    Attributes:
        d: SVG path data.
        kind: CSS class: grid, line, mark or key.
        colour: #rrggbb or #rrggbbaa; empty for the class's own.
        title: text that is shown when the pointer is over the shape.
    """

    d: str
    kind: str
    colour: str = ""
    title: str = ""


@dataclass(frozen=True)
class Text:
    """A line of text. `kind` is its CSS class (name, value or tick), `anchor` its SVG text-anchor."""

    x: float
    y: float
    text: str
    kind: str
    anchor: str = "start"


@dataclass(frozen=True)
class Drawing:
    """A chart that is `WIDTH` units wide."""

    height: float
    paths: tuple[Path, ...]
    texts: tuple[Text, ...]


@dataclass(frozen=True)
class Series:
    """Points of an engine in a line chart.

    Attributes:
        colour: #rrggbb.
        symbol: index of the marker.
        points: (x, y), marked.
        line: ends of straight pieces; the points themselves if None.
        title: text for the pointer.
    """

    colour: str
    symbol: int
    points: tuple[tuple[float, float], ...]
    line: tuple[tuple[float, float], ...] | None
    title: str


def line_chart(series: Sequence[Series], across: str, up: str, ticks: Mapping[float, str] | None = None) -> Drawing:
    """Return lines in axes that start at zero.

    Args:
        series: the lines.
        across: title of the x axis.
        up: title of the y axis.
        ticks: labels of the x axis by place; round numbers if None.
    """
    points = [point for each in series for point in (*each.points, *(each.line or ()))]
    widest = max([x for x, _ in points] + list(ticks or ()), default=1.0) or 1.0
    highest = max((_length(y) for _, y in points), default=1.0) or 1.0
    heights = _round_numbers(highest)
    labels = _number_labels(heights)
    left = max(_width(label, _TICK) for label in labels) + 6
    bottom = 2 * _TICK + _PLOT_HEIGHT  # the title of the y axis is above it

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / widest * (WIDTH - left - _MARK - 2), bottom - y / highest * _PLOT_HEIGHT

    texts = [Text(0, _TICK, up, "tick")]
    paths = []
    for height, label in zip(heights, labels, strict=True):
        y = place(0, height)[1]
        paths.append(Path(f"M{left:.1f} {y:.1f}H{WIDTH:.1f}", "grid"))
        texts.append(Text(left - 6, y + 4, label, "tick", "end"))
    if ticks is None:
        places = _round_numbers(widest, 5)
        ticks = dict(zip(places, _number_labels(places), strict=True))
    texts += _tick_labels([(place(x, 0)[0], label) for x, label in ticks.items()], bottom + 16)
    texts.append(Text(WIDTH, bottom + 33, across, "tick", "end"))
    for each in series:
        line = [place(x, y) for x, y in each.line or each.points if math.isfinite(y)]
        if line:
            paths.append(Path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in line), "line", each.colour))
        paths += [
            Path(_mark(each.symbol, *place(x, y)), "mark", each.colour, f"{each.title}, {up}: {number(y, 3)}")
            for x, y in each.points
            if math.isfinite(y)
        ]
    return Drawing(bottom + 38, tuple(paths), tuple(texts))


def _tick_labels(ticks: Sequence[tuple[float, str]], y: float) -> Iterator[Text]:
    """Yield the labels below the x axis, without those that would touch the previous one."""
    free = 0.0
    for x, label in ticks:
        half = _width(label, _TICK) / 2
        x = min(max(x, half), WIDTH - half)
        if x - half >= free:
            yield Text(x, y, label, "tick", "middle")
            free = x + half + 4


def _round_numbers(maximum: float, count: int = 4) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, from zero up to the maximum."""
    step = 10 ** math.floor(math.log10(maximum / count))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * count >= maximum * 0.999)
    return [index * step for index in range(math.floor(maximum / step * 1.001) + 1)]


def _number_labels(values: Sequence[float]) -> list[str]:
    decimals = decimals_for(values, 1, 6)
    return [number(value, decimals) for value in values]


def _mark(symbol: int, x: float, y: float) -> str:
    """Return the path of a marker. The shapes repeat after five."""
    s = _MARK
    shapes = (
        _circle(x, y, s),
        f"M{x - s:.1f} {y - s:.1f}h{2 * s:.1f}v{2 * s:.1f}h{-2 * s:.1f}z",
        f"M{x:.1f} {y - s - 1:.1f}l{s + 1:.1f} {s + 1:.1f}l{-s - 1:.1f} {s + 1:.1f}l{-s - 1:.1f} {-s - 1:.1f}z",
        f"M{x:.1f} {y - s:.1f}l{s:.1f} {2 * s:.1f}h{-2 * s:.1f}z",
        f"M{x:.1f} {y + s:.1f}l{s:.1f} {-2 * s:.1f}h{-2 * s:.1f}z",
    )
    return shapes[symbol % len(shapes)]


def _circle(x: float, y: float, radius: float) -> str:
    arc = f"a{radius} {radius} 0 1 0 "
    return f"M{x - radius:.1f} {y:.1f}{arc}{2 * radius:.1f} 0{arc}{-2 * radius:.1f} 0z"


def _length(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _width(text: str, size: float) -> float:
    """Return an upper bound of a text's width."""
    return sum(_character_width(character) for character in text) * size


@cache
def _character_width(character: str) -> float:
    """Return an upper bound of a character's width, for a font size of 1."""
    from PIL import ImageFont

    if ord(character) > 0x2000:  # symbols, ideographs and emoji, which Pillow's font lacks
        return 2.0 if ord(character) > 0xFFFF else 1.1
    return _WIDER * float(ImageFont.load_default(100).getlength(character)) / 100
