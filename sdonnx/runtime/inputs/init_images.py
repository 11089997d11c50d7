"""Preprocessing of the images and masks of image-to-image and inpainting, as in diffusers.

Source: `VaeImageProcessor` of diffusers 0.42.1 with do_convert_rgb for images and, for masks, with do_binarize and
do_convert_grayscale but not do_normalize, as in `StableDiffusionInpaintPipeline`. Where that class would continue with
meaningless numbers, these functions raise an error or follow the expectation of callers; comments mark the differences.

An image is a PIL image or an array; a batch may also be a list of them. Arrays of numpy have channels last.
Arrays of other libraries (`sdonnx.runtime.device.arrays.to_numpy`) have channels first, as in torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from sdonnx.errors import OptionError
from sdonnx.runtime.device.arrays import to_numpy
from sdonnx.runtime.inputs.argument_checks import require_sides

__all__ = ["control_batch", "default_size", "image_batch", "latent_mask", "mask_batch", "masked_image"]

Float = npt.NDArray[np.float32]

_IMAGE, _MASK = "image", "mask_image"

# Resampling filters overshoot 1 by less, and pixels from 0 to 255 exceed it by far.
_MAX_VALUE = 2.0


def default_size(image: Any, factor: int, name: str = _IMAGE, channels: int | None = None) -> tuple[int, int]:
    """Return the height and width of an image, or of the first one in a list, rounded down to multiples of `factor`.

    Args:
        image: as for `image_batch`.
        factor: pixels of which both are multiples.
        name: the argument, for messages.
        channels: number of channels; by default 3.

    Raises:
        OptionError: it is not an image, or it is smaller than `factor`.
    """
    return _size(_opened(image, name, channels), None, None, factor, name)


def image_batch(image: Any, height: int | None, width: int | None, factor: int) -> Float:
    """Return images (B,3,H,W) from -1 to 1.

    PIL images of any mode are resized with the Lanczos filter, then converted to RGB by Pillow, which clips 16-bit
    values at 255; EXIF data is ignored. Arrays are resized to the nearest pixel.

    Args:
        image: PIL images; numpy arrays (H,W,3) or (B,H,W,3) or other arrays (3,H,W) or (B,3,H,W), floats from
            0 to 1, or from -1 to 1 if any is negative. Arrays of uint8 range from 0 to 255, unlike in diffusers,
            which does not divide them.
        height: height in pixels, rounded down to a multiple of `factor`; None for the first image's height.
        width: width in pixels, as `height`.
        factor: pixels for each latent.

    Raises:
        OptionError: it is not an image, has another shape or number of channels, is empty, not finite, or out of
            range; or arrays of a list differ in shape.
    """
    opened = _opened(image, _IMAGE)
    height, width = _size(opened, height, width, factor, _IMAGE)
    if isinstance(opened, list):
        return 2 * _pixels(opened, "RGB", height, width, _IMAGE) - 1
    if opened.dtype == np.uint8:
        opened = opened.astype(np.float32) / 255
    elif opened.dtype.kind != "f":
        raise OptionError(f"the {_IMAGE} is of {opened.dtype}", "floats from 0 to 1 or uint8")
    lowest, highest = float(opened.min()), float(opened.max())
    if lowest < -_MAX_VALUE or highest > _MAX_VALUE:
        raise OptionError(f"the {_IMAGE} has values from {lowest:g} to {highest:g}", "0 to 1", "divide 0 to 255 by 255")
    resized = _nearest(opened, height, width)
    # As in diffusers, which also warns, an image from -1 to 1 is not rescaled.
    return (resized if resized.min() < 0 else 2 * resized - 1).astype(np.float32)


def control_batch(image: Any, height: int, width: int, channels: int, name: str) -> Float:
    """Return control images (B,C,H,W) from 0 to 1, as `VaeImageProcessor` of diffusers without do_normalize.

    Args:
        image: as for `image_batch`; floats are from 0 to 1.
        height: height in pixels.
        width: width in pixels.
        channels: 3, or 1 for grayscale.
        name: the argument, for messages.

    Raises:
        OptionError: it is not an image, has another shape or number of channels, is empty, not finite, or out of
            range; or arrays of a list differ in shape.
    """
    opened = _opened(image, name, channels)
    _size(opened, height, width, 1, name)
    if isinstance(opened, list):
        return _pixels(opened, "RGB" if channels == 3 else "L", height, width, name)
    if opened.dtype == np.uint8:
        opened = opened.astype(np.float32) / 255
    elif opened.dtype.kind != "f":
        raise OptionError(f"the {name} is of {opened.dtype}", "floats from 0 to 1 or uint8")
    lowest, highest = float(opened.min()), float(opened.max())
    if lowest < 0 or highest > 1:
        raise OptionError(f"the {name} has values from {lowest:g} to {highest:g}", "0 to 1", "divide 0 to 255 by 255")
    return _nearest(opened, height, width).astype(np.float32)


def mask_batch(mask: Any, height: int | None, width: int | None, factor: int) -> Float:
    """Return masks (B,1,H,W) of 0 and 1, where 1 is repainted.

    PIL images are resized with the Lanczos filter and converted to grayscale, and arrays are resized to the nearest
    pixel; values of 0.5 and more become 1. For arrays of integers these are all values except 0, as in diffusers.

    Args:
        mask: PIL images; numpy arrays (H,W), (B,H,W), (H,W,1) or (B,H,W,1) or other arrays (H,W), (B,H,W) or
            (B,1,H,W), floats from 0 to 1, integers or, unlike in diffusers, booleans.
        height: height in pixels, rounded down to a multiple of `factor`; None for the first mask's height.
        width: width in pixels, as `height`.
        factor: pixels for each latent.

    Raises:
        OptionError: it is not a mask, has another shape, is in colour, empty or not finite; or arrays of a list
            differ in shape.
    """
    opened = _opened(mask, _MASK)
    height, width = _size(opened, height, width, factor, _MASK)
    if isinstance(opened, list):
        opened = _pixels(opened, "L", height, width, _MASK)
    return (_nearest(opened, height, width) >= 0.5).astype(np.float32)


def latent_mask(mask: Float, height: int, width: int) -> Float:
    """Return masks (B,1,H,W) resized to the nearest pixels of the latents, (B,1,height,width)."""
    return _nearest(mask, height, width)


def masked_image(images: Float, masks: Float) -> Float:
    """Return images (B,3,H,W) with zeros where masks (B,1,H,W) are 1; a single image or mask is used for all.

    Raises:
        OptionError: the numbers of images and masks differ, or their sizes do.
    """
    counts, sizes = (len(images), len(masks)), (images.shape[2:], masks.shape[2:])
    if counts[0] != counts[1] and 1 not in counts:
        raise OptionError(f"{counts[0]} images and {counts[1]} masks", "as many or one", "pass a mask for each image")
    if sizes[0] != sizes[1]:
        raise OptionError(f"the image is {sizes[0]} and the mask {sizes[1]}", "one size", "pass both at one size")
    return images * (masks < 0.5)


def _opened(image: Any, name: str, channels: int | None = None) -> list[Image.Image] | npt.NDArray[Any]:
    """Return PIL images, or an array (B,C,H,W) with `channels`, by default those that `name` needs."""
    if isinstance(image, str | bytes | os.PathLike):
        raise OptionError(f"{name} is a {type(image).__name__}", "an image", "open it with PIL.Image.open")
    images = list(image) if isinstance(image, list | tuple) else [image]
    if not images:
        raise OptionError(f"{name} is an empty list", "one image or more", "leave it out or pass an image")
    if all(isinstance(each, Image.Image) for each in images):
        return images
    if any(isinstance(each, Image.Image | str | bytes | os.PathLike | list | tuple) for each in images):
        kinds = ", ".join(sorted({type(each).__name__ for each in images}))
        raise OptionError(f"{name} is a list of {kinds}", "only PIL images or only arrays")
    if len({isinstance(each, np.ndarray) for each in images}) > 1:
        raise OptionError(f"{name} has arrays of numpy and of others", "arrays of one library")
    arrays = [_batch(each, name, channels, in_list=isinstance(image, list | tuple)) for each in images]
    if len({array.shape[1:] for array in arrays}) > 1:
        sizes = ", ".join(sorted({f"{array.shape[2]}x{array.shape[3]}" for array in arrays}))
        raise OptionError(f"{name} has arrays of {sizes}", "arrays of one size", "resize them, or pass PIL images")
    batch = np.concatenate(arrays)
    if not np.isfinite(batch).all():
        raise OptionError(f"{name} has values that are not finite", "numbers", "look for NaN or overflow in the array")
    return batch


def _batch(array: Any, name: str, channels: int | None, *, in_list: bool) -> npt.NDArray[Any]:
    """Return one array as (B,C,H,W).

    Args:
        array: an array of any library.
        name: the argument, such as "image" or "mask_image".
        channels: number of channels; None for 1 in a mask and 3 in an image.
        in_list: whether it is an element of a list. If not, the first of three dimensions of a mask is the batch.
    """
    values, last = to_numpy(array, name), isinstance(array, np.ndarray)
    channels = channels or (1 if name == _MASK else 3)
    shape = values.shape
    if name == _MASK and values.ndim == 2:
        values = values[None, None]
    elif name == _MASK and values.ndim == 3 and not in_list and not (last and shape[2] in (1, 3)):
        values = values[:, None]
    elif values.ndim in (3, 4):
        values = values if values.ndim == 4 else values[None]
        values = values.transpose(0, 3, 1, 2) if last else values
    if values.ndim != 4 or values.shape[1] != channels or not values.size:
        expected = ("(H,W,{0}) or (B,H,W,{0})" if last else "({0},H,W) or (B,{0},H,W)").format(channels)
        raise OptionError(f"{name} has the shape {shape}", expected, f"convert it to {_COLOURS[channels]}")
    return values


_COLOURS = {1: "grayscale", 3: "RGB"}


def _size(
    opened: list[Image.Image] | npt.NDArray[Any], height: int | None, width: int | None, factor: int, name: str
) -> tuple[int, int]:
    if isinstance(opened, list):
        for each in opened:
            require_sides(name, each.width, each.height)
        own: Sequence[int] = (opened[0].height, opened[0].width)
    else:
        own = opened.shape[2:]
    wanted = (own[0] if height is None else height, own[1] if width is None else width)
    rounded = (wanted[0] - wanted[0] % factor, wanted[1] - wanted[1] % factor)
    if min(rounded) <= 0:
        raise OptionError(
            f"{name} is to be {wanted[0]}x{wanted[1]}", f"at least {factor}x{factor} pixels", "choose a larger size"
        )
    return rounded


def _pixels(images: Sequence[Image.Image], mode: Literal["RGB", "L"], height: int, width: int, name: str) -> Float:
    """Return PIL images as (B,C,height,width) from 0 to 1: resized first, in their own mode."""
    converted = []
    for image in images:
        try:
            resized = image.resize((width, height), Image.Resampling.LANCZOS).convert(mode)
        except Exception as error:  # the file is decoded here, and decoders raise any exception
            reason = " ".join(str(error).split())
            raise OptionError(
                f"{name}, of mode {image.mode}, cannot be converted ({reason})", "an image", "convert it to RGB"
            ) from error
        converted.append(np.asarray(resized).reshape(height, width, -1))
    return np.stack(converted).transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)


# If height and width of the output add up to more than this, torch uses the kernel that computes positions in the
# precision of the values (`_use_vectorized_kernel_cond_2d` in aten/src/ATen/native/cpu/UpSampleKernel.cpp).
_SMALL = 128


def _nearest(values: npt.NDArray[Any], height: int, width: int) -> npt.NDArray[Any]:
    """Return (B,C,H,W) resized to the nearest pixels.

    Source: torch.nn.functional.interpolate with mode "nearest" on the CPU, for up to three channels
    (`nearest_idx` and `HelperInterpNearest` in aten/src/ATen/native/cpu/UpSampleKernel.cpp).
    """
    double = values.dtype == np.float64 and height + width > _SMALL
    precision = np.float64 if double else np.float32
    rows = _positions(values.shape[2], height, precision)
    columns = _positions(values.shape[3], width, precision)
    return values[:, :, rows[:, None], columns]


def _positions(size: int, wanted: int, precision: type[np.floating[Any]]) -> npt.NDArray[np.int64]:
    scaled = np.arange(wanted, dtype=precision) * (precision(size) / precision(wanted))
    positions: npt.NDArray[np.int64] = np.floor(scaled.astype(np.float32)).astype(np.int64)
    return np.minimum(positions, np.int64(size - 1))
