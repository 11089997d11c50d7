"""The page at `/`, in a real browser: an image with its progress, an edit, a stop, and errors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.serve_load import CAPTIONS
from support.serving import Running, serving_folder, until

from sdonnx import ServeLimits
from sdonnx.serve.http.serve_settings import ServeSettings

browser_support = pytest.importorskip("support.browser")

pytestmark = pytest.mark.skipif(browser_support.CHROMIUM is None, reason="no Chromium")

KEY = "secret"


@pytest.fixture(scope="module")
def server(shapes_cpu: Path) -> Iterator[Running]:
    with serving_folder(shapes_cpu, ServeLimits(max_images=4), ServeSettings(api_keys=(KEY,))) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_support.chromium() as launched:
        yield launched


@pytest.fixture
def page(server: Running, browser: Any) -> Iterator[Any]:
    """The page with the API key entered; scripts and styles come from the server only, and none fails."""
    context = browser.new_context(viewport={"width": 390, "height": 844})
    context.set_default_timeout(60_000)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda request: problems.append(request.url) if server.url not in request.url
              and not request.url.startswith("data:") else None)  # fmt: skip
    opened.goto(server.url)
    opened.fill("#key", KEY)
    opened.locator("#key").dispatch_event("change")
    opened.wait_for_selector("#model option", state="attached")
    yield opened
    context.close()
    assert problems == []


def test_generates_images_with_previews(page: Any) -> None:
    page.fill("#prompt", CAPTIONS[1])
    page.fill("#n", "2")
    page.fill("#num_inference_steps", "30")
    page.fill("#seed", "4")
    page.fill("#size", "64x48")
    page.click("#start")
    page.wait_for_selector("figure[data-state=preview]")
    page.wait_for_selector("figure[data-state=completed] >> nth=1")
    assert page.locator("#status").inner_text() == "done"
    assert page.locator("figcaption").all_inner_texts() == ["64x48, seed 4", "64x48, seed 5"]
    sizes = page.evaluate("[...document.images].map((each) => [each.naturalWidth, each.naturalHeight, each.alt])")
    assert sizes == [[64, 48, CAPTIONS[1]]] * 2
    assert page.evaluate("document.querySelector('#progress').value") == 1
    assert page.locator("#start").is_enabled()


def test_edits_an_image(page: Any) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    page.set_input_files("#image", {"name": "a.png", "mimeType": "image/png", "buffer": file.getvalue()})
    page.fill("#num_inference_steps", "4")
    page.fill("#strength", "0.5")
    page.click("#start")
    page.wait_for_selector("figure[data-state=completed]")


def test_stop_ends_the_image_on_the_server(server: Running, page: Any) -> None:
    before = server.value("sdonnx_requests_total", model="shapes", outcome="cancelled")
    page.fill("#num_inference_steps", "150")
    page.click("#start")
    page.wait_for_selector("#status:has-text('step')")
    page.click("#stop")
    page.wait_for_selector("#status:has-text('stopped')")
    until(lambda: server.value("sdonnx_requests_total", model="shapes", outcome="cancelled") == before + 1)


def test_shows_errors_as_text(page: Any) -> None:
    page.fill("#prompt", "<img src=x onerror=alert(1)>")
    page.fill("#scheduler", "<b>nothing</b>")
    page.click("#start")
    page.wait_for_selector("#status.error")
    assert "<b>nothing</b>" in page.locator("#status").inner_text()
    page.fill("#key", "wrong")
    page.click("#start")
    page.wait_for_selector("#status:has-text('API key')")


def test_fits_narrow_windows_and_can_be_read(page: Any, browser: Any, server: Running) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser_support.find_cut(page) == []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        shown = context.new_page()
        shown.goto(server.url)
        contrasts = shown.evaluate(browser_support.CONTRASTS)
        context.close()
        assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}
