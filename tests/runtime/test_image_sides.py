"""Images with a huge side are refused before they are decoded or resized, where Pillow's tables take a gigabyte."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile
from support.pipelines import refused

from sdonnx.cli.generate_options import read_image
from sdonnx.errors import OptionError
from sdonnx.runtime.inputs.argument_checks import MAX_SIDE
from sdonnx.runtime.inputs.clip_images import ClipImages
from sdonnx.runtime.inputs.init_images import control_batch, default_size, image_batch, mask_batch
from sdonnx.runtime.inputs.ip_adapter_inputs import _rgb


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.fixture(params=[(2**24, 1), (1, 2**24)], ids=["wide", "high"])
def huge(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A valid PNG of 16 KB. Decoding it is an error of the test."""
    width, height = request.param
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    data = zlib.compress(bytes((1 + (width + 7) // 8) * height))
    path = tmp_path / "huge.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", data) + _chunk(b"IEND", b""))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    return path


def test_a_file_of_a_command(huge: Path) -> None:
    with refused(OptionError, str(huge), "16777216", f"sides from 1 to {MAX_SIDE}"):
        read_image(huge)


@pytest.mark.parametrize(
    ("prepare", "name"),
    [
        (lambda image: image_batch(image, 64, 64, 8), "image is "),
        (lambda image: mask_batch(image, 64, 64, 8), "mask_image is "),
        (lambda image: control_batch(image, 64, 64, 3, "control_image"), "control_image is "),
        (lambda image: default_size([Image.new("L", (8, 8)), image], 8), "image is "),
        (_rgb, "an ip_adapter_image is "),
    ],
)
def test_an_argument_of_the_pipeline(prepare: Any, name: str, huge: Path) -> None:
    with Image.open(huge) as image, refused(OptionError, name, "16777216", f"sides from 1 to {MAX_SIDE}"):
        prepare(image)


def test_the_shorter_edge_of_a_narrow_image() -> None:
    """CLIP's preprocessing enlarges the shorter edge, and the longer one in proportion."""
    images = ClipImages(16, Image.Resampling.BICUBIC, (16, 16), None, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert images.prepare(np.zeros((1, 2, 4000, 3), np.uint8)).shape == (1, 3, 16, 16)
    for shape in ((1, 5000), (5000, 1)):
        with refused(OptionError, "a side of 80000 pixels", "sides of at most"):
            images.prepare(np.zeros((1, *shape, 3), np.uint8))
