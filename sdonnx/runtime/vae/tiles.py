"""Overlapping tiles of an image, blended where they meet, as in diffusers' AutoencoderKL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["TileGrid", "join_tiles"]

Array = npt.NDArray[np.float32]

_OVERLAP = 4  # diffusers' tile_overlap_factor is 1/4


@dataclass(frozen=True)
class TileGrid:
    """Places of the tiles of an image.

    Source: `AutoencoderKL.tiled_decode` and `_tiled_encode` of diffusers 0.42.1. Tiles start at every `stride`; the
    last ones of a row or column may be smaller.

    Attributes:
        size: height and width of a tile of the input, a multiple of 4.
        output_size: height and width of a tile of the output, a multiple of 4.
    """

    size: int
    output_size: int

    @property
    def stride(self) -> int:
        """Distance between the starts of neighbouring tiles of the input."""
        return self.size - self.size // _OVERLAP

    @property
    def blend(self) -> int:
        """Rows or columns of the output in which neighbouring tiles are blended."""
        return self.output_size // _OVERLAP

    @property
    def kept(self) -> int:
        """Rows or columns of the output that are kept of a tile that has a neighbour."""
        return self.output_size - self.blend

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return the start and the end of each tile along an axis of the input."""
        return [(start, min(start + self.size, length)) for start in range(0, length, self.stride)]


def join_tiles(
    run: Callable[[slice, slice], Array], height: int, width: int, grid: TileGrid, axes: tuple[int, int]
) -> Array:
    """Return the output for an image, joined from those for its tiles.

    The result depends on the order of blending: each tile is blended with the tile above it, then with the tile to its
    left, and both of these are blended already.

    Args:
        run: returns the output for a tile, given the rows and columns of the input. Its values are changed.
        height: height of the input.
        width: width of the input.
        grid: places of the tiles.
        axes: axes of the output's rows and columns.
    """
    bands: list[Array] = []
    above: list[Array] = []
    for top, bottom in grid.spans(height):
        row: list[Array] = []
        for left, right in grid.spans(width):
            tile = run(slice(top, bottom), slice(left, right))
            if above:
                _blend(above[len(row)], tile, grid.blend, axes[0])
            if row:
                _blend(row[-1], tile, grid.blend, axes[1])
            row.append(tile)
        kept = [tile[_first(grid.kept, axes[0], axes[1])] for tile in row]
        bands.append(np.concatenate(kept, axes[1]))
        above = row
    return np.concatenate(bands, axes[0])


def _first(count: int, *axes: int) -> tuple[Any, ...]:
    """Return the index of the first `count` entries along axes."""
    return tuple(slice(count) if axis in axes else slice(None) for axis in range(max(axes) + 1))


def _blend(before: Array, after: Array, extent: int, axis: int) -> None:
    """Blend the end of a tile into the start of the next one along an axis, and overwrite that start."""
    extent = min(before.shape[axis], after.shape[axis], extent)
    shape = [1] * after.ndim
    shape[axis] = extent
    share = (np.arange(extent) / extent).reshape(shape)
    start = _first(extent, axis)
    end = (*start[:-1], slice(before.shape[axis] - extent, None))
    after[start] = before[end] * (1 - share).astype(np.float32) + after[start] * share.astype(np.float32)
