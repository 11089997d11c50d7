"""Judge whether images show the shapes of their captions, without a learned model, and how often a pipeline succeeds.

Pixels are divided by their nearest colour, and connected pixels are an object. The centroid gives its position, the
area its size, and three moments its shape. With z = x + iy from the centroid and the area A, the sum of |z|^2 / A^2 is
smallest for a circle; the sum of z^3 / A^2.5 differs from zero for triangles only; the sum of z^4 / A^3 is negative for
upright squares, positive for upright crosses and zero for circles (Hu 1962, "Visual pattern recognition by moment
invariants", without the invariance to rotation). Only numpy is used.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sdonnx.sample.shapes.shape_scenes import (
    COLOURS,
    IMAGE_SIZE,
    PHRASES,
    Scene,
    Thing,
    all_scenes,
    captions,
    is_held_out,
    read_caption,
)

__all__ = [
    "MEASURES",
    "FoundObject",
    "SceneScore",
    "draw_batches",
    "find_objects",
    "held_out_captions",
    "judge_image",
    "label_regions",
    "score_images",
    "summarize",
    "wilson_interval",
]

Mask = npt.NDArray[np.bool_]

_WHITE = (255, 255, 255)
_PALETTE = np.array([_WHITE, *COLOURS.values()], np.float32)
# Largest distance of a pixel to its nearest colour, of 441 between black and white. The closest two colours of the
# palette are 144 apart; pixels farther from all are of another colour, which no object may have.
_MAX_DISTANCE = 90.0
# An object has this many pixels with all eight neighbors in the same object. Smaller regions are the mixed colours of
# outlines, at most two pixels wide. A small shape has at least 40.
_MIN_CORE = 9
_LARGE_AREA = math.pi * 8.2**2  # pixels, at 64x64; between small (radius 6.8) and large (radius 9.6)

# Moments of the second, third and fourth order of each shape of `shape_drawing`, from their integrals.
_PROTOTYPES = {
    "circle": (1 / (2 * math.pi), 0.0, 0.0),
    "square": (1 / 6, 0.0, -1 / 60),
    "triangle": (1 / (3 * math.sqrt(3)), (3 * math.sqrt(3) / 4) ** -1.5 / 10, 0.0),
    "cross": (29 / 150, 0.0, 47 / 1500),
}
# Small crosses, with arms of five pixels, are up to 0.028 away.
_MAX_MOMENT_DISTANCE = 0.035


@dataclass(frozen=True)
class FoundObject:
    """An object of an image.

    Attributes:
        colour: a key of `COLOURS`; None for another colour.
        shape: one of `SHAPES`; None for another shape.
        size: "small" or "large".
        x: centroid in pixels, from the left.
        y: centroid in pixels, from the top.
        filled: (H,W), the object's pixels and its holes.
    """

    colour: str | None
    shape: str | None
    size: str
    x: float
    y: float
    filled: Mask


@dataclass(frozen=True)
class SceneScore:
    """What is right in an image.

    Attributes:
        colour: there are as many objects as the caption says, and they have its colours.
        shape: also, each object has the shape that the caption says for its colour.
        size: also, the sizes that the caption mentions; None if it mentions none. Shapes do not matter.
        relation: also, the objects have the relation; None for a single shape. Shapes do not matter.
    """

    colour: bool
    shape: bool
    size: bool | None
    relation: bool | None

    @property
    def right(self) -> bool:
        """Whether all is right."""
        return self.shape and self.size is not False and self.relation is not False


def label_regions(classes: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return (H,W) labels of the regions of equal class that are connected by sides of pixels.

    The label of a region is the largest index of its pixels in the flattened image.
    """
    labels = np.arange(classes.size, dtype=np.int64).reshape(classes.shape)
    across, down = classes[:, 1:] == classes[:, :-1], classes[1:] == classes[:-1]
    while True:
        before = labels.copy()
        for mask, first, second in (
            (across, labels[:, :-1], labels[:, 1:]),
            (down, labels[:-1], labels[1:]),
        ):
            joined = np.where(mask, np.maximum(first, second), 0)
            np.maximum(first, joined, out=first)
            np.maximum(second, joined, out=second)
        # A label is the index of a pixel of the same region: take over that pixel's label, which doubles the reach.
        labels = np.maximum(labels, labels.ravel()[labels])
        if np.array_equal(before, labels):
            return labels


def _core(mask: Mask) -> int:
    """Return the number of pixels with all eight neighbors in the mask too; outside the image is not in the mask."""
    padded = np.pad(mask, 1)
    rows = padded[:-2] & padded[1:-1] & padded[2:]
    return int((rows[:, :-2] & rows[:, 1:-1] & rows[:, 2:]).sum())


def _filled(mask: Mask) -> Mask:
    """Return the mask with its holes: all but the region that surrounds it."""
    outside = label_regions(np.pad(mask, 1).astype(np.int8))
    return np.asarray((outside != outside[-1, -1])[1:-1, 1:-1])


def _moments(filled: Mask) -> tuple[float, float, int, tuple[float, float, float]]:
    """Return the centroid's x and y, the area, and the three moments of the module's docstring."""
    rows, columns = np.nonzero(filled)
    x, y = float(columns.mean()) + 0.5, float(rows.mean()) + 0.5
    z = (columns + 0.5 - x) + 1j * (rows + 0.5 - y)
    area = len(rows)
    second = float((abs(z) ** 2).sum())
    third = float(abs((z**3).sum()))
    fourth = float((z**4).sum().real)
    return x, y, area, (second / area**2, third / area**2.5, fourth / area**3)


