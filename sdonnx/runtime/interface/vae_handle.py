"""The autoencoder as a component: its configuration, `decode`, and the switches of slicing and tiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sdonnx.models.autoencoder import DEFAULT_SCALING_FACTOR
from sdonnx.runtime.device.arrays import to_numpy
from sdonnx.runtime.interface.component_handle import ComponentHandle
from sdonnx.runtime.interface.memory_options import MemoryOptions

__all__ = ["DecoderOutput", "VaeHandle"]


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
