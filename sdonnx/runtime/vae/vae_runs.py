"""Runs of the autoencoder for the images of one shape, in slices of the batch and in tiles of the image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.device.session import BufferPart, Run
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.vae.vae_tiling import Split, TileGrid, join_tiles

__all__ = ["ImageDecoder", "ImageEncoder", "decode_latents"]

Array = npt.NDArray[Any]

# Noise with which the encode graph's output shows the standard deviation next to the mean: 2^20 times the smallest
# deviation of diffusers' DiagonalGaussianDistribution, exp(-15), is 0.3.
_PROBE = 2.0**20
_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class _BoundRun:
    """A run and its buffers, by the names of the graph's inputs and outputs."""

    run: Run
    buffers: Mapping[str, OrtValue]


class _VaeGraph:
    """Runs of one graph of the autoencoder, by the number of images and the size of their latents.

    Args:
        graphs: graphs of the pipeline.
        role: role of the graph.
        split: slices and tiles.
        latents: shape (B,C,H,W) of the latents.
        factor: pixels for each latent, in height and width.
    """

    def __init__(
        self, graphs: GraphSet, role: Role, split: Split, latents: tuple[int, int, int, int], factor: int
    ) -> None:
        self.graphs, self.role, self.split = graphs, role, split
        self.batch, self.channels, self.height, self.width = latents
        self.factor = factor
        self._bound: dict[tuple[int, int, int], _BoundRun] = {}

    def slices(self) -> list[slice]:
        """Return the images of each run.

        All runs have the same size, so that they replay one captured graph; the last one may repeat images.
        """
        size = self.split.size
        starts = (min(start, self.batch - size) for start in range(0, self.batch, size))
        return [slice(start, start + size) for start in starts]

    def tile_shapes(self) -> list[tuple[int, int]]:
        """Return the height and width in latents of each kind of tile, the largest first."""
        if self.split.tile is None:
            return [(self.height, self.width)]
        grid = TileGrid(self.split.tile, self.split.tile)
        heights, widths = ({end - start for start, end in grid.spans(edge)} for edge in (self.height, self.width))
        return sorted(((height, width) for height in heights for width in widths), reverse=True)

    def bind(self, key: tuple[int, int, int], buffers: Mapping[str, OrtValue | BufferPart]) -> _BoundRun:
        """Bind the graph to buffers, and return the run, which is kept."""
        run = self.graphs.get(self.role).bind(buffers)
        held = {name: BufferPart.of(value).buffer for name, value in buffers.items()}
        return self._bound.setdefault(key, _BoundRun(run, held))

    def queue(self, bound: _BoundRun) -> None:
        """Queue a run."""
        with self.graphs.observed(self.role, bound.run):
            bound.run()

    def read(self, value: OrtValue) -> Array:
        """Wait for the device and return a copy of a buffer's values."""
        self.graphs.device.synchronize()
        values: Array = value.numpy()
        return values.copy()

    def unload(self) -> None:
        """Unload the graph if it does not stay loaded."""
        if not self.graphs.stays(self.role):
            self.graphs.device.synchronize()
            self._bound.clear()
            self.graphs.done(self.role)

    def release(self) -> None:
        """Release the captured graphs and the buffers."""
        for bound in self._bound.values():
            bound.run.release()
        self._bound.clear()

    def buffer_bytes(self) -> int:
        """Return the size of the buffers of slices and tiles."""
        return sum(value.tensor_size_in_bytes() for bound in self._bound.values() for value in bound.buffers.values())


