"""The report in a browser without a network: resources, plots, layout and accessibility, on phone and desktop sizes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route
from support.browser import (
    CHROMIUM,
    CONTRASTS,
    chromium,
    find_cut,
    find_overlaps,
    offline,
    opened,
    until,
)
from support.comparison import EAGER, ONE, OURS, TITLES, comparison
from support.weekly_cases import weekly

from sdonnx.benchmark.report.report_page import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

PHONE, DESK = (360, 740), (1280, 900)
NARROWEST = (320, 568)

SCHEME = """() => {
  const named = (name) => {
    const probe = document.createElement("i");
    probe.style.color = getComputedStyle(document.documentElement).getPropertyValue("--" + name);
    document.body.append(probe);
    const colour = getComputedStyle(probe).color;
    probe.remove();
    return colour;
  };
  return {
    page: getComputedStyle(document.body).backgroundColor,
    paper: named("paper"),
    ink: named("ink"),
    labels: [...new Set([...document.querySelectorAll(".bars strong")].map((each) => getComputedStyle(each).color))],
  };
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(comparison(), path)
    return path


@pytest.fixture(scope="module")
def pages(report: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of two workloads, of one, and of one engine that is measured at one size."""
    folder = tmp_path_factory.mktemp("pages")
    one, alone = comparison(), comparison()
    one.results = [row for row in one.results if row.workload == ONE]
    one.images = {key: image for key, image in one.images.items() if key[1] == ONE}
    alone.results = [row for row in one.results if row.rival == TITLES[OURS]]
    alone.throughput, alone.resolutions, alone.kernels, alone.images = [], [], [], {}
    write_report(one, folder / "one.html")
    write_report(alone, folder / "alone.html")
    return {"two workloads": report, "one workload": folder / "one.html", "one engine": folder / "alone.html"}


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
    params=[
        pytest.param((PHONE, False), id="phone-light"),
        pytest.param((PHONE, True), id="phone-dark", marks=pytest.mark.weekly),
        pytest.param((DESK, False), id="desk-light", marks=pytest.mark.weekly),
        pytest.param((DESK, True), id="desk-dark"),
    ],
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
        page.hover(".bars i >> nth=0")
        for summary in page.locator("summary").all():
            summary.click()
        page.emulate_media(media="print")
        page.emulate_media(media="screen", color_scheme="dark")
        page.wait_for_timeout(200)
    assert requested == [report.resolve().as_uri()]
    assert messages == []


# Appearance


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(PHONE, id="phone", marks=pytest.mark.weekly),
        pytest.param(DESK, id="desk"),
        pytest.param(NARROWEST, id="narrowest"),
    ],
)
@pytest.mark.parametrize(
    "name", ["two workloads", pytest.param("one workload", marks=pytest.mark.weekly), "one engine"]
)
def test_everything_is_visible(browser: Browser, pages: dict[str, Path], name: str, size: tuple[int, int]) -> None:
    with page_in(browser, pages[name], size) as page:
        for shown in ("false", "true"):
            page.evaluate(f"document.querySelectorAll('details').forEach((each) => {{ each.open = {shown}; }})")
            assert overflow(page) <= 0
            assert find_cut(page) == []
            assert find_overlaps(page) == []
        assert page.locator(".bars").count() >= 4


def test_cut_and_overlapping_text_is_found(browser: Browser, tmp_path: Path) -> None:
    """The checks of this file notice each kind of fault."""
    path = tmp_path / "faulty.html"
    path.write_text(
        """<!DOCTYPE html><body style="width: 300px">
        <p style="position: absolute; left: -30px">left</p>
        <p style="white-space: nowrap; overflow: hidden; width: 30px">hidden behind an edge</p>
        <svg width="100" height="20" style="overflow: hidden"><text x="90" y="15">clipped</text></svg>
        <svg width="100" height="20"><path d="M50 5h90v9h-90z"/></svg>
        <p style="position: absolute; top: 200px">one</p><p style="position: absolute; top: 203px">other</p>
        <p style="position: absolute; top: 300px">alone</p></body>""",
        encoding="utf-8",
    )
    with page_in(browser, path, PHONE) as page:
        assert find_cut(page) == ["left", "hidden behind an edge", "clipped", "path M50 5h90v9h-90z"]
        assert find_overlaps(page) == ["one / other"]


def test_bars_have_their_lengths(page: Page) -> None:
    """The longest one leaves room for its number, whatever the width of the page."""
    widths = page.evaluate("[...document.querySelector('.bars').querySelectorAll('i')].map((each) => each.offsetWidth)")
    room = page.evaluate("document.querySelector('.bars div').offsetWidth")
    assert max(widths) == pytest.approx(room - 96, abs=1)
    assert [width / max(widths) for width in widths] == pytest.approx([0.321 / 0.978, 1, 0.353 / 0.978], abs=0.01)


def test_plots_have_the_colours_of_the_page(page: Page) -> None:
    found = page.evaluate(SCHEME)
    assert found["page"] == found["paper"]
    assert found["labels"] == [found["ink"]]


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
        assert page.evaluate(SCHEME)["labels"] == [page.evaluate(SCHEME)["ink"]]
        assert overflow(page) <= 0
        assert page.pdf(format="A4").startswith(b"%PDF")


# Interaction


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


def test_links_have_targets(page: Page) -> None:
    lost = page.evaluate(
        "[...document.querySelectorAll('a')].filter((a) => !document.getElementById(a.hash.slice(1))).length"
    )
    assert lost == 0


# Accessibility


def test_page_has_a_language_a_title_and_headings_in_order(page: Page) -> None:
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.title() == "Stable Diffusion 1.5 on NVIDIA H200"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map((each) => Number(each.localName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_elements_have_accessible_names(page: Page) -> None:
    nameless = page.evaluate(
        """() => [
          ...[...document.querySelectorAll("img")].filter((each) => !each.alt.trim()),
          ...[...document.querySelectorAll("table")].filter((each) => !each.caption?.textContent.trim()),
          ...[...document.querySelectorAll("[role=region], [tabindex], nav")].filter(
            (each) => !each.getAttribute("aria-label")),
          ...[...document.querySelectorAll("[role=img]")].filter((each) => !each.getAttribute("aria-labelledby")
            .split(" ").every((id) => document.getElementById(id)?.textContent.trim())),
          ...[...document.querySelectorAll("th")].filter((each) => !each.scope || !each.textContent.trim()),
        ].map((each) => each.outerHTML.slice(0, 200))"""
    )
    assert nameless == []
    ids = page.evaluate("[...document.querySelectorAll('main [id], header [id]')].map((each) => each.id)")
    assert len(set(ids)) == len(ids)


# Escaping


HOSTILE = "<b>bold</b> &lt;i&gt; %{x} </script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"


def rename(measured: Any, old: str, new: str) -> None:
    for some in (measured.results, measured.throughput, measured.resolutions, measured.kernels):
        for index, each in enumerate(some):
            if each.rival == old:
                object.__setattr__(each, "rival", new)
                some[index] = each


@pytest.mark.parametrize("name", weekly([HOSTILE, "@ink", "7", "x" * 200, "名前 ☃ \u202eesrever"], HOSTILE))
def test_names_are_escaped(browser: Browser, tmp_path: Path, name: str) -> None:
    measured = comparison()
    rename(measured, TITLES[EAGER], name)
    measured.command = name
    path = tmp_path / "report.html"
    write_report(measured, path)
    errors: list[str] = []
    with contextlib.closing(offline(browser, *PHONE, dark=False)) as context:
        context.on("weberror", lambda error: errors.append(str(error.error)))
        page = opened(context, path)
        page.wait_for_timeout(100)
        assert page.evaluate("window.pwned") is None
        label = page.locator(".bars").first.locator("strong").nth(1).text_content() or ""
        assert "".join(label.split())[:10] == "".join(name.split())[:10]
        assert page.locator(".bars a, .bars b, .bars img").count() == 0
        assert find_cut(page) == []
        heading = page.locator("#numbers thead .name").nth(1)
        assert (heading.text_content() or "").strip() == name
        assert overflow(page) <= 0
    assert errors == []
