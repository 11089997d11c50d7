"""Draw scenes of `shape_scenes` with torch, many at once.

A shape of radius r has the area of a circle of that radius, so that sizes do not depend on shapes. Its outline is the
zero of a signed distance, and a pixel's coverage is 0.5 minus that distance, limited to [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sdonnx.sample.shapes.shape_scenes import COLOURS, IMAGE_SIZE, PHRASES, SHAPES, SIZES, Scene

__all__ = ["Layouts", "SceneTable", "draw", "place"]

# Of shapes with area pi: half the side of the square, half the width of the cross's arms, and of the triangle
# the radius of the inscribed circle and half a side. The lowest side of the triangle is horizontal.
_SQUARE = math.sqrt(math.pi) / 2
_ARM = math.sqrt(math.pi / 5) / 2
_INRADIUS = math.sqrt(math.pi / (3 * math.sqrt(3)))
_HALF_SIDE = _INRADIUS * math.sqrt(3)
# Distances from the centre to the left, the top and the bottom of each shape.
_EXTENTS = ((1.0, 1.0, 1.0), (_SQUARE,) * 3, (_HALF_SIDE, 2 * _INRADIUS, _INRADIUS), (3 * _ARM,) * 3)

# Radii in pixels: small and large shapes, and those around others.
_RADII = ((6.0, 6.8), (9.6, 10.4), (19.0, 21.0))
_OUTER = len(SIZES)
_MARGIN, _GAP, _JITTER = 1.0, 3.0, 1.0  # pixels: to the edge, between two shapes, of an inner shape's centre
_SLOPE = 0.4  # largest offset in the direction across a relation, as a share of the distance along it
_RELATIONS = tuple(PHRASES)


class SceneTable:
    """Scenes as tensors of indices, one row per scene.

    Attributes:
        shapes: (N,2), index into `SHAPES`; of a single shape, -1 for the second.
        colours: (N,2,3), RGB values from -1 to 1.
        sizes: (N,2), index into `SIZES`; -1 if the caption does not say.
        relations: (N,), index into `PHRASES`; -1 for a single shape.
    """

    def __init__(self, scenes: Sequence[Scene], device: str) -> None:
        rgb = {name: [value / 127.5 - 1 for value in values] for name, values in COLOURS.items()}
        pairs = [(each.first, each.second or each.first) for each in scenes]
        self.shapes = torch.tensor([[SHAPES.index(thing.shape) for thing in pair] for pair in pairs], device=device)
        self.colours = torch.tensor([[rgb[thing.colour] for thing in pair] for pair in pairs], device=device)
        self.sizes = torch.tensor(
            [[-1 if thing.size is None else SIZES.index(thing.size) for thing in pair] for pair in pairs], device=device
        )
        self.relations = torch.tensor(
            [-1 if each.relation is None else _RELATIONS.index(each.relation) for each in scenes], device=device
        )


@dataclass(frozen=True)
class Layouts:
    """Positions of the shapes of B drawings.

    Attributes:
        shapes: (B,2), index into `SHAPES`.
        colours: (B,2,3), RGB values from -1 to 1.
        centres: (B,2,2), centroids as x and y, in pixels.
        radii: (B,2), in pixels; 0 for a shape that is missing.
        is_second_behind: (B,), whether the second shape is behind the first.
    """

    shapes: torch.Tensor
    colours: torch.Tensor
    centres: torch.Tensor
    radii: torch.Tensor
    is_second_behind: torch.Tensor


def place(table: SceneTable, rows: torch.Tensor, generator: torch.Generator) -> Layouts:
    """Choose sizes and positions at random for the scenes in these rows of the table.

    Along a relation, the free pixels are divided at random between both edges and the gap. Across it, the second shape
    is displaced by at most 0.4 of the distance, so that one relation fits each drawing.
    """
    device, count = rows.device, len(rows)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(count, *shape, generator=generator, device=device)

    shapes, relations = table.shapes[rows], table.relations[rows]
    sizes = torch.where(table.sizes[rows] < 0, (uniform(2) < 0.5).long(), table.sizes[rows])
    inside, around = relations == _RELATIONS.index("inside"), relations == _RELATIONS.index("around")
    small, outer = torch.zeros_like(relations), torch.full_like(relations, _OUTER)
    nested = torch.where(inside[:, None], torch.stack([small, outer], 1), torch.stack([outer, small], 1))
    sizes = torch.where((inside | around)[:, None], nested, sizes)
    low, high = torch.tensor(_RADII, device=device)[sizes].unbind(-1)
    radii = low + (high - low) * uniform(2)
    side, top, bottom = (torch.tensor(_EXTENTS, device=device)[shapes] * radii[..., None]).unbind(-1)

    # Relations along y are computed with x and y exchanged, and `before` is the shape at the left or the top.
    vertical = (relations == _RELATIONS.index("above")) | (relations == _RELATIONS.index("below"))
    is_second_first = (relations == _RELATIONS.index("right")) | (relations == _RELATIONS.index("below"))
    order = torch.stack([is_second_first, ~is_second_first], 1).long()
    before, after = order.unbind(1)
    starts = torch.where(vertical[:, None], top, side)
    ends = torch.where(vertical[:, None], bottom, side)
    across_starts = torch.where(vertical[:, None], side, top)
    across_ends = torch.where(vertical[:, None], side, bottom)

    def of(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the value (B,) of one of both shapes, from (B,2)."""
        return values.gather(1, index[:, None])[:, 0]

    length = (starts + ends).sum(1)
    free = (IMAGE_SIZE - 2 * _MARGIN - _GAP - length).clamp(min=0)
    cuts = uniform(2).sort(1).values * free[:, None]
    along_before = _MARGIN + cuts[:, 0] + of(starts, before)
    along_after = _MARGIN + cuts[:, 1] + _GAP + of(starts + ends, before) + of(starts, after)
    lows, highs = _MARGIN + across_starts, IMAGE_SIZE - _MARGIN - across_ends
    across_before = of(lows, before) + (of(highs, before) - of(lows, before)) * uniform(1)[:, 0]
    offset = (2 * uniform(1)[:, 0] - 1) * _SLOPE * (along_after - along_before)
    across_after = (across_before + offset).clamp(of(lows, after), of(highs, after))
    along = torch.stack([along_before, along_after], 1).gather(1, order)
    across = torch.stack([across_before, across_after], 1).gather(1, order)
    beside = torch.where(vertical[:, None, None], torch.stack([across, along], 2), torch.stack([along, across], 2))

    # Anywhere: single shapes, and outer shapes with the inner ones at their centre.
    least = _MARGIN + torch.stack([side, top], 2)
    most = IMAGE_SIZE - _MARGIN - torch.stack([side, bottom], 2)
    anywhere = least + (most - least).clamp(min=0) * uniform(2, 2)
    outermost = torch.where(inside[:, None], anywhere[:, 1], anywhere[:, 0])
    jitter = (2 * uniform(2) - 1) * _JITTER
    inner = outermost + jitter
    nest = torch.where(inside[:, None, None], torch.stack([inner, outermost], 1), torch.stack([outermost, inner], 1))
    single = relations < 0
    centres = torch.where((inside | around)[:, None, None], nest, torch.where(single[:, None, None], anywhere, beside))
    radii = torch.stack([radii[:, 0], torch.where(single, 0.0, radii[:, 1])], 1)
    return Layouts(shapes, table.colours[rows], centres, radii, ~around)


