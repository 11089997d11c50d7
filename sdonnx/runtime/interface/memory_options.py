"""Options of a pipeline that trade time for memory: slices and tiles of the autoencoder, and unloaded components."""

from __future__ import annotations

from typing import Any

from sdonnx.errors import OptionError
from sdonnx.runtime.graph_set import OFFLOAD, LowMemory
from sdonnx.runtime.inputs.argument_checks import require_multiple
from sdonnx.runtime.pipeline_base import PipelineBase

__all__ = ["MemoryOptions"]

# A quarter of a tile is blended with its neighbour, a whole number of latents.
_TILE_MULTIPLE = 4


class MemoryOptions(PipelineBase):
    """The memory options of diffusers' `DiffusionPipeline`.

    A change releases the captured graphs, which the next call of each shape captures again.
    """

    @property
    def vae_slicing(self) -> bool:
        """Whether `enable_vae_slicing` is in effect."""
        return self._cache.splits.slicing

    @property
    def vae_tiling(self) -> bool:
        """Whether `enable_vae_tiling` is in effect."""
        return self._cache.splits.tiling

    def enable_vae_slicing(self) -> None:
        """Decode and encode one image of a batch at a time.

        By default a slice has as many images as the device's memory and ONNX Runtime's kernels can hold.
        """
        self._set_splits(slicing=True)

    def disable_vae_slicing(self) -> None:
        """Choose the size of slices automatically, as by default."""
        self._set_splits(slicing=False)

    def enable_vae_tiling(self, tile_size: int | None = None) -> None:
        """Decode and encode images that are larger than a tile in overlapping tiles.

        Tiles overlap by a quarter and are blended as in diffusers. The image differs slightly from a whole one, since
        normalization and attention work within a tile. By default only images that are too large for the device's
        memory or for ONNX Runtime's kernels are tiled.

        Args:
            tile_size: height and width of a tile in pixels, a multiple of 32; by default the size that the autoencoder
                was trained for, as in diffusers.

        Raises:
            OptionError: the size of tiles cannot be used.
        """
        splits, factor = self._cache.splits, self._geometry.scale_factor
        tile = splits.default_tile
        if tile_size is not None:
            require_multiple("tile_size", tile_size, _TILE_MULTIPLE * factor)
            tile = int(tile_size) // factor
        self._set_splits(tiling=True, tile=tile)

    def disable_vae_tiling(self) -> None:
        """Tile only images that are too large otherwise, as by default."""
        self._set_splits(tiling=False, tile=self._cache.splits.default_tile)

    def enable_model_cpu_offload(self, gpu_id: int | None = None, device: Any = None) -> None:
        """Keep the weights of only one component on the device: of the one that runs.

        Each component is loaded from its files when it runs and unloaded afterwards: the text encoders before the
        denoiser runs, and the denoiser before the image is decoded. Peak memory falls to the memory of the largest
        component, and each image takes longer by the time to load all of them. Graphs are not captured.
        `from_pretrained(low_memory="offload")` does the same from the start.

        Args:
            gpu_id: index of the GPU, which must be the pipeline's.
            device: the device, which must be the pipeline's.

        Raises:
            OptionError: it is another device.
        """
        own = {self.device.provider, f"{self.device.provider}:{self.device.index}"}
        if gpu_id not in (None, self.device.index) or (device is not None and str(device) not in own):
            raise OptionError(
                f"offloading from {device or f'GPU {gpu_id}'}",
                f"{self.device.provider}:{self.device.index}, the pipeline's device",
                "leave it out, or load the pipeline with another device_index",
            )
        self._set_low_memory(OFFLOAD)

    def disable_model_cpu_offload(self) -> None:
        """Keep all components on the device, as by default."""
        self._set_low_memory(False)

    def enable_sequential_cpu_offload(self, gpu_id: int | None = None, device: Any = None) -> None:
        """Raise OptionError: weights can only be unloaded by component, not by layer."""
        raise OptionError(
            "enable_sequential_cpu_offload, by layer",
            "offloading by component",
            "call enable_model_cpu_offload, and enable_vae_tiling for large images",
        )

    def _set_splits(self, **changes: Any) -> None:
        splits = self._cache.splits
        if any(getattr(splits, name) != value for name, value in changes.items()):

            def change() -> None:
                for name, value in changes.items():
                    setattr(splits, name, value)

            self._change(change)

    def _set_low_memory(self, low_memory: LowMemory) -> None:
        self._change(lambda: self._graphs.set_low_memory(low_memory))
