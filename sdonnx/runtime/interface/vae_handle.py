"""The autoencoder as a component: its configuration, and the switches of slicing and tiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sdonnx.runtime.interface.component_handle import ComponentHandle
from sdonnx.runtime.interface.memory_options import MemoryOptions

__all__ = ["VaeHandle"]


class VaeHandle(ComponentHandle):
    """The autoencoder, with the methods of diffusers' `AutoencoderKL` that save memory.

    They are those of the pipeline: `pipeline.vae.enable_tiling()` is `pipeline.enable_vae_tiling()`.

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
