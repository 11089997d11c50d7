"""Captions of drawings with one or two shapes, such as "a small red circle to the left of a blue square".

A scene says what a drawing shows, without positions. Scenes with a hash below a limit are held out: training never
sees them, nor the same drawing described from its other shape.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sdonnx.errors import OptionError

__all__ = [
    "COLOURS",
    "IMAGE_SIZE",
    "MIRRORED",
    "PHRASES",
    "SHAPES",
    "SIZES",
    "VOCABULARY",
    "Scene",
    "Thing",
    "all_scenes",
    "captions",
    "is_caption",
    "is_held_out",
    "read_caption",
]

IMAGE_SIZE = 64
"""Height and width of the drawings, in pixels."""

SHAPES = ("circle", "square", "triangle", "cross")

COLOURS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "red": (225, 35, 35),
        "green": (30, 160, 70),
        "blue": (35, 75, 225),
        "yellow": (250, 210, 30),
        "purple": (170, 40, 180),
        "black": (25, 25, 25),
    }
)
"""RGB values of each colour; the background is white."""

SIZES = ("small", "large")

PHRASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "left": ("to the left of", "left of"),
        "right": ("to the right of", "right of"),
        "above": ("above", "over"),
        "below": ("below", "under"),
        "inside": ("inside", "in"),
        "around": ("around", "surrounding"),
    }
)
"""Phrases for each relation of the first shape to the second; captions use any of them."""

MIRRORED: Mapping[str, str] = MappingProxyType(
    {"left": "right", "right": "left", "above": "below", "below": "above", "inside": "around", "around": "inside"}
)
"""The relation of the second shape to the first."""

_RELATIONS = {phrase: relation for relation, phrases in PHRASES.items() for phrase in phrases}
VOCABULARY: tuple[str, ...] = tuple(dict.fromkeys(["a", *SIZES, *COLOURS, *SHAPES, *" ".join(_RELATIONS).split()]))
"""All words of the captions."""

_HELD_OUT_PERCENT = 15


@dataclass(frozen=True)
class Thing:
    """A shape of a scene.

    Attributes:
        shape: one of `SHAPES`.
        colour: a key of `COLOURS`.
        size: one of `SIZES`; None if the caption does not mention it.
    """

    shape: str
    colour: str
    size: str | None = None

    def __str__(self) -> str:
        return " ".join(word for word in ("a", self.size, self.colour, self.shape) if word)


@dataclass(frozen=True)
class Scene:
    """One or two shapes.

    Attributes:
        first: the first shape.
        relation: relation of the first shape to the second, a key of `PHRASES`; None for a single shape.
        second: the second shape, of another colour; None for a single shape.
    """

    first: Thing
    relation: str | None = None
    second: Thing | None = None

    @property
    def things(self) -> tuple[Thing, ...]:
        """The shapes, in the caption's order."""
        return (self.first,) if self.second is None else (self.first, self.second)


def captions(scene: Scene) -> tuple[str, ...]:
    """Return all captions of a scene."""
    if scene.relation is None:
        return (str(scene.first),)
    return tuple(f"{scene.first} {phrase} {scene.second}" for phrase in PHRASES[scene.relation])


def is_held_out(scene: Scene) -> bool:
    """Return whether training leaves the scene out. Depends on shapes, colours and relation, but not on sizes.

    A pair has the same result when it is described from its second shape.
    """
    names = [f"{thing.colour} {thing.shape}" for thing in scene.things]
    if scene.relation is None:
        key = names[0]
    elif scene.relation in ("left", "above", "inside"):
        key = f"{names[0]} {scene.relation} {names[1]}"
    else:
        key = f"{names[1]} {MIRRORED[scene.relation]} {names[0]}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100 < _HELD_OUT_PERCENT


def all_scenes() -> Iterator[Scene]:
    """Yield every scene: single shapes first, and pairs of different colours."""
    for shape, colour, size in itertools.product(SHAPES, COLOURS, (None, *SIZES)):
        yield Scene(Thing(shape, colour, size))
    kinds = list(itertools.product(SHAPES, COLOURS))
    for relation, (shape, colour), (other, other_colour) in itertools.product(PHRASES, kinds, kinds):
        if colour == other_colour:
            continue
        for size, other_size in itertools.product((None, *SIZES), repeat=2):
            inner, outer = (size, other_size) if relation == "inside" else (other_size, size)
            if relation in ("inside", "around") and (inner == "large" or outer == "small"):
                continue
            yield Scene(Thing(shape, colour, size), relation, Thing(other, other_colour, other_size))


_THING = rf"an? (?:({'|'.join(SIZES)}) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_CAPTION = re.compile(rf"{_THING}(?: ({'|'.join(sorted(_RELATIONS, key=len, reverse=True))}) {_THING})?")


def is_caption(text: str) -> bool:
    """Return whether a prompt is a caption of a scene."""
    return _CAPTION.fullmatch(text.strip().lower()) is not None


def read_caption(text: str) -> Scene:
    """Return the scene of a caption.

    Raises:
        OptionError: the text is not a caption.
    """
    found = _CAPTION.fullmatch(text.strip().lower())
    if found is None:
        raise OptionError(f"the prompt {text!r}", "a caption such as 'a red circle to the left of a blue square'")
    size, colour, shape, phrase, other_size, other_colour, other = found.groups()
    if phrase is None:
        return Scene(Thing(shape, colour, size))
    return Scene(Thing(shape, colour, size), _RELATIONS[phrase], Thing(other, other_colour, other_size))
