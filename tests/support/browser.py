"""Open pages in Chromium without a network."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Chromium's sandbox does not support root, as which tests may run.
_ARGUMENTS = ("--no-sandbox", "--disable-gpu")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Yield the machine's Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


def offline(browser: Browser, width: int, height: int, *, dark: bool, touch: bool = False) -> BrowserContext:
    """Return a browser context without a network."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        has_touch=touch,
        offline=True,
    )
    context.set_default_timeout(60_000)
    return context


def opened(context: BrowserContext, path: Path) -> Page:
    """Open a file and wait until its plots are rendered."""
    page = context.new_page()
    page.goto(path.resolve().as_uri())
    until(page, "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg.main-svg'))")
    return page


def until(page: Page, expression: str, seconds: float = 30) -> None:
    """Poll until an expression is true. Playwright's wait_for_function uses eval, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        if time.monotonic() > end:
            raise TimeoutError(expression)
        page.wait_for_timeout(20)


def screenshot(
    page_path: Path,
    out_png: Path,
    width: int,
    height: int,
    dark: bool,
    *,
    full: bool = False,
    browser: Browser | None = None,
) -> None:
    """Write a screenshot of the page in a window of the given size; `full` includes the whole page."""
    with (
        chromium() if browser is None else contextlib.nullcontext(browser) as window,
        contextlib.closing(offline(window, width, height, dark=dark)) as context,
    ):
        opened(context, page_path).screenshot(path=out_png, full_page=full)