def _distances(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """Return signed distances (B,H,W) to the outlines of shapes (B,1,1), negative inside."""
    horizontal, vertical = x.abs(), y.abs()
    circle = torch.hypot(x, y) - radius
    square = torch.maximum(horizontal, vertical) - _SQUARE * radius
    triangle = torch.maximum(y, math.sqrt(0.75) * horizontal - 0.5 * y) - _INRADIUS * radius
    arms = (torch.maximum(long - 3 * _ARM * radius, short - _ARM * radius)
            for long, short in ((horizontal, vertical), (vertical, horizontal)))  # fmt: skip
    cross = torch.minimum(*arms)
    return torch.where(shape == 0, circle, torch.where(shape == 1, square, torch.where(shape == 2, triangle, cross)))


def draw(layouts: Layouts) -> torch.Tensor:
    """Return the drawings on white, (B,3,H,W) from -1 to 1, with smooth outlines."""
    device = layouts.radii.device
    pixels = torch.arange(IMAGE_SIZE, device=device) + 0.5
    coverages = []
    for index in range(2):
        centre, radius = layouts.centres[:, index], layouts.radii[:, index, None, None]
        x = pixels[None, None, :] - centre[:, 0, None, None]
        y = pixels[None, :, None] - centre[:, 1, None, None]
        distance = _distances(x, y, radius, layouts.shapes[:, index, None, None])
        coverages.append((0.5 - distance).clamp(0, 1) * (radius > 0))
    image = torch.ones(len(layouts.radii), 3, IMAGE_SIZE, IMAGE_SIZE, device=device)
    back = layouts.is_second_behind.long()
    for painted in (back, 1 - back):
        coverage = torch.where(painted[:, None, None] == 0, coverages[0], coverages[1])[:, None]
        colour = layouts.colours.gather(1, painted[:, None, None].expand(-1, 1, 3))[:, 0, :, None, None]
        image = image + (colour - image) * coverage
    return image
