"""Images of a request: read from memory, with limits before any pixel is decoded."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageOps

from sdonnx.errors import OptionError
from sdonnx.serve.conditioning_images import MAX_CONDITIONING_IMAGES

__all__ = ["Upload", "read_conditioning", "read_upload"]

_FORMATS = ("PNG", "JPEG", "WEBP")
_OPAQUE = 255
_DATA_URL, _ENCODED = "data:", ";base64"


@dataclass(frozen=True)
class Upload:
    """An image to edit.

    Attributes:
        image: the image in RGB.
        mask: grayscale, white where the image is repainted; None to change all of it.
    """

    image: Image.Image
    mask: Image.Image | None


def read_upload(image: bytes, mask: bytes | None, size: tuple[int, int] | None, max_pixels: int) -> Upload:
    """Decode the image and the mask of an edit.

    As in OpenAI's API, transparent pixels of the mask, or of the image if there is no mask, are repainted. A mask
    without transparency is white where the image is repainted.

    Args:
        image: content of a PNG, JPEG or WebP file.
        mask: content of such a file of the same size; None for none.
        size: height and width to which both are resized; None to keep them.
        max_pixels: maximum height times width of a file.

    Raises:
        OptionError: a file cannot be decoded, is too large, or the sizes differ.
    """
    decoded = _decode("image", image, max_pixels)
    hidden = None if mask is None else _mask_of(_decode("mask", mask, max_pixels))
    if hidden is None:
        hidden = _transparency(decoded)
    if hidden is not None and hidden.size != decoded.size:
        found = f"the mask is {hidden.width}x{hidden.height} and the image {decoded.width}x{decoded.height}"
        raise OptionError(found, "one size", "resize the mask")
    rgb = decoded.convert("RGB")
    if size is not None:  # as the pipeline does; images that wait take no more memory than those that are generated
        wanted = (size[1], size[0])
        rgb = rgb.resize(wanted, Image.Resampling.LANCZOS)
        hidden = None if hidden is None else hidden.resize(wanted, Image.Resampling.LANCZOS)
    return Upload(rgb, hidden)


def read_conditioning(files: Mapping[str, Sequence[bytes | str]], max_pixels: int) -> dict[str, list[Image.Image]]:
    """Decode the images next to the prompt of a request.

    Args:
        files: for each field the content of PNG, JPEG or WebP files; texts are base64, or data URLs.
        max_pixels: maximum height times width of all files.

    Raises:
        OptionError: a file cannot be decoded, or they have too many pixels.
    """
    decoded: dict[str, list[Image.Image]] = {}
    left = max_pixels
    for name, contents in files.items():
        if len(contents) > MAX_CONDITIONING_IMAGES:
            raise OptionError(f"{name} has {len(contents)} images", f"1 to {MAX_CONDITIONING_IMAGES}", "send fewer")
        for content in contents:
            image = _decode(name, _from_text(name, content) if isinstance(content, str) else content, left)
            left -= image.width * image.height
            decoded.setdefault(name, []).append(image)
    return decoded


def _from_text(name: str, text: str) -> bytes:
    if text[: len(_DATA_URL)].lower() == _DATA_URL:
        header, comma, text = text.partition(",")
        if not comma or not header.endswith(_ENCODED):
            raise OptionError(f"{name} is a data URL without base64", "data:image/png;base64,...", "encode the file")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        found = f"{name} is no base64"
        raise OptionError(found, "a file in base64, or a data URL", "encode it; addresses are not opened") from error


def _decode(name: str, content: bytes, max_pixels: int) -> Image.Image:
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as opened:
            width, height = opened.size
            if 0 < width * height <= max_pixels:
                opened.load()
                return ImageOps.exif_transpose(opened)
    except Exception as error:  # decoders raise any exception, and Pillow's limits are a warning and an error
        reason = type(error).__name__
        raise OptionError(f"{name} cannot be decoded ({reason})", "a PNG, JPEG or WebP file", "pass another") from error
    raise OptionError(f"{name} is {width}x{height} pixels", f"1 to {max_pixels} pixels", "resize it")


def _mask_of(mask: Image.Image) -> Image.Image:
    hidden = _transparency(mask)
    return mask.convert("L") if hidden is None else hidden


def _transparency(image: Image.Image) -> Image.Image | None:
    """Return the transparency of an image, 255 for transparent; None if it is opaque."""
    if not image.has_transparency_data:
        return None
    alpha = image.convert("RGBA").getchannel("A")
    lowest, _ = alpha.getextrema()
    return None if lowest == _OPAQUE else ImageOps.invert(alpha)