class ImageDecoder(_VaeGraph):
    """Decodes the first row of the sampler's state to pixels.

    Args:
        graphs: graphs of the pipeline.
        split: slices and tiles.
        latents: shape (B,C,H,W) of the latents.
        factor: pixels for each latent, in height and width.
        buffers: buffers of the shape; `images`, `sample` and `finite` are written.
    """

    def __init__(
        self,
        graphs: GraphSet,
        split: Split,
        latents: tuple[int, int, int, int],
        factor: int,
        buffers: Mapping[str, OrtValue],
    ) -> None:
        super().__init__(graphs, Role.IMAGE_DECODER, split, latents, factor)
        self._buffers = buffers

    @property
    def _is_whole(self) -> bool:
        """Whether one run decodes the batch, from the state and to the pixels without a copy."""
        return self.split.tile is None and self.split.size == self.batch

    def runs(self) -> list[Run]:
        """Return the run of each shape, to capture it."""
        return [self._get(*shape).run for shape in self.tile_shapes()]

    def decode(self) -> None:
        """Decode the latents, and unload the decoder if it does not stay loaded."""
        if self._is_whole:
            self.queue(self._get(self.height, self.width))
        else:
            for images in self.slices():
                if self.split.tile is None:
                    self._decode_slice(images)
                else:
                    self._decode_tiles(images, self.split.tile)
        self.unload()

    def buffer_bytes(self) -> int:
        """Return the size of the buffers of slices and tiles."""
        return 0 if self._is_whole else super().buffer_bytes()

    def _get(self, height: int, width: int) -> _BoundRun:
        size = self.split.size
        key = (size, height, width)
        if key in self._bound:
            return self._bound[key]
        device, outputs = self.graphs.device, self.graphs.get(self.role).outputs
        if self._is_whole:
            shape = (size, self.channels, height, width)
            held = self._buffers
            latents = BufferPart(held[abi.STATE], shape)
            return self.bind(key, {abi.LATENTS: latents, **{name: held[name] for name in outputs}})
        pixels = (size, height * self.factor, width * self.factor, 3)
        buffers = {
            abi.LATENTS: device.upload(np.zeros((size, self.channels, height, width), np.float32)),
            abi.IMAGES: device.empty(pixels, np.uint8),
            abi.SAMPLE: device.empty(pixels, np.float32),
            abi.FINITE: device.empty((size,), np.bool_),
        }
        return self.bind(key, {name: buffers[name] for name in (abi.LATENTS, *outputs)})

    def _decode_slice(self, images: slice) -> None:
        """Decode some images with copies on the device."""
        bound, device = self._get(self.height, self.width), self.graphs.device
        latents = bound.buffers[abi.LATENTS]
        size = latents.tensor_size_in_bytes()
        offset = images.start * size // self.split.size
        device.copy(latents, self._buffers[abi.STATE], size, source_offset=offset)
        self.queue(bound)
        for name, value in bound.buffers.items():
            if name != abi.LATENTS:
                self._copy_out(name, value, images)

    def _decode_tiles(self, images: slice, tile: int) -> None:
        """Decode some images in tiles, blended on the host."""
        device = self.graphs.device
        latents = self.read(self._buffers[abi.STATE])[0, images]
        finite = np.ones(len(latents), np.bool_)

        def decode(rows: slice, columns: slice) -> npt.NDArray[np.float32]:
            bound = self._get(rows.stop - rows.start, columns.stop - columns.start)
            bound.buffers[abi.LATENTS].update_inplace(np.ascontiguousarray(latents[:, :, rows, columns]))
            self.queue(bound)
            if abi.FINITE in bound.buffers:
                finite[...] &= self.read(bound.buffers[abi.FINITE])
            return self.read(bound.buffers[abi.SAMPLE])

        sample = join_tiles(decode, self.height, self.width, TileGrid(tile, tile * self.factor), (1, 2))
        # The arithmetic of the decode graph: see compose_decode.
        pixels = np.round(np.clip(np.nan_to_num(sample), 0, 1) * np.float32(255)).astype(np.uint8)
        for name, values in ((abi.SAMPLE, sample), (abi.IMAGES, pixels), (abi.FINITE, finite)):
            self._copy_out(name, device.upload(values), images)

    def _copy_out(self, name: str, values: OrtValue, images: slice) -> None:
        """Copy the values of some images to the buffer of the batch."""
        size = values.tensor_size_in_bytes()
        offset = images.start * size // self.split.size
        self.graphs.device.copy(self._buffers[name], values, size, target_offset=offset)


def decode_latents(graphs: GraphSet, split: Split, latents: Array, factor: int) -> Array:
    """Decode latents (B,C,H,W) with buffers of their own, and return the images (B,8H,8W,3), 0 to 1 or beyond.

    Args:
        graphs: graphs of the pipeline.
        split: slices and tiles.
        latents: the latents, as a call returns them, in float32.
        factor: pixels for each latent, in height and width.
    """
    device, (batch, channels, height, width) = graphs.device, latents.shape
    pixels = (batch, height * factor, width * factor, 3)
    buffers = {
        abi.STATE: device.upload(latents[None]),
        abi.IMAGES: device.empty(pixels, np.uint8),
        abi.SAMPLE: device.empty(pixels, np.float32),
        abi.FINITE: device.upload(np.ones(batch, np.bool_)),
    }
    decoder = ImageDecoder(graphs, split, (batch, channels, height, width), factor, buffers)
    decoder.decode()
    return decoder.read(buffers[abi.SAMPLE])


