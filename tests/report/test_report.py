"""What the page says, that nothing from outside can change what it is, and that it is written whole or not at all."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import os
import re
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects
import pytest
from comparison import (
    COMMAND,
    COMPILED,
    EAGER,
    FAILURE,
    FOUR,
    MB,
    ONE,
    OURS,
    PALE_REASON,
    PLAIN,
    comparison,
    drawn,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from markup import Markup
from PIL import Image

from sdonnx.benchmark.report import refuse_report, write_report
from sdonnx.benchmark.report.images import difference, factor_for
from sdonnx.benchmark.report.tables import aligned, decimals_for, number, percent, ratio
from sdonnx.benchmark.results import (
    REFERENCE,
    Agreement,
    Comparison,
    Kernels,
    Result,
    Round,
    Stages,
    Throughput,
    Workload,
)
from sdonnx.benchmark.statistics import fit_line
from sdonnx.errors import OutputError

DASH = "\N{EN DASH}"


def page_of(what: Comparison, path: Path) -> Markup:
    write_report(what, path)
    return Markup(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Markup:
    return page_of(comparison(), tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the five megabytes that are always the same."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")


def result(rival: str, latencies: tuple[float, ...], workload: Workload = ONE, **others: Any) -> Result:
    peak = (1000 * MB, *[2000 * MB] * len(latencies))
    return Result(rival, workload, rounds=[Round(2.5, (3.25,), latencies, peak, "NVML")], **others)


def made(*results: Result, **others: Any) -> Comparison:
    return Comparison(COMMAND, {}, list(results), **others)


# The headline


def ranking(page: Markup, index: int = 0) -> dict[str, list[str]]:
    return [table for table in page.tables if table.caption.startswith("Median latency")][index].rows


def test_headline_says_who_was_fastest_and_by_how_much(tmp_path: Path) -> None:
    found = page_of(
        made(
            result("onnxruntime", (0.2, 0.2, 0.2)),
            result("torch", (0.5, 0.5, 0.5)),
            result("other", (0.1, 0.1, 0.1)),
        ),
        tmp_path / "report.html",
    )
    assert "512x512, batch 1, 50 steps other 100.0 ms" in found.text
    assert ranking(found) == {
        "onnxruntime": ["200.0 ms", "1.00\N{MULTIPLICATION SIGN}"],
        "torch": ["500.0 ms", "2.50\N{MULTIPLICATION SIGN}"],
        "other": ["100.0 ms", "0.50\N{MULTIPLICATION SIGN}"],
    }
    assert "3 runs in 1 round for each engine" in found.text
    assert "Too close" not in found.text


def test_headline_compares_with_nothing_where_the_first_engine_failed(tmp_path: Path) -> None:
    first = Result("onnxruntime", ONE, failure="no such folder")
    found = page_of(made(first, result("torch", (0.5,))), tmp_path / "report.html")
    assert ranking(found) == {"torch": ["500.0 ms"]}
    assert "Left out: onnxruntime (failed)" in found.text
    assert "the ratio is" not in found.text


def test_headline_does_not_call_a_draw_a_win(tmp_path: Path) -> None:
    ours, theirs = tuple(np.linspace(1.0, 1.2, 9)), tuple(np.linspace(1.05, 1.25, 9))
    found = page_of(made(result("onnxruntime", ours), result("torch", theirs)), tmp_path / "report.html")
    assert "Too close to call: the runs of torch overlap with these." in found.text


def test_headline_counts_rounds_that_are_missing(tmp_path: Path) -> None:
    three = result("onnxruntime", (0.2, 0.2))
    three.rounds *= 3
    found = page_of(made(three, result("torch", (0.5, 0.5))), tmp_path / "report.html")
    assert "2 to 6 runs in 1 to 3 rounds for each engine" in found.text


def test_what_must_not_be_trusted_wins_nothing(page: Markup) -> None:
    for index in (0, 1):
        assert ranking(page, index).keys() == {OURS, EAGER, COMPILED}
    assert f"Left out: {PLAIN} (not to be trusted)." in page.text
    assert f"Left out: {PLAIN} (failed)." in page.text


# The numbers


def test_times_of_known_runs(tmp_path: Path) -> None:
    """0.100, 0.101 ... 0.200: percentiles of 101 equally spaced numbers need no formula."""
    latencies = tuple(np.linspace(0.1, 0.2, 101)[::-1])
    row = result("torch", latencies, stages=Stages(2.0, 2.5, 12.0, 400.0, 50))
    table = page_of(made(row), tmp_path / "report.html").table("times")
    assert dict(zip(table.head[1:], _only(table.rows), strict=True)) == {
        "median": "150.0",
        "average": "150.0",
        "min": "100.0",
        "p90": "190.0",
        "p99": "199.0",
        "spread": "53.3 %",
        "it/s": "400",
        "text": "2.00",
        "step": "2.50",
        "decode": "12.0",
        "load": "2.50",
        "first image": "5.75",
        "warm-up": "3.25",
    }


def _only(rows: dict[str, list[str]]) -> list[str]:
    (cells,) = rows.values()
    return cells


def test_memory_agreement_and_work_of_a_known_row(tmp_path: Path) -> None:
    row = result(
        "torch",
        (0.5,),
        stages=Stages(2.0, 10.0, 12.0, 100.0, 50),
        agreement=Agreement(47.25, 0.99876, 0.25, None),
        flops=0.8e12,
        matrix_rate=800e12,
    )
    table = page_of(made(row), tmp_path / "report.html").table("memory, agreement and work")
    assert dict(zip(table.head[1:], _only(table.rows), strict=True)) == {
        "first run": "1,000",
        "second run": "2,000",
        "allocator": DASH,
        "host": DASH,
        "PSNR, dB": "47.2",
        "SSIM": "0.9988",
        "LPIPS": DASH,
        "other values": "25.0 %",
        "TFLOP a call": "0.800",
        "of matrix rate": "10.0 %",
    }


def test_rows_say_what_a_reader_must_know(page: Markup) -> None:
    one, four = (table for table in page.tables if table.caption.endswith("times"))
    names = [" ".join(name.split()) for name in one.rows]
    assert names == [OURS, f"{EAGER} spread of 14%", COMPILED, f"{PLAIN} not to be trusted"]
    failed = next(cells for name, cells in four.rows.items() if name.startswith(PLAIN))
    assert set(failed) == {DASH}
    assert f"{PLAIN} not to be trusted: {PALE_REASON}" in page.text
    assert f"{PLAIN} failed: {FAILURE}" in page.text


def test_same_pixels_are_said_in_words(page: Markup) -> None:
    table = next(table for table in page.tables if table.caption.endswith("memory, agreement and work"))
    assert table.rows[COMPILED][table.head.index("PSNR, dB") - 1] == "same pixels"


def test_one_run_has_no_spread(tmp_path: Path) -> None:
    table = page_of(made(result("torch", (0.5,))), tmp_path / "report.html").table("times")
    assert table.rows["torch"][table.head.index("spread") - 1] == DASH


@pytest.mark.parametrize(
    ("latency", "unit", "shown"),
    [
        (0.00345, "ms", "3.450"),
        (0.3311, "ms", "331.1"),
        (0.99999, "ms", "1,000.0"),
        (1.0, "s", "1.000"),
        (75, "s", "75.00"),
    ],
)
def test_latencies_have_a_unit_that_suits_them(tmp_path: Path, latency: float, unit: str, shown: str) -> None:
    found = page_of(made(result("torch", (latency,))), tmp_path / "report.html")
    assert found.table("times").rows["torch"][0] == shown
    assert f"latency, {unit}" in found.text


def test_numbers_are_written_with_the_digits_that_they_need() -> None:
    assert [number(value, 1) for value in (1234.56, -0.04, None, math.nan, math.inf)] == [
        "1,234.6",
        "0.0",
        DASH,
        DASH,
        DASH,
    ]
    assert [decimals_for([value]) for value in (12345, 331.1, 20.31, 3.45, 0.001, 0, None)] == [0, 1, 2, 3, 3, 0, 0]
    assert aligned(3, 2)([0.5, None, 120.0]) == ["0.50", DASH, "120.00"]
    assert percent([0.1666, None]) == ["16.7 %", DASH]
    assert [ratio(value) for value in (0.984, 1.0, 2.849, 12.34, 123.4)] == ["0.98", "1.00", "2.85", "12.3", "123"]


# The plots


def bars_and_dots(page: Markup) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    traces = page.figures[0]["data"]
    return traces[0], [trace for trace in traces[1:] if trace["mode"] == "markers"]


def test_plotly_knows_every_attribute_of_every_figure(page: Markup) -> None:
    assert len(page.figures) == 12
    # What follows the page's scheme is no colour yet.
    figures = json.loads(re.sub('"@(ink|paper)"', '"#000000"', json.dumps(page.figures)))
    for figure in figures:
        plotly.graph_objects.Figure(figure)


def test_latency_bars_show_every_run_that_can_be_trusted(page: Markup) -> None:
    rows = [row for row in comparison().results if row.workload == ONE and not row.failure]
    bar, dots = bars_and_dots(page)
    assert page.figures[0]["layout"]["yaxis"]["ticktext"] == [OURS, EAGER, "torch compile<br>reduce-overhead"]
    for index, row in enumerate(rows):
        runs = [latency * 1e3 for each in row.rounds for latency in each.latencies_s]
        assert dots[index]["x"] == pytest.approx(runs)
        assert len(set(dots[index]["y"])) == len(row.rounds)
        low, median, high = np.percentile(runs, [10, 50, 90])
        assert bar["x"][index] == pytest.approx(median)
        assert bar["error_x"]["array"][index] == pytest.approx(high - median)
        assert bar["error_x"]["arrayminus"][index] == pytest.approx(median - low)


def test_first_image_is_loading_and_the_first_run(page: Markup) -> None:
    load, run = (trace for trace in page.figures[2]["data"] if trace["type"] == "bar")
    assert load["x"] == pytest.approx([1.28, 8.72, 8.93])
    assert run["base"] == load["x"]
    assert run["x"] == pytest.approx([4.84, 4.83, 41.2])


def test_stages_add_up_to_the_median(page: Markup) -> None:
    rows = [row for row in comparison().results if row.workload == ONE and not row.failure]
    parts = [trace for trace in page.figures[4]["data"] if trace["type"] == "bar"]
    for index, row in enumerate(rows):
        assert row.stages is not None
        text, steps, decode, rest = (part["x"][index] for part in parts)
        assert (text, decode) == (2.1, 7.4)
        assert steps == pytest.approx(51 * row.stages.step_ms)
        runs = [latency * 1e3 for each in row.rounds for latency in each.latencies_s]
        assert text + steps + decode + rest == pytest.approx(np.median(runs))


def test_images_a_second_by_batch(page: Markup) -> None:
    table = page.table("512x512, 50 steps: images per second by batch")
    assert table.head == ["engine", "1", "4"]
    medians = {
        (row.rival, row.workload): np.median([latency for each in row.rounds for latency in each.latencies_s])
        for row in comparison().results
        if not row.failure
    }
    for rival in (OURS, EAGER, COMPILED):
        shown = [float(cell) for cell in table.rows[rival]]
        assert shown == pytest.approx([1 / medians[rival, ONE], 4 / medians[rival, FOUR]], abs=0.006)


def test_latency_by_size(tmp_path: Path) -> None:
    sizes = ((512, 512), (512, 768), (768, 512), (1024, 1024))
    rows = [
        result("torch", (0.1 * index,), Workload(height=height, width=width))
        for index, (height, width) in enumerate(sizes, 1)
    ]
    found = page_of(made(*rows), tmp_path / "report.html")
    table = found.table("batch 1, 50 steps: latency, seconds by size")
    assert table.head == ["engine", "512x512", "512x768, 768x512", "1024x1024"]
    axis = found.figures[-1]["layout"]["xaxis"]
    assert axis["tickvals"] == [512 * 512, 512 * 768, 1024 * 1024]


def test_line_through_steps_has_its_formula(page: Markup) -> None:
    assert f"{OURS}: 6.200 ms \N{MULTIPLICATION SIGN} steps + 11.0 ms (R² 1.0000)" in page.text
    assert f"{COMPILED}: 6.800 ms \N{MULTIPLICATION SIGN} steps \N{MINUS SIGN} 2.0 ms (R² 1.0000)" in page.text
    table = page.table("latency against steps")
    assert table.rows[OURS] == ["0.073", "0.135", "0.197", "0.321", "6.200", "11.0", "1.0000"]


def test_stalls_at_new_sizes(page: Markup) -> None:
    table = page.table("First and second image of each size, s")
    assert len(table.head) == 1 + 3 * 4
    assert table.rows["768x768"] == [
        *("1.200", "0.710", "0.710", "0.490"),
        *("1.750", "1.610", "1.610", "0.140"),
        *("25.100", "0.790", "0.790", "24.310"),
    ]


def test_kernels_by_kind(page: Markup) -> None:
    table = page.table("device time by kind of operator, ms")
    assert table.head == ["kind", OURS, EAGER, COMPILED]
    assert table.rows["convolution"] == ["91.2", "95.0", "92.8"]
    assert table.rows["copies"] == ["1.1", "31.0", DASH]
    assert table.rows["total"] == ["312.5", "936.7", "331.4"]
    assert table.rows["launches"] == ["38,454", "71,900", "32,946"]
    assert list(table.rows)[-3:] == ["idle", "total", "launches"]


def test_an_engine_has_one_colour_everywhere(page: Markup) -> None:
    latency, batch, steps = page.figures[0]["data"], page.figures[8]["data"], page.figures[9]["data"]
    colours = latency[0]["marker"]["line"]["color"]
    assert len(set(colours)) == 3
    assert [trace["marker"]["color"] for trace in latency[1:4]] == colours
    assert [trace["line"]["color"] for trace in batch] == colours
    assert [trace["line"]["color"] for trace in steps[::2]] == colours


def test_numbers_that_are_none_become_no_invalid_json(tmp_path: Path) -> None:
    rows = (result("onnxruntime", (0.2,)), result("torch", (math.inf, 0.3, math.nan)))
    found = page_of(made(*rows), tmp_path / "report.html")
    assert found.figures


# The images


def test_pictures_lose_nothing(tmp_path: Path) -> None:
    write_report(comparison(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    pictures = [base64.b64decode(each) for each in re.findall(r'src="data:image/webp;base64,([^"]+)"', text)]
    first, ours, far = (np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in pictures[:3])
    assert np.array_equal(first, drawn())
    assert np.array_equal(np.abs(ours.astype(int) - drawn()) * 64, far)


def test_pictures_that_hardly_shrink_do_not_make_the_page_heavy(tmp_path: Path) -> None:
    large = Workload(height=512, width=512)
    noise = np.random.default_rng(0).integers(0, 256, (2, 512, 512, 3), dtype=np.uint8)
    images = {(name, large): Image.fromarray(each) for name, each in zip((REFERENCE, "torch"), noise, strict=True)}
    write_report(made(images=images), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    pictures = [base64.b64decode(each) for each in re.findall(r'src="data:image/webp;base64,([^"]+)"', text)]
    assert len(pictures) == 3
    assert all(len(each) < 300_000 for each in pictures)
    shown = np.asarray(Image.open(io.BytesIO(pictures[0])).convert("RGB"))
    assert np.corrcoef(shown.ravel(), noise[0].ravel())[0, 1] > 0.5


def test_difference_is_amplified_and_cut_off_at_white() -> None:
    reference = Image.new("RGB", (2, 1), (100, 100, 100))
    image = Image.new("RGB", (2, 1), (101, 98, 100))
    image.putpixel((1, 0), (160, 100, 0))
    assert np.asarray(difference(image, reference, 8)).tolist() == [[[8, 16, 0], [255, 0, 255]]]


@pytest.mark.parametrize(("off", "factor"), [(0, 8), (1, 64), (3, 64), (4, 32), (7, 32), (15, 16), (17, 8)])
def test_amplification_suits_the_pictures_that_are_alike(off: int, factor: int) -> None:
    reference = Image.fromarray(drawn())
    near = np.minimum(drawn(), 200)
    base = Image.fromarray(near)
    near[:, ::7] += off  # so few that the pictures are still alike
    assert factor_for(base, [Image.fromarray(near), Image.fromarray(255 - drawn())]) == factor
    assert factor_for(None, [reference]) == 8


def test_large_pictures_are_compared_before_they_are_made_smaller(tmp_path: Path) -> None:
    wide = Workload(height=32, width=2048)
    images = {
        (REFERENCE, wide): Image.new("RGB", (2048, 32)),
        ("torch", wide): Image.new("RGB", (2048, 32), (0, 0, 255)),
        ("other", wide): Image.new("RGB", (64, 32)),
    }
    found = page_of(made(images=images), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r'<img[^>]* width="(\d+)"', text)) == {"512", "64"}
    assert "PSNR 4.8 dB" in found.text  # 10 log10 3
    assert f"another size than {REFERENCE}" in found.text


def test_pictures_without_a_reference_are_shown(tmp_path: Path) -> None:
    found = page_of(made(images={("torch", ONE): Image.new("L", (8, 8))}), tmp_path / "report.html")
    assert "no reference" in found.text
    assert "amplified." not in found.text


# The machine and how to repeat it


def test_machine_is_described(page: Markup) -> None:
    for expected in (
        "GPU NVIDIA H200",
        "GPU memory 140.4 GiB",
        "driver 580.159.04",
        "clocks seen 1755 to 1980 MHz",
        "processors to use 16",
        "commit of sdonnx bfe3f1a0c0ffee00bfe3f1a0c0ffee00bfe3f1a0 ",
        "onnxruntime 1.31.1",
        COMMAND,
    ):
        assert expected in page.text
    assert "xformers" not in page.text
    assert page.table("What each engine is").rows[COMPILED][4] == "reduce-overhead"


def test_changed_files_are_not_passed_over(tmp_path: Path) -> None:
    what = Comparison(COMMAND, {"git": {"commit": "abc", "changed": True}})
    assert "commit of sdonnx abc, with changed files" in page_of(what, tmp_path / "report.html").text


def test_processor_is_named_where_no_engine_used_the_gpu(tmp_path: Path) -> None:
    what = comparison()
    for row in what.results:
        row.engine = {**row.engine, "device": "cpu"}
    assert "4 engines on Intel(R) Xeon(R) Processor" in page_of(what, tmp_path / "report.html").text


# What is missing


@pytest.mark.parametrize(
    "kept", ["nothing", "results", "throughput", "resolutions", "kernels", "images", "environment"]
)
def test_what_was_not_measured_is_left_out(tmp_path: Path, kept: str) -> None:
    whole = comparison()
    what = Comparison(COMMAND, {})
    if kept != "nothing":
        setattr(what, kept, getattr(whole, kept))
    found = page_of(what, tmp_path / "report.html")
    plotted = ["Plots"] if kept in ("results", "throughput", "resolutions", "kernels") else []
    results = ["Fastest", "Numbers"] if kept == "results" else []
    images = ["Images"] if kept == "images" else []
    assert found.headings == [*results, *plotted, *images, "Machine", "Repeat it"]
    assert bool(found.figures) == bool(plotted)
    assert COMMAND in found.text
    assert ("plotly" in (tmp_path / "report.html").read_text(encoding="utf-8")) == bool(found.figures)


def test_a_comparison_in_which_all_failed(tmp_path: Path) -> None:
    rows = [Result(name, ONE, failure=f"{name} is not installed") for name in (OURS, EAGER)]
    found = page_of(made(*rows), tmp_path / "report.html")
    assert "torch failed: torch is not installed" in found.text
    assert not found.figures


# What comes from outside


HOSTILE = [
    "</script><script>window.pwned = 1</script>",
    "<!--<script>",
    "\"><img src=x onerror='window.pwned = 1'>",
    "' onmouseover='window.pwned = 1",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt; &amp; &#60;",
    "<b>bold</b> <a href='https://example.com'>link</a>",
    "%{x} $x^2$ @ink",
    "]]>\u2028\u2029\x00\x0b\u202e",
    "]" * 300,
    "  ",
    "\udcff\ud800",
    "constructor __proto__",
]


def hostile(text: str) -> Comparison:
    """A comparison in which every text is this one."""
    workload = Workload(negative_prompt=text, image=text, scheduler=text)
    points = ((10, 1.0), (20, 2.0))
    first = result(text, (0.2, 0.3), workload, engine={"name": text, "device": "cuda", text: text})
    return Comparison(
        text,
        {
            "packages": {text: text},
            "git": {"commit": text, "changed": True},
            "machine": {"cpu": text, "system": text, "cpus": 1, "gpu": {"name": text, "driver": text}},
        },
        [first, Result(text + "!", workload, failure=text)],
        throughput=[Throughput(text, workload, points, fit_line(points))],
        kernels=[Kernels(text, workload, {text + "kind": 1.0, "idle": 1.0}, 1, text)],
        images={(text, workload): Image.new("RGB", (4, 4)), (REFERENCE, workload): Image.new("RGB", (4, 4))},
    )


def assert_harmless(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        write_report(hostile(text), path)
        found = Markup(path.read_bytes().decode("utf-8"))
        write_report(hostile(re.sub("[^ ]+", "x", text)), path)
        plain = Markup(path.read_bytes().decode("utf-8"))
    assert found.shape == plain.shape
    assert [link for link in found.links if not link.startswith(("#", "data:"))] == []
    shown = text.encode("utf-8", "backslashreplace").decode()
    assert shown in "".join(found.texts)
    assert len(found.figures) == len(plain.figures)
    for figure in found.figures:
        for tick in figure["layout"]["yaxis"].get("ticktext", []):
            assert set(re.findall("<[^>]*>?", tick)) <= {"<br>"}


@pytest.mark.usefixtures("without_plotly")
@pytest.mark.parametrize("text", HOSTILE)
def test_known_tricks_change_nothing_but_text(text: str) -> None:
    assert_harmless(text)


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=40) | st.text("<>/!-&;\"'{}%scriptb= \n\r", min_size=1, max_size=40))
def test_texts_from_outside_change_nothing_but_text(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "")
        assert_harmless(text)


def test_page_loads_nothing(page: Markup) -> None:
    assert [link for link in page.links if not link.startswith(("#", "data:"))] == []
    assert [tag for tag, _ in page.shape if tag in ("iframe", "object", "embed", "form", "base")] == []


# Writing


def test_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("the old one", encoding="utf-8")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))  # the page has more
    try:
        with pytest.raises(OutputError, match=r"writing .*report\.html failed \(File too large\)"):
            write_report(comparison(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text(encoding="utf-8") == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_interruption_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("the old one", encoding="utf-8")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_report(made(), path)
    assert path.read_text(encoding="utf-8") == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_page_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(made(), path)
    write_report(made(result("torch", (0.5,))), path)
    assert "torch" in Markup(path.read_text(encoding="utf-8")).text
    assert list(tmp_path.iterdir()) == [path]


def test_page_can_be_read_by_whom_any_new_file_can(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_report(made(), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    link = tmp_path / "report.html"
    link.symlink_to(Path("pages", "real.html"))
    write_report(made(), link)
    assert link.is_symlink()
    assert (tmp_path / "pages" / "real.html").stat().st_size > 1000


@pytest.fixture(params=["missing folder", "file as folder", "folder", "unwritable", "too long"])
def unusable(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "file").touch()
    return {
        "missing folder": (tmp_path / "no" / "report.html", "is no folder"),
        "file as folder": (tmp_path / "file" / "report.html", "is no folder"),
        "folder": (tmp_path, "is no file"),
        # Nobody can make files there, not even root.
        "unwritable": (Path("/proc/report.html"), "writing /proc/report.html failed"),
        "too long": (tmp_path / ("x" * 300), "File name too long"),
    }[request.param]


def test_unusable_outputs_are_refused_before_anything_is_measured(unusable: tuple[Path, str]) -> None:
    path, reason = unusable
    with pytest.raises(OutputError, match=re.escape(reason)):
        refuse_report(path)
    with pytest.raises(OutputError, match=re.escape(reason)):
        write_report(made(), path)


def test_looking_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    refuse_report(path)
    assert os.listdir(tmp_path) == []
    path.write_text("the old one", encoding="utf-8")
    refuse_report(path)
    assert path.read_text(encoding="utf-8") == "the old one"
    assert os.listdir(tmp_path) == ["report.html"]


def test_many_engines_and_workloads(tmp_path: Path) -> None:
    """More engines than colours, each workload with each."""
    sizes = [dataclasses.replace(ONE, batch_size=batch, height=height) for batch in (1, 4, 8) for height in (512, 768)]
    rows = [result(f"engine {index}", (0.1 * index,), size) for size in sizes for index in range(1, 13)]
    found = page_of(made(*rows), tmp_path / "report.html")
    assert len(found.figures) == 3 * 6 + 2 + 3
    batch = found.figures[-4]["data"]
    looks = {(trace["marker"]["color"], trace["marker"]["symbol"]) for trace in batch}
    assert len(looks) == 12
