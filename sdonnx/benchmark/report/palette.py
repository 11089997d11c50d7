"""Colours. An engine has the same colour everywhere on the page.

Engines use the palette of Okabe and Ito (Color Universal Design, 2008) without yellow, which is invisible on white, and
black, which is invisible on black. Parts of a whole use Paul Tol's "light" scheme (Colour Schemes, SRON/EPS/TN/09-002,
2021), so that they are not mistaken for engines. Both are distinguishable with any kind of colour blindness. The parts
of bars with two to four parts are tones of the engine's colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sdonnx.benchmark.report.html_tables import Heading
from sdonnx.benchmark.results import REFERENCE, Comparison

__all__ = ["NEUTRAL", "PARTS", "Palette", "faint", "part_colours", "tone"]

_ENGINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_REFERENCE = "#7f7f7f"

PARTS = ("#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#bbcc33", "#99ddff", "#aaaa00")
"""Colours of the parts of a stacked bar, in order."""

NEUTRAL = "#6e7781"
"""A colour for legends that no engine has."""

_IDLE = "#bbbbbb"

# Opacity of the parts, as the last two digits of #rrggbbaa.
_TONES = {"load": "66", "text": "66", "decode": "a6", "rest": "26", "first": "66", "host": "26"}


class Palette:
    """The colours of the engines.

    Attributes:
        rivals: every engine of the comparison, in order.
    """

    def __init__(self, comparison: Comparison) -> None:
        """Assign colours in the order of the engines."""
        parts: Iterable[str] = (
            each.rival
            for some in (comparison.results, comparison.throughput, comparison.resolutions, comparison.kernels)
            for each in some
        )
        with_images = (rival for rival, _ in comparison.images if rival != REFERENCE)
        names = dict.fromkeys([*parts, *with_images])
        self.rivals = tuple(names)
        numbered = enumerate(name for name in names if name != REFERENCE)
        self._colours = {name: _ENGINES[index % len(_ENGINES)] for index, name in numbered}

    def colour(self, rival: str) -> str:
        """Return an engine's colour; the reference is grey."""
        return self._colours.get(rival, _REFERENCE)

    def headings(self, rivals: Iterable[str]) -> tuple[Heading, ...]:
        """Return column headings for engines."""
        return tuple(Heading(rival, self.colour(rival)) for rival in rivals)


def faint(colour: str) -> str:
    """Return a translucent version of a colour #rrggbb."""
    return f"{colour}66"


def tone(colour: str, part: str) -> str:
    """Return the tone of a colour for a part of a bar; the main part is opaque."""
    return colour + _TONES.get(part, "ff")


def part_colours(parts: Sequence[str]) -> dict[str, str]:
    """Return colours for many parts, in order; "idle" is grey."""
    named = [part for part in parts if part != "idle"]
    colours = {part: PARTS[index % len(PARTS)] for index, part in enumerate(named)}
    return {part: colours.get(part, _IDLE) for part in parts}
