"""Uploads that cost more than they weigh: scans, edges, blocks and segments without end; and files that are fine."""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image
from support.pipelines import refused
from support.serving import file_of

from sdonnx.errors import OptionError
from sdonnx.serve.http import uploaded_images
from sdonnx.serve.http.uploaded_images import read_conditioning, read_upload

MAX_PIXELS = 4096 * 4096


def noise(size: int = 64) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    return Image.fromarray(pixels).resize((size, size))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


PNG, JPEG = file_of(noise(), "PNG"), file_of(noise(), "JPEG", progressive=True)
APP1, COMMENT = 0xE1, 0xFE


def scans(count: int, size: int) -> bytes:
    """Return a progressive JPEG file with further scans, each of a few bytes."""
    content = file_of(Image.new("L", (size, size)), "JPEG", progressive=True, quality=1)
    last = content[content.rfind(b"\xff\xda") : -2]
    return content[:-2] + last * count + b"\xff\xd9"


def wide(width: int, height: int) -> bytes:
    rows = zlib.compress(bytes(height * (width + 1)))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@contextmanager
def cheap(seconds: float = 1.0) -> Iterator[None]:
    """Expect some seconds of processor time at most."""
    start = time.thread_time()
    yield
    assert time.thread_time() - start < seconds


def read(content: bytes) -> Image.Image:
    return read_upload(content, None, None, MAX_PIXELS).image


@pytest.mark.parametrize("count", [41, 30_000, 1_000_000])
def test_scans_are_counted_before_they_are_decoded(count: int) -> None:
    with cheap(), refused(OptionError, "image has too many scans", "up to 40"):
        read(scans(count, 4096))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (wide(2**24, 1), "16777216x1 pixels"),
        (wide(1, 2**24), "1x16777216 pixels"),
        (wide(8193, 8), "8193x8 pixels"),
        (wide(33, 1), "33x1 pixels"),
    ],
    ids=["width", "height", "edge", "ratio"],
)
def test_edges_are_limited_before_anything_is_allocated(content: bytes, words: str) -> None:
    for name, decode in (
        ("image", lambda: read(content)),
        ("mask", lambda: read_upload(PNG, content, None, MAX_PIXELS)),
        ("control_image", lambda: read_conditioning({"control_image": [content]}, MAX_PIXELS)),
        ("ip_adapter_image", lambda: read_conditioning({"ip_adapter_image": [content]}, MAX_PIXELS)),
    ):
        with cheap(), refused(OptionError, f"{name} is {words}", "edges of at most 8192 pixels"):
            decode()


@pytest.mark.parametrize(
    "content",
    [
        PNG[:33] + chunk(b"abCd", b"") * 1_000_000 + PNG[33:],
        PNG[:33] + chunk(b"IDAT", b"") * 1_000_000,
        JPEG[:2] + segment(COMMENT, b"") * 4000 + b"\xff" * 10_000_000 + JPEG[2:],
    ],
    ids=["chunks", "blocks", "fill bytes"],
)
def test_decoding_that_takes_too_long_ends(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploaded_images, "_DECODE_S", 0.2)
    with cheap(2), refused(OptionError, "image is not decoded after 0.2 s of processor time"):
        read(content)


def test_the_files_of_a_request_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploaded_images, "_DECODE_S", 0.0)
    slow = PNG[:33] + chunk(b"abCd", b"") * 100_000 + PNG[33:]
    with refused(OptionError, "is not decoded after 0 s"):
        read_conditioning({"control_image": [PNG, slow]}, MAX_PIXELS)


def test_segments_are_limited() -> None:
    with cheap(), refused(OptionError, "too many scans"):
        read(JPEG[:2] + segment(COMMENT, b"") * 1_000_000 + JPEG[2:])


@pytest.mark.parametrize(
    "content",
    [
        JPEG,
        file_of(noise(), "JPEG"),
        scans(30, 64),
        JPEG[:2] + segment(APP1, b"thumbnail" + scans(100, 64)) + JPEG[2:],  # scans inside a segment are not decoded
        JPEG + b"\xff\xda" * 1000,  # a film after the end of the image, as telephones write it
        JPEG[:2] + b"\xff\xff\xff" + JPEG[2:],  # fill bytes
        file_of(noise(1024), "JPEG", progressive=True, quality=95),
        PNG,
        file_of(noise(), "WEBP", lossless=True),
        file_of(Image.new("RGB", (8192, 256)), "PNG"),
    ],
    ids=["progressive", "baseline", "36 scans", "thumbnail", "film", "fill", "large", "png", "webp", "panorama"],
)
def test_files_that_are_fine_are_decoded_as_pillow_does(content: bytes) -> None:
    with Image.open(io.BytesIO(content)) as expected:
        np.testing.assert_array_equal(np.asarray(read(content)), np.asarray(expected.convert("RGB")))
