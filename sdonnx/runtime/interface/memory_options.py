"""Options of a pipeline that trade time for memory, and the autoencoder as a component, which switches some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.models.autoencoder import DEFAULT_SCALING_FACTOR
from sdonnx.runtime.device.arrays import to_numpy
from sdonnx.runtime.graph_set import OFFLOAD, LowMemory
from sdonnx.runtime.inputs.argument_checks import require_multiple
from sdonnx.runtime.interface.component_handles import ComponentHandle
from sdonnx.runtime.pipeline_base import PipelineBase

__all__ = ["DecoderOutput", "MemoryOptions", "VaeHandle"]

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


class DecoderOutput(NamedTuple):
    """Return value of `VaeHandle.decode`: `output.sample` and `output[0]` are the images."""

    sample: npt.NDArray[np.float32]


class VaeHandle(ComponentHandle):
    """The autoencoder, with the methods of diffusers' `AutoencoderKL` that save memory.

    They are the pipeline's methods: `pipeline.vae.enable_tiling()` is `pipeline.enable_vae_tiling()`.

    Args:
        class_name: class in diffusers.
        dtype: type of the weights.
        config: content of `config.json`.
        pipeline: the pipeline.
        move: the pipeline's method `to`.
    """

    def __init__(
        self,
        class_name: str,
        dtype: str,
        config: Mapping[str, Any],
        pipeline: MemoryOptions,
        move: Callable[..., object],
    ) -> None:
        super().__init__("vae", class_name, dtype, pipeline.device, config, move)
        self._pipeline = pipeline

    def decode(self, z: Any, return_dict: bool = True, generator: Any = None) -> DecoderOutput:
        """Decode latents to images, also in a callback, as diffusers' `AutoencoderKL.decode`.

        Args:
            z: latents (B,C,H/8,W/8) of any library, divided by the scaling factor:
                `pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor)`.
            return_dict: has no effect: the result has a field `sample`, and is a tuple.
            generator: has no effect, as in diffusers.

        Returns:
            The images as a float32 array (B,3,H,W) from -1 to 1, for `pipeline.image_processor.postprocess`.

        Raises:
            OptionError: the latents cannot be used.
            DeviceMemoryError: the device has too little memory.
        """
        latents, config = to_numpy(z, "latents").astype(np.float32), self.config
        if latents.ndim == 4 and config.get("latents_mean") is not None and config.get("latents_std") is not None:
            mean, std = (np.array(config[name], np.float32)[:, None, None] for name in ("latents_mean", "latents_std"))
            latents = (latents - mean) / std
        latents = (latents - np.float32(config.get("shift_factor") or 0)) * np.float32(
            config.get("scaling_factor", DEFAULT_SCALING_FACTOR)
        )
        sample = 2 * self._pipeline._decode(latents) - 1
        return DecoderOutput(np.ascontiguousarray(sample.transpose(0, 3, 1, 2)))

    @property
    def use_slicing(self) -> bool:
        """Whether each run decodes or encodes one image."""
        return self._pipeline.vae_slicing

    @property
    def use_tiling(self) -> bool:
        """Whether images that are larger than a tile are always decoded and encoded in tiles."""
        return self._pipeline.vae_tiling

    def enable_slicing(self) -> None:
        """Decode and encode one image of a batch at a time; see the pipeline's `enable_vae_slicing`."""
        self._pipeline.enable_vae_slicing()

    def disable_slicing(self) -> None:
        """Choose the size of slices automatically; see the pipeline's `disable_vae_slicing`."""
        self._pipeline.disable_vae_slicing()

    def enable_tiling(self, use_tiling: bool = True) -> None:
        """Decode and encode large images in tiles; see the pipeline's `enable_vae_tiling`.

        Args:
            use_tiling: False to disable it, as some autoencoders of diffusers accept.
        """
        if use_tiling:
            self._pipeline.enable_vae_tiling()
        else:
            self._pipeline.disable_vae_tiling()

    def disable_tiling(self) -> None:
        """Tile only images that are too large otherwise; see the pipeline's `disable_vae_tiling`."""
        self._pipeline.disable_vae_tiling()
