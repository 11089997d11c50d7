"""The parts of pages: numbers in words, images next to their reference, and files that are written atomically."""

from __future__ import annotations

import base64
import io
import math
import os
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from support.comparison import sample_image

from sdonnx.errors import OutputError
from sdonnx.html.gallery import Gallery, Picture, difference, factor_for, make_gallery
from sdonnx.html.page import check_page, readable_date, write_page
from sdonnx.html.tables import aligned, decimals_for, number, percent, ratio
from sdonnx.reference import REFERENCE

DASH = "\N{EN DASH}"


def test_number_formats() -> None:
    assert [number(value, 1) for value in (1234.56, -0.04, None, math.nan, math.inf)] == [
        "1,234.6", "0.0", DASH, DASH, DASH,
    ]  # fmt: skip
    assert [decimals_for([value]) for value in (12345, 331.1, 20.31, 3.45, 0.001, 0, None)] == [0, 1, 2, 3, 3, 0, 0]
    assert aligned(3, 2)([0.5, None, 120.0]) == ["0.50", DASH, "120.00"]
    assert percent([0.1666, None]) == ["16.7 %", DASH]
    assert [ratio(value) for value in (0.984, 1.0, 2.849, 12.34, 123.4)] == ["0.98", "1.00", "2.85", "12.3", "123"]
    assert (readable_date("2026-03-05T10:00:00+00:00"), readable_date("")) == ("5 March 2026", None)


# The images


def gallery(images: dict[str, npt.NDArray[np.uint8] | Image.Image]) -> Gallery:
    made = {name: each if isinstance(each, Image.Image) else Image.fromarray(each) for name, each in images.items()}
    return make_gallery("one", made, lambda name: "#000000")


def content(picture: Picture) -> bytes:
    kind, _, data = picture.uri.partition(",")
    assert kind == "data:image/webp;base64"
    return base64.b64decode(data)


def pixels(picture: Picture | None) -> npt.NDArray[np.uint8]:
    assert picture is not None
    return np.asarray(Image.open(io.BytesIO(content(picture))).convert("RGB"))


def test_small_images_are_lossless() -> None:
    near = sample_image()
    near[::3, ::2, 1] += 2
    made = gallery({REFERENCE: sample_image(), "ours": near})
    reference, ours = made.shown
    assert np.array_equal(pixels(reference.image), sample_image())
    assert made.factor == 32
    assert np.array_equal(pixels(ours.difference), 128 + (near.astype(int) - sample_image()) * 32)


def test_nothing_is_shown_for_no_difference() -> None:
    """A black square would look like a black image."""
    near = sample_image()
    near[0, :2] += 1  # 2 of 9216 pixels
    made = gallery({REFERENCE: sample_image(), "ours": near, "theirs": sample_image()})
    assert [(each.agreement, each.same) for each in made.shown[1:]] == [
        ("PSNR 84.8 dB", "no visible difference"),
        ("identical", "identical pixels"),
    ]
    assert not made.has_differences


def test_noisy_images_are_compressed_with_loss() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2, 512, 512, 3), dtype=np.uint8)
    made = gallery({REFERENCE: noise[0], "ours": noise[1]})
    pictures = [made.shown[0].image, made.shown[1].image, made.shown[1].difference]
    assert all(each is not None and len(content(each)) < 300_000 for each in pictures)
    assert np.corrcoef(pixels(pictures[0]).ravel(), noise[0].ravel())[0, 1] > 0.5


def test_difference_is_amplified_and_clipped() -> None:
    reference = Image.new("RGB", (2, 1), (100, 100, 100))
    image = Image.new("RGB", (2, 1), (101, 98, 100))
    image.putpixel((1, 0), (160, 100, 0))
    assert np.asarray(difference(image, reference, 8)).tolist() == [[[136, 112, 128], [255, 128, 0]]]


@pytest.mark.parametrize(("off", "factor"), [(0, 8), (1, 64), (3, 32), (4, 16), (7, 16), (8, 8), (17, 8)])
def test_amplification_depends_on_similar_images(off: int, factor: int) -> None:
    near = np.minimum(sample_image(), 200)
    base = Image.fromarray(near)
    near[:, ::7] += off  # few enough for the images to be similar
    assert factor_for(base, [Image.fromarray(near), Image.fromarray(255 - sample_image())]) == factor
    assert factor_for(None, [base]) == 8


def test_large_images_are_compared_at_full_size() -> None:
    wide: dict[str, Any] = {REFERENCE: Image.new("RGB", (2048, 32)), "blue": Image.new("RGB", (2048, 32), (0, 0, 255))}
    made = gallery(wide | {"other": Image.new("RGB", (64, 32))})
    assert [each.image.width for each in made.shown] == [512, 512, 64]
    assert made.shown[1].agreement == "PSNR 4.8 dB"  # 10 log10 3
    assert made.shown[2].agreement == f"size differs from {REFERENCE}"


def test_images_without_a_reference() -> None:
    (shown,) = gallery({"torch": Image.new("L", (8, 8))}).shown
    assert (shown.agreement, shown.difference) == ("no reference", None)


# Writing


def test_failed_write_keeps_the_old_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page("the old one", path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # smaller than the page
    try:
        with pytest.raises(OutputError, match=r"writing .*report\.html failed \(File too large\)"):
            write_page("x" * 20_000, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text(encoding="utf-8") == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_interruption_keeps_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_page("the old one", path)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_page("new", path)
    assert path.read_text(encoding="utf-8") == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_writes_through_a_symbolic_link_with_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "other").touch()
    link, real = tmp_path / "report.html", tmp_path / "pages" / "real.html"
    link.symlink_to(Path("pages", "real.html"))
    for text in ("first", "second \udcff"):
        write_page(text, link)
    assert link.is_symlink()
    assert real.read_bytes() == b"second \\udcff"
    assert real.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert os.listdir(tmp_path / "pages") == ["real.html"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/report.html", "is not a folder"),
        ("file/report.html", "is not a folder"),
        ("", "is not a file"),
        # Not even root can create files in /proc.
        ("/proc/report.html", "writing /proc/report.html failed"),
        ("x" * 300, "File name too long"),
    ],
)
def test_rejects_paths_that_are_not_writable(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for write in (check_page, lambda path: write_page("text", path)):
        with pytest.raises(OutputError, match=re.escape(reason)):
            write(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]


def test_check_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    check_page(path)
    assert os.listdir(tmp_path) == []
    path.write_text("the old one", encoding="utf-8")
    check_page(path)
    assert path.read_text(encoding="utf-8") == "the old one"
