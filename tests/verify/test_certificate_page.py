"""The page of a certificate: its content, and its appearance in a browser."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page
from support.browser import CHROMIUM, CONTRASTS, chromium, find_cut, find_overlaps, offline, opened
from support.markup import Markup
from support.verifying import PROMPTS, verification

from sdonnx.verify.certificate_page import certificate_html

PHONE, DESK = (360, 740), (1280, 900)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with chromium() as browser:
        yield browser


@contextlib.contextmanager
def page_of(browser: Browser, folder: Path, size: tuple[int, int], *, passing: bool = True) -> Iterator[Page]:
    path = folder / "certificate.html"
    path.write_text(certificate_html(*verification(passing=passing)), encoding="utf-8")
    with contextlib.closing(offline(browser, *size, dark=False)) as context:
        yield opened(context, path)


def test_result_title_date_and_version() -> None:
    found = Markup(certificate_html(*verification()))
    assert "Verification of fast against sd15" in found.text
    assert "PASSED All 2 images and 3 outputs of components are within the limits." in found.text
    assert "Verified on 5 November 2026 with sdonnx 0.2.0, in float16 on NVIDIA H200." in found.text
    assert "FAILED" not in found.text
    assert "Failures" not in found.headings


def test_failures_are_named_first() -> None:
    found = Markup(certificate_html(*verification(passing=False)))
    assert "FAILED 1 of 5 comparisons of images and components failed." in found.text
    assert found.headings[0] == "Failures"
    assert f"{PROMPTS[1]}, seed 0 failed" in found.text
    assert "PASSED" not in found.text


def test_numbers_of_images_and_components() -> None:
    found = Markup(certificate_html(*verification()))
    assert "PSNR to torch fp16 identical" in found.text
    assert "PSNR to torch fp32 54.7 dB" in found.text
    assert found.table("Error of each output").rows["unet, out_sample"] == [
        "\N{MULTIPLICATION SIGN}".join(["2", "4", "64", "64"]), "1.10e-03", "2.00e-03", "0.0", "1.00e-03", "0.0",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("passing", [True, False], ids=["passed", "failed"])
def test_everything_is_visible(browser: Browser, tmp_path: Path, passing: bool, size: tuple[int, int]) -> None:
    with page_of(browser, tmp_path, size, passing=passing) as page:
        assert find_cut(page) == []
        assert find_overlaps(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert {key: value for key, value in page.evaluate(CONTRASTS).items() if value < 4.5} == {}


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_our_image_is_next_to_the_one_of_torch(browser: Browser, tmp_path: Path, size: tuple[int, int]) -> None:
    with page_of(browser, tmp_path, size) as page:
        badge = page.get_by_text("PASSED", exact=True).bounding_box()
        assert badge is not None
        assert badge["y"] < 250
        figures = page.locator(".gallery").first.locator("figure")
        assert [text.split()[0] for text in figures.locator(".name").all_inner_texts()] == ["sdonnx", "torch", "torch"]
        ours, torch = (figures.nth(index).locator("img").first.bounding_box() for index in (0, 1))
        assert ours is not None
        assert torch is not None
        assert ours["y"] == torch["y"] < size[1]  # side by side, and above the fold
        assert ours["x"] + ours["width"] < torch["x"]
        assert torch["x"] + torch["width"] <= size[0]
