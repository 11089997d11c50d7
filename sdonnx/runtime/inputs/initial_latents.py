"""Where generation starts: noise, given latents, or an image with or without a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.errors import OptionError
from sdonnx.models.spec import Family
from sdonnx.runtime.device.arrays import to_device, to_numpy
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.inputs.argument_checks import require_number
from sdonnx.runtime.inputs.image_geometry import ImageGeometry
from sdonnx.runtime.inputs.init_images import image_batch, mask_batch

__all__ = ["Start", "StartImage", "latent_size", "read_latents", "read_start"]

Float = npt.NDArray[np.float32]

_RGB = 3  # channels of an image

_DLPACK_CUDA = 2  # DLDeviceType in dlpack.h


@dataclass(frozen=True)
class StartImage:
    """Image to start from.

    Attributes:
        pixels: images (N,3,H,W) from -1 to 1, or their latents (N,C,H/8,W/8); N divides the batch size.
        mask: masks (M,1,H,W), 1 where the image is repainted; None to change the whole image.
        strength: share of the noise schedule to run, 0 to 1.
        encoded: whether `pixels` are latents, scaled for the denoiser.
        noisy: whether the image already has the noise of the first step, since another pipeline has denoised it up to
            there.
    """

    pixels: Float
    mask: Float | None
    strength: float
    encoded: bool = False
    noisy: bool = False


@dataclass(frozen=True)
class Start:
    """Start of a generation.

    Attributes:
        latents: initial noise (B,C,H,W); None to sample it.
        image: image to start from; None to start from noise only.
    """

    latents: Float | OrtValue | None = None
    image: StartImage | None = None

    @property
    def strength(self) -> float:
        """Share of the noise schedule to run, 0 to 1."""
        return 1.0 if self.image is None else self.image.strength


def read_start(
    image: Any,
    mask_image: Any,
    strength: Any,
    latents: Any,
    *,
    size: tuple[int, int],
    geometry: ImageGeometry,
    batch: int,
    family: Family,
    device: Device,
    noisy: bool = False,
) -> Start:
    """Return the start of a call.

    Args:
        image: as in `OrtDiffusionPipeline.__call__`, like the next three.
        mask_image: see there.
        strength: see there; None for the family's default.
        latents: see there.
        size: height and width of the generated images in pixels.
        geometry: sizes of the pipeline.
        batch: number of images.
        family: the pipeline's family.
        device: where the graphs run.
        noisy: whether the image has the noise of the first step (`denoising_start`).

    Raises:
        OptionError: the arguments cannot be used, or not together.
    """
    if noisy and image is None:
        raise OptionError("denoising_start without image", "both", "pass the latents of the pipeline before as image")
    if mask_image is not None and image is None:
        raise OptionError("mask_image without image", "both", "pass the image that the mask is for")
    if image is None and strength is not None:
        raise OptionError("strength without image", "both", "pass an image to start from")
    if latents is not None and image is not None and (mask_image is None or noisy):
        raise OptionError("latents and image", "one of them to start from")
    shape = geometry.latent_shape(batch, *size)
    noise = None if latents is None else read_latents(latents, shape, device, on_host=image is not None)
    if image is None:
        return Start(noise)
    default = family.defaults.strength if mask_image is None else family.defaults.inpaint_strength
    strength = default if strength is None else strength
    require_number("strength", strength, 0, 1)
    encoded = latent_size(image, geometry) is not None
    if encoded and mask_image is not None:
        raise OptionError("mask_image and latents as image", "an image", "decode the latents first")
    read = partial(_encoded_images, geometry.latent_shape(batch, *size)) if encoded else image_batch
    pixels = _batch("image", image, read, size, geometry.scale_factor, batch)
    mask = None
    if mask_image is not None:
        mask = _batch("mask_image", mask_image, mask_batch, size, geometry.scale_factor, batch)
    return Start(noise, StartImage(pixels, mask, float(strength), encoded, noisy))


def latent_size(image: Any, geometry: ImageGeometry) -> tuple[int, int] | None:
    """Return the height and width in pixels of an image that is given as latents (N,C,H/8,W/8), or None if it is not.

    As in diffusers, an array with as many channels as latents have is not an image.
    """
    shape = getattr(image, "shape", ())
    shape = tuple(shape() if callable(shape) else shape)  # an OrtValue has a method
    if len(shape) != 4 or shape[1] != geometry.channels or shape[3] == _RGB:
        return None
    return int(shape[2]) * geometry.scale_factor, int(shape[3]) * geometry.scale_factor


def _encoded_images(shape: tuple[int, ...], image: Any, *_: int) -> Float:
    """Return latents (N,C,H,W) of images, for a batch of latents of this shape."""
    array: Float = to_numpy(image, "image").astype(np.float32)
    if array.shape[1:] != shape[1:]:
        raise OptionError(
            f"latents of shape {array.shape} as image", f"(N, {', '.join(map(str, shape[1:]))})", "leave out the size"
        )
    if not np.isfinite(array).all():
        raise OptionError("latents with NaN or infinity as image", "finite numbers")
    return array


def _batch(name: str, value: Any, read: Callable[..., Float], size: tuple[int, int], factor: int, batch: int) -> Float:
    array = read(value, *size, factor)
    if batch % len(array):
        raise OptionError(
            f"{name} holds {len(array)} images for a batch of {batch}",
            "as many, or a divisor of it",
            "pass one, or one for each",
        )
    return array


def read_latents(value: Any, shape: tuple[int, ...], device: Device, *, on_host: bool = False) -> Float | OrtValue:
    """Return latents of a shape: memory of the device without a copy, everything else as an array.

    Args:
        value: an array of any library.
        shape: expected shape (B,C,H,W).
        device: where the graphs run.
        on_host: always return an array.

    Raises:
        OptionError: the shape, the type or a value cannot be used.
    """
    if device.provider == "cuda" and not on_host and _is_on_gpu(value):
        with device.recording():
            held = to_device(value, device, "latents")
        if tuple(held.shape()) != shape or held.data_type() != "tensor(float)":
            raise OptionError(
                f"latents of shape {tuple(held.shape())}, {held.data_type()}",
                f"{shape}, tensor(float)",
                "sample them for this batch and size, in float32",
            )
        return held
    values = to_numpy(value, "latents")
    if values.shape != shape:
        raise OptionError(f"latents of shape {values.shape}", f"{shape}", "sample them for this batch and size")
    array: Float = values.astype(np.float32)
    if not np.isfinite(array).all():
        raise OptionError("latents with NaN or infinity", "finite numbers")
    return array


def _is_on_gpu(value: Any) -> bool:
    place = getattr(value, "__dlpack_device__", None)
    return place is not None and int(place()[0]) == _DLPACK_CUDA