class ImageEncoder(_VaeGraph):
    """Encodes images to latents.

    Args:
        graphs: graphs of the pipeline.
        split: slices and tiles.
        latents: shape (B,C,H,W) of the latents.
        factor: pixels for each latent, in height and width.
    """

    def __init__(self, graphs: GraphSet, split: Split, latents: tuple[int, int, int, int], factor: int) -> None:
        super().__init__(graphs, Role.IMAGE_ENCODER, split, latents, factor)

    def encode(self, pixels: Array, posterior: Array, noise: Array, scales: Array) -> tuple[Array, Array]:
        """Return the latents of images, and their mixture with noise, both (B,C,H,W).

        The encoder is unloaded if it does not stay loaded.

        Args:
            pixels: images (B,3,8H,8W), -1 to 1.
            posterior: noise (B,C,H,W) that samples from the encoder's distribution.
            noise: noise (B,C,H,W) to mix with the latents.
            scales: the weights (2) of the latents and of `noise`.
        """
        latents, noised = np.empty(noise.shape, np.float32), np.empty(noise.shape, np.float32)
        for images in self.slices():
            given = (pixels[images], posterior[images], noise[images], scales)
            tile = self.split.tile
            both = self._run(*given) if tile is None else self._encode_tiles(*given, tile)
            latents[images], noised[images] = both
        self.unload()
        return latents, noised

    def _run(self, pixels: Array, posterior: Array, noise: Array, scales: Array) -> tuple[Array, Array]:
        values = {abi.SAMPLE: pixels, abi.POSTERIOR_NOISE: posterior, abi.NOISE: noise, abi.SCALES: scales}
        size, _, height, width = posterior.shape
        bound = self._get(size, height, width)
        for name in self.graphs.get(self.role).inputs:
            bound.buffers[name].update_inplace(np.ascontiguousarray(values[name], np.float32))
        self.queue(bound)
        return self.read(bound.buffers[abi.LATENTS]), self.read(bound.buffers[abi.NOISED])

    def _get(self, size: int, height: int, width: int) -> _BoundRun:
        key = (size, height, width)
        if key in self._bound:
            return self._bound[key]
        device, graph = self.graphs.device, self.graphs.get(self.role)
        latents = (size, self.channels, height, width)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys((*graph.inputs, *graph.outputs), latents)
        shapes |= {abi.SAMPLE: (size, 3, height * self.factor, width * self.factor), abi.SCALES: (2,)}
        buffers = {name: device.upload(np.zeros(shape, np.float32)) for name, shape in shapes.items()}
        bound = self.bind(key, buffers)
        if self.graphs.stays(self.role):
            bound.run.capture()
        return bound

    def _encode_tiles(
        self, pixels: Array, posterior: Array, noise: Array, scales: Array, tile: int
    ) -> tuple[Array, Array]:
        """Encode images in tiles, and sample from the distribution with the blended parameters.

        The graph returns samples, so two runs show the mean and the standard deviation of a tile. diffusers blends the
        logarithm of the variance, twice the logarithm of the standard deviation; its scale only adds a constant.
        """
        none = np.array((1, 0), np.float32)

        def parameters(rows: slice, columns: slice) -> npt.NDArray[np.float32]:
            part = pixels[:, :, rows, columns]
            shape = (len(part), self.channels, *(edge // self.factor for edge in part.shape[2:]))
            zeros = np.zeros(shape, np.float32)
            mean, _ = self._run(part, zeros, zeros, none)
            sampled, _ = self._run(part, np.full(shape, _PROBE, np.float32), zeros, none)
            deviation = (sampled - mean) / np.float32(_PROBE)
            return np.concatenate([mean, np.log(np.maximum(deviation, _TINY))], 1)

        grid = TileGrid(tile * self.factor, tile)
        joined = join_tiles(parameters, self.height * self.factor, self.width * self.factor, grid, (2, 3))
        mean, logarithm = np.split(joined, 2, 1)
        latents = mean + np.exp(logarithm) * posterior
        return latents, latents * scales[0] + noise * scales[1]
