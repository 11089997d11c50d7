"""Images of a request: read from memory, with limits before any pixel is decoded, and while it is."""

from __future__ import annotations

import base64
import binascii
import io
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageOps

from sdonnx.errors import OptionError
from sdonnx.runtime.inputs.conditioning_images import MAX_CONDITIONING_IMAGES

__all__ = ["Upload", "read_conditioning", "read_upload"]

_FORMATS = ("PNG", "JPEG", "WEBP")
_OPAQUE = 255
_DATA_URL, _ENCODED = "data:", ";base64"

_DECODE_S = 5.0  # processor time to decode the files of a request
_MAX_EDGE, _MAX_RATIO = 8192, 32  # resizing takes memory for an edge of the one size times an edge of the other

# A scan of a JPEG file takes time for all its pixels, however few bytes it has. libjpeg writes 10 of them.
_JPEG, _MAX_SCANS, _MAX_SEGMENTS = b"\xff\xd8\xff", 40, 5000
_MARKER = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")  # without those that have no length, ITU-T T.81, table B.1
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9


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
    decoder = _Decoder()
    decoded = decoder.decode("image", image, max_pixels)
    hidden = None if mask is None else _mask_of(decoder.decode("mask", mask, max_pixels))
    if hidden is None:
        hidden = _transparency(decoded)
    if hidden is not None and hidden.size != decoded.size:
        found = f"the mask is {hidden.width}x{hidden.height} and the image {decoded.width}x{decoded.height}"
        raise OptionError(found, "one size")
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
    decoder, left = _Decoder(), max_pixels
    for name, contents in files.items():
        if len(contents) > MAX_CONDITIONING_IMAGES:
            raise OptionError(f"{name} has {len(contents)} images", f"1 to {MAX_CONDITIONING_IMAGES}")
        for content in contents:
            image = decoder.decode(name, _from_text(name, content) if isinstance(content, str) else content, left)
            left -= image.width * image.height
            decoded.setdefault(name, []).append(image)
    return decoded


def _from_text(name: str, text: str) -> bytes:
    if text[: len(_DATA_URL)].lower() == _DATA_URL:
        header, comma, text = text.partition(",")
        if not comma or not header.endswith(_ENCODED):
            raise OptionError(f"{name} is a data URL without base64", "data:image/png;base64,...")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        found = f"{name} is no base64"
        raise OptionError(found, "a file in base64, or a data URL", "encode it; addresses are not opened") from error


class _SlowFileError(Exception):
    """Decoding has taken too long."""


class _TimedFile(io.BytesIO):
    """A file in memory that cannot be read any more once the thread has used its processor time.

    Pillow's decoders read blocks of 64 KB, and Pillow reads each header of a file on its own.
    """

    def __init__(self, content: bytes, end_s: float) -> None:
        super().__init__(content)
        self._end_s = end_s

    def read(self, size: int | None = -1, /) -> bytes:
        if time.thread_time() > self._end_s:
            raise _SlowFileError
        return super().read(size)


class _Decoder:
    """Decodes the files of a request in the thread that creates it, in a limited time for all of them."""

    def __init__(self) -> None:
        self._end_s = time.thread_time() + _DECODE_S

    def decode(self, name: str, content: bytes, max_pixels: int) -> Image.Image:
        """Return the image in a file.

        Raises:
            OptionError: the file cannot be decoded in time, or exceeds a limit.
        """
        if content.startswith(_JPEG) and _scans(content) > _MAX_SCANS:
            raise OptionError(f"{name} has too many scans", f"a JPEG file of up to {_MAX_SCANS}")
        try:
            with Image.open(_TimedFile(content, self._end_s), formats=_FORMATS) as opened:
                _require_size(name, *opened.size, max_pixels)
                opened.load()
                return ImageOps.exif_transpose(opened)
        except OptionError:
            raise
        except _SlowFileError:
            found = f"{name} is not decoded after {_DECODE_S:g} s of processor time"
            raise OptionError(found, "files that take less", "pass fewer or smaller ones") from None
        except Exception as error:  # decoders raise any exception, and Pillow's limits are a warning and an error
            found = f"{name} cannot be decoded ({type(error).__name__})"
            raise OptionError(found, "a PNG, JPEG or WebP file") from error


def _require_size(name: str, width: int, height: int, max_pixels: int) -> None:
    found = f"{name} is {width}x{height} pixels"
    if not 0 < width * height <= max_pixels:
        raise OptionError(found, f"1 to {max_pixels} pixels")
    if max(width, height) > min(_MAX_EDGE, _MAX_RATIO * min(width, height)):
        expected = f"edges of at most {_MAX_EDGE} pixels, the longer at most {_MAX_RATIO} times the shorter"
        raise OptionError(found, expected)


def _scans(content: bytes) -> int:
    """Return the number of scans of a JPEG file, or a larger number than is allowed if it has too many segments."""
    place = scans = 0
    for _ in range(_MAX_SEGMENTS):
        marker = _MARKER.search(content, place + 2)
        if marker is None or marker[0][1] == _END_OF_IMAGE:
            return scans
        scans += marker[0][1] == _START_OF_SCAN
        place = marker.start() + int.from_bytes(content[marker.end() : marker.end() + 2])
    return _MAX_SCANS + 1


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
