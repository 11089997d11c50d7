"""Colours. An engine has the same colour everywhere on the page.

Engines use the palette of Okabe and Ito (Color Universal Design, 2008) without yellow, which is invisible on white, and
black, which is invisible on black. Parts of a whole use Paul Tol's "light" scheme (Colour Schemes, SRON/EPS/TN/09-002,
2021), so that they are not mistaken for engines. Both are distinguishable with any kind of colour blindness. The parts
of bars with two to four parts are tones of the engine's colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sdonnx.benchmark.results import Comparison
from sdonnx.html.tables import Heading
from sdonnx.reference import REFERENCE

__all__ = ["NEUTRAL", "PARTS", "Palette", "part_colours", "tone"]

_ENGINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_REFERENCE = "#7f7f7f"

PARTS = ("#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#bbcc33", "#99ddff", "#aaaa00")
"""Colours of the parts of a stacked bar, in order."""

NEUTRAL = "#6e7781"
"""A colour for legends that no engine has."""

_IDLE = "#bbbbbb"

# Opacity of the parts, as the last two digits of #rrggbbaa.
_TONES = {"load": "66", "text": "66", "decode": "a6", "rest": "26", "first": "66", "stall": "66", "host": "26"}


class Palette:
    """The colours of the engines, in their order.

    Attributes:
        rivals: every engine of the comparison, in order.
    """

    def __init__(self, comparison: Comparison) -> None:
        measured = (comparison.results, comparison.throughput, comparison.resolutions, comparison.kernels)
        names = [each.rival for some in measured for each in some]
        names += [rival for rival, _ in comparison.images if rival != REFERENCE]
        self.rivals = tuple(dict.fromkeys(names))
        numbered = enumerate(name for name in self.rivals if name != REFERENCE)
        self._colours = {name: _ENGINES[index % len(_ENGINES)] for index, name in numbered}

    def colour(self, rival: str) -> str:
        """Return an engine's colour; the reference is grey."""
        return self._colours.get(rival, _REFERENCE)

    def headings(self, rivals: Iterable[str]) -> tuple[Heading, ...]:
        """Return column headings for engines."""
        return tuple(Heading(rival, self.colour(rival)) for rival in rivals)


def tone(colour: str, part: str) -> str:
    """Return the tone of a colour for a part of a bar; the main part is opaque."""
    return colour + _TONES.get(part, "")


def part_colours(parts: Sequence[str]) -> dict[str, str]:
    """Return colours for many parts, in order; "idle" is grey."""
    named = [part for part in parts if part != "idle"]
    colours = {part: PARTS[index % len(PARTS)] for index, part in enumerate(named)}
    return {part: colours.get(part, _IDLE) for part in parts}
