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


# WCAG 2.2, relative luminance and contrast ratio of text and its background.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const channels = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (colour) => {
    const [r, g, b] = channels(colour).slice(0, 3).map((each) => each / 255).map(
      (each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (channels(colour)[3] === 255) return colour;
    }
    return "white";
  };
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("script, style, noscript") || !element.checkVisibility()) {
      continue;
    }
    const style = getComputedStyle(element);
    const colour = element instanceof SVGElement ? style.fill : style.color;
    const pair = [luminance(colour), luminance(behind(element))].sort((a, b) => b - a);
    const key = `${element.localName}.${element.className.baseVal ?? element.className} ${colour}`;
    found[key] = (pair[0] + 0.05) / (pair[1] + 0.05);
  }
  return found;
}"""

# Texts and shapes of plots that can be seen: each with its name and its boxes on the screen. `clip` is the part of the
# window in which it may be: a box that scrolls shows all of its content, and any other box that hides its overflow
# cuts.
_SEEN = """() => {
  const hidden = ".unseen, .hint, script, style, title, desc";
  const found = [];
  const boxes = (rects) => [...rects].filter(({ width, height }) => width > 0.5 && height > 0.5).map(
    ({ left, right, top, bottom }) => ({ left, right, top: top + scrollY, bottom: bottom + scrollY }));
  const clip = (element) => {
    let left = 0, right = document.documentElement.clientWidth;
    for (let each = element; each && each !== document.body; each = each.parentElement) {
      const { overflowX } = getComputedStyle(each), rect = each.getBoundingClientRect();
      if (["auto", "scroll"].includes(overflowX)) {
        return { left: rect.left - each.scrollLeft, right: rect.left - each.scrollLeft + each.scrollWidth };
      }
      const isPlot = each.localName === "svg";  // a plot may overflow its box, but must not
      if (overflowX !== "visible" || isPlot) {
        left = Math.max(left, rect.left);
        right = Math.min(right, rect.right);
      }
    }
    return { left, right };
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || element.closest(hidden) || !element.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    found.push({ name: text.slice(0, 60), boxes: boxes(range.getClientRects()), clip: clip(element), isText: true,
                 isSticky: Boolean(element.closest("th:first-child, caption")) });
  }
  for (const path of document.querySelectorAll("svg path")) {
    if (!path.checkVisibility()) continue;
    found.push({ name: "path " + path.getAttribute("d").slice(0, 60), boxes: boxes([path.getBoundingClientRect()]),
                 clip: clip(path), isText: false });
  }
  return found;
}"""


def find_cut(page: Page) -> list[str]:
    """Return the texts and shapes that are partly outside the window, or hidden behind the edge of a box."""
    return [
        each["name"]
        for each in page.evaluate(_SEEN)
        if any(box["left"] < each["clip"]["left"] - 1 or box["right"] > each["clip"]["right"] + 1
               for box in each["boxes"])
    ]  # fmt: skip


def find_overlaps(page: Page) -> list[str]:
    """Return the pairs of texts that overlap. Row headings are left out: cells scroll below them."""
    boxes = [
        (each["name"], box)
        for each in page.evaluate(_SEEN)
        if each["isText"] and not each["isSticky"]
        for box in each["boxes"]
    ]
    boxes.sort(key=lambda each: each[1]["top"])
    found = []
    for index, (name, one) in enumerate(boxes):
        for other_name, other in boxes[index + 1 :]:
            down = min(one["bottom"], other["bottom"]) - other["top"]
            if down <= 0:
                break
            across = min(one["right"], other["right"]) - max(one["left"], other["left"])
            # Boxes of lines are higher than their letters, so that they may touch.
            if across > 1 and down > 0.35 * min(one["bottom"] - one["top"], other["bottom"] - other["top"]):
                found.append(f"{name} / {other_name}")
    return found


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
    """Open a file."""
    page = context.new_page()
    page.goto(path.resolve().as_uri())
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
