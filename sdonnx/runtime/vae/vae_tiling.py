"""Slices of the batch and overlapping tiles of the image, in which the autoencoder works.

Tiles are blended where they meet, as in diffusers' AutoencoderKL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.models.autoencoder import block_channels, largest_decoder_tensor, largest_encoder_tensor, tile_size
from sdonnx.models.spec import Role
from sdonnx.runtime.device.device import total_memory
from sdonnx.runtime.graph_set import GraphSet

__all__ = ["Split", "TileGrid", "VaeSplits", "join_tiles"]

MAX_ELEMENTS = 2**31 - 1
"""Largest number of elements of a tensor. ONNX Runtime's CUDA kernel of a nearest Resize refuses more, and convolutions
of cuDNN compute positions in 32 bits."""

# Live tensors of the largest size at the peak of a run. At the first residual block of the last resolution these are
# the block's input, which the shortcut reads later, its normalized copy, and the convolution's output of half the size;
# the rest is for the convolution's workspace (docs/decisions/0117).
_LIVE_TENSORS = 3

# Shares of the device's memory that a run of several images, or of one whole image, may take by that count. The rest is
# for weights, buffers and captured graphs.
_SLICE_SHARE = 1 / 4
_IMAGE_SHARE = 3 / 4


@dataclass(frozen=True)
class Split:
    """How the autoencoder processes a batch.

    Attributes:
        size: number of images in a run.
        tile: height and width of a tile in latents; None to process whole images.
    """

    size: int
    tile: int | None = None


class VaeSplits:
    """Chooses slices and tiles for the autoencoder of a pipeline.

    Args:
        graphs: graphs of the pipeline.

    Attributes:
        slicing: whether each run has one image.
        tiling: whether images that are larger than a tile are always processed in tiles. Otherwise tiles are used
            only if tensors are larger than a kernel or the device's memory can hold.
        tile: height and width of a tile in latents.
    """

    def __init__(self, graphs: GraphSet) -> None:
        self.slicing = self.tiling = False
        config = graphs.config(Role.IMAGE_DECODER)
        self._channels = {Role.IMAGE_DECODER: block_channels(config)}
        if graphs.family.has(Role.IMAGE_ENCODER):
            self._channels[Role.IMAGE_ENCODER] = block_channels(graphs.config(Role.IMAGE_ENCODER))
        self.tile = self.default_tile = tile_size(config)
        self._itemsizes = {role: graphs.itemsizes(role) for role in self._channels}
        memory = graphs.device.memory()
        self._total = total_memory() if memory is None else memory[1]

    def decoder(self, batch: int, height: int, width: int) -> Split:
        """Return how to decode latents (B,C,H,W)."""
        return self._split(Role.IMAGE_DECODER, batch, height, width)

    def encoder(self, batch: int, height: int, width: int) -> Split:
        """Return how to encode images with latents (B,C,H,W)."""
        return self._split(Role.IMAGE_ENCODER, batch, height, width)

    def min_bytes(self, role: Role, height: int, width: int) -> int:
        """Return a lower bound of the largest tensor's size in bytes, for a run with one image or tile."""
        split = self._split(role, 1, height, width)
        edges = (height, width) if split.tile is None else (min(height, split.tile), min(width, split.tile))
        return self._elements(role, *edges) * self._itemsizes[role][0]

    def _split(self, role: Role, batch: int, height: int, width: int) -> Split:
        elements = self._elements(role, height, width)
        tile = None
        if max(height, width) > self.tile and (self.tiling or elements > self._most_elements(role, _IMAGE_SHARE)):
            tile = self.tile
            elements = self._elements(role, min(height, tile), min(width, tile))
        most = 1 if self.slicing else max(1, self._most_elements(role, _SLICE_SHARE) // elements)
        slices = -(-batch // most)
        return Split(-(-batch // slices), tile)

    def _elements(self, role: Role, height: int, width: int) -> int:
        largest = largest_decoder_tensor if role is Role.IMAGE_DECODER else largest_encoder_tensor
        return largest(self._channels[role], height, width)

    def _most_elements(self, role: Role, share: float) -> int:
        """Return the number of elements that the largest tensor of a run may have."""
        return min(MAX_ELEMENTS, int(self._total * share) // (_LIVE_TENSORS * self._itemsizes[role][1]))


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
