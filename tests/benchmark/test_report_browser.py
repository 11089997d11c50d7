"""The report in a browser without a network: resources, plots, layout and accessibility, on phone and desktop sizes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route
from support.browser import CHROMIUM, chromium, offline, opened, screenshot, until
from support.comparison import COMPILED, EAGER, ONE, OURS, comparison

from sdonnx.benchmark.report import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

PHONE, DESK = (360, 740), (1280, 900)
NARROWEST = (320, 568)

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

PLOTS = """() => [...document.querySelectorAll(".plot")].map((plot) => {
  const box = plot.getBoundingClientRect();
  const svg = plot.querySelector("svg.main-svg").getBoundingClientRect();
  const marks = [...plot.querySelectorAll(".trace .point path, path.point, .js-line")].filter((mark) => {
    const { width, height } = mark.getBoundingClientRect();
    return width + height > 0;
  });
  return { width: svg.width, height: svg.height, marks: marks.length, inside: svg.right <= box.right + 1 };
})"""

SCHEME = """() => {
  const named = (name) => {
    const probe = document.createElement("i");
    probe.style.color = getComputedStyle(document.documentElement).getPropertyValue("--" + name);
    document.body.append(probe);
    const colour = getComputedStyle(probe).color;
    probe.remove();
    return colour;
  };
  const fills = (selector) => [...new Set([...document.querySelectorAll(".plot")].map(
    (plot) => getComputedStyle(plot.querySelector(selector)).fill))];
  return {
    page: getComputedStyle(document.body).backgroundColor,
    paper: named("paper"),
    ink: named("ink"),
    behind: [...document.querySelectorAll(".plot .main-svg:first-child")].map(
      (svg) => getComputedStyle(svg).backgroundColor).filter((colour, at, all) => all.indexOf(colour) === at),
    labels: fills(".ytick text"),
  };
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(comparison(), path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@contextlib.contextmanager
def page_in(
    browser: Browser, path: Path, size: tuple[int, int], *, dark: bool = False, touch: bool = False
) -> Iterator[Page]:
    with contextlib.closing(offline(browser, *size, dark=dark, touch=touch)) as context:
        yield opened(context, path)


@pytest.fixture(
    scope="module",
    params=[(PHONE, False), (PHONE, True), (DESK, False), (DESK, True)],
    ids=["phone-light", "phone-dark", "desk-light", "desk-dark"],
)
def page(request: pytest.FixtureRequest, browser: Browser, report: Path) -> Iterator[Page]:
    """The page in each size and scheme. Tests must not change it."""
    size, dark = request.param
    with page_in(browser, report, size, dark=dark) as page:
        yield page


def overflow(page: Page) -> int:
    wider: int = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return wider


def contrasts(page: Page) -> dict[str, float]:
    found: dict[str, float] = page.evaluate(CONTRASTS)
    return found


# Resources


def test_page_loads_no_resources_and_logs_no_errors(browser: Browser, report: Path) -> None:
    requested: list[str] = []
    messages: list[str] = []

    def answer(route: Route) -> None:
        requested.append(route.request.url)
        if route.request.url == report.resolve().as_uri():
            route.continue_()
        else:
            route.abort()

    with contextlib.closing(offline(browser, *DESK, dark=False)) as context:
        context.route("**/*", answer)
        context.on("console", lambda message: messages.append(message.text))
        context.on("weberror", lambda error: messages.append(str(error.error)))
        page = opened(context, report)
        page.hover(".plot >> nth=0")
        for summary in page.locator("summary").all():
            summary.click()
        page.emulate_media(media="print")
        page.emulate_media(media="screen", color_scheme="dark")
        page.wait_for_timeout(200)
    assert requested == [report.resolve().as_uri()]
    assert messages == []


def test_content_security_policy_forbids_requests(page: Page) -> None:
    violated = page.evaluate(
        """() => new Promise((resolve) => {
          document.addEventListener("securitypolicyviolation", (event) => resolve(event.violatedDirective));
          fetch("https://example.com/").catch(() => {});
        })"""
    )
    assert violated == "connect-src"


# Appearance


def test_page_is_no_wider_than_the_window(page: Page) -> None:
    assert overflow(page) <= 0


def test_page_fits_the_narrowest_phone_with_every_table_open(browser: Browser, report: Path) -> None:
    with page_in(browser, report, NARROWEST) as page:
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert overflow(page) <= 0
        wide = page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length"
        )
        assert wide > 0  # they scroll within their boxes


def test_plots_follow_the_window_size(browser: Browser, report: Path) -> None:
    with page_in(browser, report, DESK) as page:
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        until(
            page,
            "[...document.querySelectorAll('.plot')].every((plot) =>"
            " plot.querySelector('.main-svg').getBoundingClientRect().width <= plot.clientWidth)",
        )
        assert overflow(page) <= 0


def test_every_plot_is_drawn(page: Page) -> None:
    plots = page.evaluate(PLOTS)
    assert len(plots) == 12
    for plot in plots:
        assert plot["width"] > 200
        assert plot["height"] > 100
        assert plot["marks"] >= 3
        assert plot["inside"]


def test_every_timed_run_is_a_dot(page: Page) -> None:
    dots = page.locator(".plot").first.locator(".scatterlayer .point").count()
    assert dots == 3 * 3 * 5


def test_labels_are_inside_the_plots(page: Page) -> None:
    outside = page.evaluate(
        """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
          const box = plot.getBoundingClientRect();
          return [...plot.querySelectorAll("text")].filter((text) => {
            const { left, right, width } = text.getBoundingClientRect();
            return width > 0 && (left < box.left - 1 || right > box.right + 1);
          }).map((text) => text.textContent);
        })"""
    )
    assert outside == []


def test_plots_have_the_colours_of_the_page(page: Page) -> None:
    found = page.evaluate(SCHEME)
    assert found["page"] == found["paper"]
    assert found["behind"] == [found["paper"]]
    assert found["labels"] == [found["ink"]]


def test_plots_follow_when_the_scheme_changes(browser: Browser, report: Path) -> None:
    with page_in(browser, report, DESK) as page:
        light = page.evaluate(SCHEME)
        page.emulate_media(color_scheme="dark")
        until(page, f"({SCHEME})().labels[0] !== '{light['ink']}'")
        dark = page.evaluate(SCHEME)
        page.emulate_media(color_scheme="light")
        until(page, f"({SCHEME})().labels[0] === '{light['ink']}'")
        assert page.evaluate(SCHEME) == light
    for name in ("page", "ink", "behind", "labels"):
        assert light[name] != dark[name]
    assert dark["behind"] == [dark["paper"]]
    assert dark["labels"] == [dark["ink"]]


def test_text_contrast(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    found = contrasts(page)
    page.evaluate("document.querySelectorAll('.panels details').forEach((each) => { each.open = false; })")
    assert len(found) > 20
    assert {key: round(value, 2) for key, value in found.items() if value < 4.5} == {}


def test_print_is_black_on_white_and_no_wider_than_paper(browser: Browser, report: Path) -> None:
    with page_in(browser, report, (794, 1123), dark=True) as page:  # A4 at 96 pixels per inch
        page.emulate_media(media="print", color_scheme="dark")
        until(page, "getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'")
        found = page.evaluate(SCHEME)
        assert found["behind"] == ["rgb(255, 255, 255)"]
        assert overflow(page) <= 0
        assert page.pdf(format="A4").startswith(b"%PDF")


def test_screenshot_shows_the_page(browser: Browser, report: Path, tmp_path: Path) -> None:
    screenshot(report, tmp_path / "light.png", 640, 480, dark=False, browser=browser)
    screenshot(report, tmp_path / "dark.png", 640, 480, dark=True, browser=browser)
    light, dark = (Image.open(tmp_path / name).convert("L") for name in ("light.png", "dark.png"))
    assert light.size == (640, 480)
    assert light.getpixel((1, 1)) == 255
    assert np.asarray(dark.resize((1, 1)))[0, 0] < 60


# Interaction


def test_tables_open_with_the_keyboard(browser: Browser, report: Path) -> None:
    with page_in(browser, report, DESK) as page:
        table = page.locator("details table").first
        assert not table.is_visible()
        for _ in range(200):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.localName") == "summary":
                break
        page.keyboard.press("Enter")
        assert table.is_visible()
        page.keyboard.press("Enter")
        assert not table.is_visible()


def test_tables_open_by_touch(browser: Browser, report: Path) -> None:
    with page_in(browser, report, PHONE, touch=True) as page:
        page.locator("summary").first.tap()
        assert page.locator("details table").first.is_visible()


def test_wide_tables_scroll_with_the_keyboard(browser: Browser, report: Path) -> None:
    with page_in(browser, report, PHONE) as page:
        box = page.locator("#numbers .scroll").first
        box.focus()
        name = "document.querySelector('#numbers .scroll th[scope=row]').getBoundingClientRect().left"
        before = page.evaluate(name)
        for _ in range(5):
            page.keyboard.press("ArrowRight")
        until(page, "document.querySelector('#numbers .scroll').scrollLeft > 40")
        assert page.evaluate(name) == before  # the engine's name stays visible


def test_touch_on_a_plot_scrolls_the_page(browser: Browser, report: Path) -> None:
    with page_in(browser, report, PHONE, touch=True) as page:
        layers = page.evaluate(
            "[...document.querySelectorAll('.plot .nsewdrag')].map((each) => getComputedStyle(each).touchAction)"
        )
        assert set(layers) <= {"auto", "pan-y", "manipulation"}


def test_hover_text_names_the_engine(browser: Browser, report: Path) -> None:
    with page_in(browser, report, DESK) as page:
        page.locator(".plot").first.scroll_into_view_if_needed()
        bar = page.locator(".plot").first.locator(".barlayer .point path").first.bounding_box()
        assert bar is not None
        page.mouse.move(bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2)
        page.wait_for_selector(".hoverlayer .hovertext")
        text = page.locator(".hoverlayer").first.text_content() or ""
        assert f"{OURS}median 320.8 ms" in text


def test_links_have_targets(page: Page) -> None:
    lost = page.evaluate(
        "[...document.querySelectorAll('a')].filter((a) => !document.getElementById(a.hash.slice(1))).length"
    )
    assert lost == 0


# Accessibility


def test_page_has_a_language_a_title_and_headings_in_order(page: Page) -> None:
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.title() == "4 engines on NVIDIA H200"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map((each) => Number(each.localName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_elements_have_accessible_names(page: Page) -> None:
    nameless = page.evaluate(
        """() => [
          ...[...document.querySelectorAll("img")].filter((each) => !each.alt.trim()),
          ...[...document.querySelectorAll("table")].filter((each) => !each.caption?.textContent.trim()),
          ...[...document.querySelectorAll("[role=img], [role=region], [tabindex], nav")].filter(
            (each) => !each.getAttribute("aria-label")),
          ...[...document.querySelectorAll("th")].filter((each) => !each.scope || !each.textContent.trim()),
        ].map((each) => each.outerHTML.slice(0, 200))"""
    )
    assert nameless == []
    ids = page.evaluate("[...document.querySelectorAll('main [id], header [id]')].map((each) => each.id)")
    assert len(set(ids)) == len(ids)


def test_plots_have_text_alternatives(page: Page) -> None:
    label = page.locator(".plot").first.get_attribute("aria-label")
    assert label == f"Latency: {OURS} 320.8 ms, {EAGER} 978.0 ms, {COMPILED} 352.6 ms."


def test_tables_are_visible_without_scripts(browser: Browser, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    with contextlib.closing(context):
        page = context.new_page()
        page.goto(report.resolve().as_uri())
        assert page.locator("noscript p").is_visible()
        assert page.locator("#numbers td", has_text="320.8").first.is_visible()


# Escaping


HOSTILE = "<b>bold</b> &lt;i&gt; %{x} </script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"


def rename(measured: Any, old: str, new: str) -> None:
    for some in (measured.results, measured.throughput, measured.resolutions, measured.kernels):
        for index, each in enumerate(some):
            if each.rival == old:
                object.__setattr__(each, "rival", new)
                some[index] = each


@pytest.mark.parametrize("name", [HOSTILE, "@ink", "7", "x" * 200, "名前 ☃ \u202eesrever"])
def test_names_are_escaped(browser: Browser, tmp_path: Path, name: str) -> None:
    measured = comparison()
    rename(measured, EAGER, name)
    measured.command = name
    path = tmp_path / "report.html"
    write_report(measured, path)
    errors: list[str] = []
    with contextlib.closing(offline(browser, *PHONE, dark=False)) as context:
        context.on("weberror", lambda error: errors.append(str(error.error)))
        page = opened(context, path)
        page.wait_for_timeout(100)
        assert page.evaluate("window.pwned") is None
        label = page.locator(".plot").first.locator(".ytick text").nth(1).text_content() or ""
        assert "".join(label.split())[:10] == "".join(name.split())[:10]
        assert page.locator(".plot a, .plot b, .plot img").count() == 0
        heading = page.locator("#numbers th[scope=row] .name").nth(1)
        assert (heading.text_content() or "").strip() == name
        assert overflow(page) <= 0
        assert len([plot for plot in page.evaluate(PLOTS) if plot["marks"] < 3]) == 0
    assert errors == []


def test_one_engine_and_one_workload(browser: Browser, tmp_path: Path) -> None:
    measured = comparison()
    measured.results = [row for row in measured.results if row.rival == OURS and row.workload == ONE]
    measured.throughput, measured.resolutions, measured.kernels, measured.images = [], [], [], {}
    path = tmp_path / "report.html"
    write_report(measured, path)
    with page_in(browser, path, PHONE) as page:
        assert overflow(page) <= 0
        assert len(page.evaluate(PLOTS)) == 4
