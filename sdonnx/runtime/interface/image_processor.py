"""Conversion of decoded images, as `pipeline.image_processor` of diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sdonnx.errors import OptionError
from sdonnx.runtime.device.arrays import to_numpy
from sdonnx.runtime.output import to_pil

__all__ = ["ImageProcessor", "numpy_to_pil"]

_TYPES = ("pil", "np", "latent")


class ImageProcessor:
    """The part of diffusers' `VaeImageProcessor` that converts images of `pipeline.vae.decode`."""

    def postprocess(self, image: Any, output_type: str = "pil", do_denormalize: Sequence[bool] | None = None) -> Any:
        """Return decoded images as PIL images, or as an array (B,H,W,3) from 0 to 1.

        Args:
            image: images (B,3,H,W) from -1 to 1, an array of any library.
            output_type: "pil", "np", or "latent" to return `image` as it is.
            do_denormalize: for each image whether its values are from -1 to 1, and not from 0 to 1; by default all.

        Raises:
            OptionError: an argument cannot be used.
        """
        if output_type not in _TYPES:
            raise OptionError(f"the output type {output_type!r}", f"one of {_TYPES}")
        if output_type == "latent":
            return image
        values = to_numpy(image, "image").astype(np.float32)
        if values.ndim != 4 or values.shape[1] not in (1, 3):
            raise OptionError(f"images of shape {values.shape}", "(B,3,H,W)", "pass what pipeline.vae.decode returns")
        chosen = np.ones(len(values), bool) if do_denormalize is None else np.array(do_denormalize, bool)
        values = np.where(chosen[:, None, None, None], np.clip(values / 2 + 0.5, 0, 1), values).transpose(0, 2, 3, 1)
        return values if output_type == "np" else numpy_to_pil(values)

    @staticmethod
    def numpy_to_pil(images: Any) -> list[Image.Image]:
        """Return PIL images of an array (B,H,W,3) or (H,W,3) from 0 to 1."""
        return numpy_to_pil(images)


def numpy_to_pil(images: Any) -> list[Image.Image]:
    """Return PIL images of an array (B,H,W,3) or (H,W,3) from 0 to 1."""
    values: npt.NDArray[Any] = to_numpy(images, "images")
    pixels = np.round(values * 255).astype(np.uint8)
    return to_pil(pixels if pixels.ndim == 4 else pixels[None])
