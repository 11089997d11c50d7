"""Sizes of images in pixels and of their latents."""

from __future__ import annotations

from typing import Any

from sdonnx.errors import FolderError
from sdonnx.models import abi
from sdonnx.models.autoencoder import downsampling_factor
from sdonnx.models.spec import Role
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.argument_checks import require_multiple

__all__ = ["ImageGeometry"]


class ImageGeometry:
    """Relation between images and latents of a pipeline.

    Args:
        graphs: graphs of the pipeline.

    Attributes:
        channels: channels C of the latents.
        scale_factor: pixels for each latent, in height and width.
        multiple: height and width of an image are multiples of this. Transformers read the latents in patches.
    """

    def __init__(self, graphs: GraphSet) -> None:
        self._folder, self._config = graphs.folder.path, graphs.config(Role.DENOISER)
        self.scale_factor = downsampling_factor(graphs.config(Role.IMAGE_DECODER))
        self.channels = int(graphs.get(Role.DENOISER).shape(abi.STATE)[2])
        self.multiple = self.scale_factor * int(self._config.get("patch_size") or 1)

    @property
    def default_size(self) -> int:
        """Height and width that the model was trained for, in pixels.

        Raises:
            FolderError: the configuration of the denoiser does not say.
        """
        size = self._config.get("sample_size")
        if not isinstance(size, int):
            raise FolderError(
                f"the denoiser's config.json in {self._folder} has sample_size = {size!r}",
                "a number",
                "optimize the exported pipeline again",
            )
        return size * self.scale_factor

    def require_size(self, height: Any, width: Any) -> None:
        """Raise OptionError unless the height and the width in pixels are positive multiples of `multiple`."""
        require_multiple("height", height, self.multiple)
        require_multiple("width", width, self.multiple)

    def latent_shape(self, batch: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the shape (B,C,H,W) of the latents of images with this height and width in pixels.

        Raises:
            OptionError: a size is not a multiple of `multiple`.
        """
        self.require_size(height, width)
        require_multiple("the batch", batch, 1)
        return (batch, self.channels, height // self.scale_factor, width // self.scale_factor)