def _shape(moments: tuple[float, float, float]) -> str | None:
    """Return the shape with the nearest moments; None if all are far away."""
    distance, name = min((math.dist(moments, prototype), name) for name, prototype in _PROTOTYPES.items())
    return name if distance <= _MAX_MOMENT_DISTANCE else None


def find_objects(image: npt.NDArray[np.uint8]) -> tuple[FoundObject, ...]:
    """Return the objects of an image (H,W,3), from the largest to the smallest."""
    scale = image.shape[0] / IMAGE_SIZE
    distances = np.linalg.norm(image[:, :, None].astype(np.float32) - _PALETTE, axis=-1)
    classes = np.where(distances.min(-1) <= _MAX_DISTANCE, distances.argmin(-1), len(_PALETTE))
    labels = label_regions(classes)
    names = (None, *COLOURS, None)
    found = []
    for label in np.unique(labels[classes > 0]):
        mask = labels == label
        if _core(mask) < _MIN_CORE * scale**2:
            continue
        filled = _filled(mask)
        x, y, area, moments = _moments(filled)
        size = "large" if area >= _LARGE_AREA * scale**2 else "small"
        colour = names[int(classes.flat[label])]
        found.append((area, FoundObject(colour, _shape(moments), size, x / scale, y / scale, filled)))
    return tuple(each for _, each in sorted(found, key=lambda pair: -pair[0]))


def _contains(outer: FoundObject, inner: FoundObject) -> bool:
    """Return whether all pixels of one object lie in the other or in its holes."""
    return bool(outer.filled[inner.filled].all())


def _is_related(first: FoundObject, relation: str, second: FoundObject) -> bool:
    """Return whether a relation is the one that describes two objects best."""
    if relation in ("inside", "around"):
        return _contains(second, first) if relation == "inside" else _contains(first, second)
    x, y = second.x - first.x, second.y - first.y
    if _contains(first, second) or _contains(second, first):
        return False
    distance = {"left": x, "right": -x, "above": y, "below": -y}[relation]
    return distance > min(abs(x), abs(y))


def judge_image(image: npt.NDArray[np.uint8], scene: Scene) -> SceneScore:
    """Compare the objects of an image (H,W,3) with a scene."""
    found = find_objects(image)
    by_colour = {each.colour: each for each in found}
    things = scene.things
    colour = len(found) == len(things) and by_colour.keys() == {thing.colour for thing in things}

    def all_match(matches: Sequence[bool]) -> bool:
        return colour and all(matches)

    def of(thing: Thing) -> FoundObject | None:
        return by_colour.get(thing.colour) if colour else None

    shape = all_match([(each := of(thing)) is not None and each.shape == thing.shape for thing in things])
    sized = [thing for thing in things if thing.size is not None]
    size = all_match([(each := of(thing)) is not None and each.size == thing.size for thing in sized])
    relation = None
    if scene.relation is not None and scene.second is not None:
        first, second = of(scene.first), of(scene.second)
        relation = first is not None and second is not None and _is_related(first, scene.relation, second)
    return SceneScore(colour, shape, size if sized else None, relation)


def wilson_interval(successes: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the Wilson score interval of a share, with 95 % confidence by default.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".

    Raises:
        ValueError: `count` is not positive, or `successes` is not from 0 to `count`.
    """
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"{successes} of {count}")
    share = successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


MEASURES = ("colour", "shape", "size", "relation", "right")
"""The attributes of `SceneScore` that are counted."""

_SINGLE_SHARE = 0.1

_BATCH = 20


def held_out_captions(count: int, seed: int) -> tuple[str, ...]:
    """Return captions that training leaves out: a tenth with one shape, and the others equally of each relation."""
    source = random.Random(seed)
    by_relation: dict[str | None, list[Scene]] = {}
    for scene in all_scenes():
        if is_held_out(scene):
            by_relation.setdefault(scene.relation, []).append(scene)
    single = round(count * _SINGLE_SHARE)
    relations = [None] * single + list(itertools.islice(itertools.cycle(PHRASES), count - single))
    return tuple(source.choice(captions(source.choice(by_relation[relation]))) for relation in relations)


def draw_batches(
    generate: Callable[[list[str], int], Sequence[Image.Image]], prompts: Sequence[str], seed: int
) -> list[npt.NDArray[np.uint8]]:
    """Return an image (H,W,3) of each caption. The same seed gives the same noise to each engine.

    Args:
        generate: returns an image of each of several prompts, from a seed.
        prompts: the captions.
        seed: the first seed; each batch has another one.
    """
    images = []
    for start in range(0, len(prompts), _BATCH):
        # Of a batch, the images are drawn from consecutive random numbers of one seed.
        images += [
            np.asarray(each.convert("RGB")) for each in generate(list(prompts[start : start + _BATCH]), seed + start)
        ]
    return images


def score_images(images: Iterable[npt.NDArray[np.uint8]], prompts: Sequence[str]) -> list[SceneScore]:
    """Judge an image (H,W,3) for each caption."""
    return [judge_image(image, read_caption(prompt)) for image, prompt in zip(images, prompts, strict=True)]


def summarize(scores: Sequence[SceneScore]) -> dict[str, dict[str, Any]]:
    """Return `right`, `count`, `share` and the Wilson interval `low` to `high` of each of `MEASURES` that applies."""
    measured = {measure: [getattr(score, measure) for score in scores] for measure in MEASURES}
    return {measure: counted for measure, values in measured.items() if (counted := _count(values)) is not None}


def _count(values: Iterable[bool | None]) -> dict[str, Any] | None:
    """Return how many of the values are true, without those that are None; None if there are no others."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = wilson_interval(sum(known), len(known))
    return {"right": sum(known), "count": len(known), "share": sum(known) / len(known), "low": low, "high": high}
