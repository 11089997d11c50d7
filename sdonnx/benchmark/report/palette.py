"""Colours and symbols: an engine has the same ones everywhere on the page.

Engines have the palette of Okabe and Ito (Color Universal Design, 2008), its yellow and black left out: one vanishes on
white, the other on black. Parts of a whole have Paul Tol's "light" scheme (Colour Schemes, SRON/EPS/TN/09-002, 2021),
so that no part is taken for an engine. Both are told apart with any kind of colour blindness. Where a bar has two to
four parts they are tones of its engine's colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sdonnx.benchmark.results import REFERENCE, Comparison

__all__ = ["NEUTRAL", "PARTS", "Palette", "faint", "part_colours", "tone"]

_ENGINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "pentagon", "star")
_REFERENCE = "#7f7f7f"

PARTS = ("#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#bbcc33", "#99ddff", "#aaaa00")
"""Of a stacked bar, from its start."""

NEUTRAL = "#6e7781"
"""A tone that is no engine's, for legends."""

_IDLE = "#bbbbbb"

# How much of the colour a part has, as the last two digits of #rrggbbaa.
_TONES = {"load": "66", "text": "66", "decode": "a6", "rest": "26", "first": "66", "host": "26"}


class Palette:
    """Which engine has which colour and symbol.

    Attributes:
        rivals: every engine of the comparison in the order in which they were listed.
    """

    def __init__(self, comparison: Comparison) -> None:
        """Give colours by the order in which the engines appear."""
        parts: Iterable[str] = (
            each.rival
            for some in (comparison.results, comparison.throughput, comparison.resolutions, comparison.kernels)
            for each in some
        )
        drawn = (rival for rival, _ in comparison.images if rival != REFERENCE)
        names = dict.fromkeys([*parts, *drawn])
        self.rivals = tuple(names)
        numbered = [name for name in names if name != REFERENCE]
        self._colours = {name: _ENGINES[index % len(_ENGINES)] for index, name in enumerate(numbered)}
        self._symbols = {name: _SYMBOLS[index % len(_SYMBOLS)] for index, name in enumerate(numbered)}

    def colour(self, rival: str) -> str:
        """Return an engine's colour; the reference is grey."""
        return self._colours.get(rival, _REFERENCE)

    def symbol(self, rival: str) -> str:
        """Return what marks an engine's points; with more engines than colours it tells them apart."""
        return self._symbols.get(rival, "x")


def faint(colour: str) -> str:
    """Return a colour, #rrggbb, that lets through what is behind it."""
    return f"{colour}66"


def tone(colour: str, part: str) -> str:
    """Return the tone of a colour that a part of a bar has: the main part all of it, the others less."""
    return colour + _TONES.get(part, "ff")


def part_colours(parts: Sequence[str]) -> dict[str, str]:
    """Return colours for more parts than there are tones, by their order; "idle" is grey."""
    named = [part for part in parts if part != "idle"]
    colours = {part: PARTS[index % len(PARTS)] for index, part in enumerate(named)}
    return {part: colours.get(part, _IDLE) for part in parts}
