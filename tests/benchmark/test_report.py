"""The report's content, escaping of external text, and atomic writing."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.comparison import (
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
    sample_image,
)
from support.markup import Markup

from sdonnx.benchmark.extra_results import Kernels, Throughput
from sdonnx.benchmark.report import check_report, write_report
from sdonnx.benchmark.report.html_tables import aligned, decimals_for, number, percent, ratio
from sdonnx.benchmark.report.image_comparison import difference, factor_for
from sdonnx.benchmark.results import REFERENCE, Agreement, Comparison, Result, Round, Stages
from sdonnx.benchmark.statistics import fit_line
from sdonnx.benchmark.workload import Workload
from sdonnx.errors import OutputError

DASH = "\N{EN DASH}"


def write_page(measured: Comparison, path: Path) -> Markup:
    write_report(measured, path)
    return Markup(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Markup:
    return write_page(comparison(), tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omit plotly's script, which takes five megabytes."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")


def result(rival: str, latencies: tuple[float, ...], workload: Workload = ONE, **others: Any) -> Result:
    peak = (1000 * MB, *[2000 * MB] * len(latencies))
    return Result(rival, workload, rounds=[Round(2.5, (3.25,), latencies, peak, "NVML")], **others)


def made(*results: Result, **others: Any) -> Comparison:
    return Comparison(COMMAND, {}, list(results), **others)


# The headline


def ranking(page: Markup, index: int = 0) -> dict[str, list[str]]:
    return [table for table in page.tables if table.caption.startswith("Median latency")][index].rows


def test_headline_shows_the_fastest_engine_and_ratios(tmp_path: Path) -> None:
    found = write_page(
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


def test_headline_has_no_ratios_if_the_first_engine_failed(tmp_path: Path) -> None:
    first = Result("onnxruntime", ONE, failure="no such folder")
    found = write_page(made(first, result("torch", (0.5,))), tmp_path / "report.html")
    assert ranking(found) == {"torch": ["500.0 ms"]}
    assert "Omitted: onnxruntime (failed)" in found.text
    assert "the ratio is" not in found.text


def test_headline_reports_overlapping_runs(tmp_path: Path) -> None:
    ours, theirs = tuple(np.linspace(1.0, 1.2, 9)), tuple(np.linspace(1.05, 1.25, 9))
    found = write_page(made(result("onnxruntime", ours), result("torch", theirs)), tmp_path / "report.html")
    assert "Too close to call: the runs of torch overlap with these." in found.text


def test_headline_shows_the_range_of_rounds(tmp_path: Path) -> None:
    three = result("onnxruntime", (0.2, 0.2))
    three.rounds *= 3
    found = write_page(made(three, result("torch", (0.5, 0.5))), tmp_path / "report.html")
    assert "2 to 6 runs in 1 to 3 rounds for each engine" in found.text


def test_headline_omits_untrusted_results(page: Markup) -> None:
    for index in (0, 1):
        assert ranking(page, index).keys() == {OURS, EAGER, COMPILED}
    assert f"Omitted: {PLAIN} (untrusted)." in page.text
    assert f"Omitted: {PLAIN} (failed)." in page.text


# The numbers


def test_times_of_known_runs(tmp_path: Path) -> None:
    """The runs take 0.100, 0.101 ... 0.200 s: 101 equally spaced values, whose percentiles are obvious."""
    latencies = tuple(np.linspace(0.1, 0.2, 101)[::-1])
    row = result("torch", latencies, stages=Stages(2.0, 2.5, 12.0, 400.0, 50))
    table = write_page(made(row), tmp_path / "report.html").table("times")
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
    table = write_page(made(row), tmp_path / "report.html").table("memory, agreement and work")
    assert dict(zip(table.head[1:], _only(table.rows), strict=True)) == {
        "first run": "1,000",
        "second run": "2,000",
        "allocator": DASH,
        "host": DASH,
        "PSNR, dB": "47.2",
        "SSIM": "0.9988",
        "LPIPS": DASH,
        "differing values": "25.0 %",
        "TFLOP per call": "0.800",
        "share of matrix rate": "10.0 %",
    }


def test_rows_show_remarks_and_failures(page: Markup) -> None:
    one, four = (table for table in page.tables if table.caption.endswith("times"))
    names = [" ".join(name.split()) for name in one.rows]
    assert names == [OURS, f"{EAGER} spread of 14%", COMPILED, f"{PLAIN} untrusted"]
    failed = next(cells for name, cells in four.rows.items() if name.startswith(PLAIN))
    assert set(failed) == {DASH}
    assert f"{PLAIN} untrusted: {PALE_REASON}" in page.text
    assert f"{PLAIN} failed: {FAILURE}" in page.text


def test_psnr_of_identical_images(page: Markup) -> None:
    table = next(table for table in page.tables if table.caption.endswith("memory, agreement and work"))
    assert table.rows[COMPILED][table.head.index("PSNR, dB") - 1] == "identical"


def test_spread_of_one_run_is_undefined(tmp_path: Path) -> None:
    table = write_page(made(result("torch", (0.5,))), tmp_path / "report.html").table("times")
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
def test_unit_of_latencies(tmp_path: Path, latency: float, unit: str, shown: str) -> None:
    found = write_page(made(result("torch", (latency,))), tmp_path / "report.html")
    assert found.table("times").rows["torch"][0] == shown
    assert f"latency, {unit}" in found.text


def test_number_formats() -> None:
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


def test_plotly_accepts_every_figure(page: Markup) -> None:
    assert len(page.figures) == 12
    # The page's script replaces these names by colours.
    figures = json.loads(re.sub('"@(ink|paper)"', '"#000000"', json.dumps(page.figures)))
    for figure in figures:
        plotly.graph_objects.Figure(figure)


def test_latency_bars_show_every_trusted_run(page: Markup) -> None:
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


def test_images_per_second_by_batch(page: Markup) -> None:
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
    found = write_page(made(*rows), tmp_path / "report.html")
    table = found.table("batch 1, 50 steps: latency, seconds by image size")
    assert table.head == ["engine", "512x512", "512x768, 768x512", "1024x1024"]
    axis = found.figures[-1]["layout"]["xaxis"]
    assert axis["tickvals"] == [512 * 512, 512 * 768, 1024 * 1024]


def test_formula_of_the_fitted_line(page: Markup) -> None:
    assert f"{OURS}: 6.200 ms \N{MULTIPLICATION SIGN} steps + 11.0 ms (R² 1.0000)" in page.text
    assert f"{COMPILED}: 6.800 ms \N{MULTIPLICATION SIGN} steps \N{MINUS SIGN} 2.0 ms (R² 1.0000)" in page.text
    table = page.table("latency by steps")
    assert table.rows[OURS] == ["0.073", "0.135", "0.197", "0.321", "6.200", "11.0", "1.0000"]


def test_stalls_after_size_changes(page: Markup) -> None:
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


def test_figures_with_nan_are_valid_json(tmp_path: Path) -> None:
    rows = (result("onnxruntime", (0.2,)), result("torch", (math.inf, 0.3, math.nan)))
    found = write_page(made(*rows), tmp_path / "report.html")
    assert found.figures


# The images


def test_small_images_are_lossless(tmp_path: Path) -> None:
    write_report(comparison(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    pictures = [base64.b64decode(each) for each in re.findall(r'src="data:image/webp;base64,([^"]+)"', text)]
    first, ours, far = (np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in pictures[:3])
    assert np.array_equal(first, sample_image())
    assert np.array_equal(np.abs(ours.astype(int) - sample_image()) * 64, far)


def test_noisy_images_are_compressed_with_loss(tmp_path: Path) -> None:
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


def test_difference_is_amplified_and_clipped() -> None:
    reference = Image.new("RGB", (2, 1), (100, 100, 100))
    image = Image.new("RGB", (2, 1), (101, 98, 100))
    image.putpixel((1, 0), (160, 100, 0))
    assert np.asarray(difference(image, reference, 8)).tolist() == [[[8, 16, 0], [255, 0, 255]]]


@pytest.mark.parametrize(("off", "factor"), [(0, 8), (1, 64), (3, 64), (4, 32), (7, 32), (15, 16), (17, 8)])
def test_amplification_depends_on_similar_images(off: int, factor: int) -> None:
    reference = Image.fromarray(sample_image())
    near = np.minimum(sample_image(), 200)
    base = Image.fromarray(near)
    near[:, ::7] += off  # few enough for the images to be similar
    assert factor_for(base, [Image.fromarray(near), Image.fromarray(255 - sample_image())]) == factor
    assert factor_for(None, [reference]) == 8


def test_large_images_are_compared_at_full_size(tmp_path: Path) -> None:
    wide = Workload(height=32, width=2048)
    images = {
        (REFERENCE, wide): Image.new("RGB", (2048, 32)),
        ("torch", wide): Image.new("RGB", (2048, 32), (0, 0, 255)),
        ("other", wide): Image.new("RGB", (64, 32)),
    }
    found = write_page(made(images=images), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r'<img[^>]* width="(\d+)"', text)) == {"512", "64"}
    assert "PSNR 4.8 dB" in found.text  # 10 log10 3
    assert f"size differs from {REFERENCE}" in found.text


def test_images_without_a_reference(tmp_path: Path) -> None:
    found = write_page(made(images={("torch", ONE): Image.new("L", (8, 8))}), tmp_path / "report.html")
    assert "no reference" in found.text
    assert "are amplified" not in found.text


# The machine


def test_machine_properties(page: Markup) -> None:
    for expected in (
        "GPU NVIDIA H200",
        "GPU memory 140.4 GiB",
        "driver 580.159.04",
        "GPU clocks 1755 to 1980 MHz",
        "available processors 16",
        "commit of sdonnx bfe3f1a0c0ffee00bfe3f1a0c0ffee00bfe3f1a0 ",
        "onnxruntime 1.31.1",
        COMMAND,
    ):
        assert expected in page.text
    assert "xformers" not in page.text
    assert page.table("Engines").rows[COMPILED][4] == "reduce-overhead"


def test_commit_with_changed_files(tmp_path: Path) -> None:
    measured = Comparison(COMMAND, {"git": {"commit": "abc", "changed": True}})
    assert "commit of sdonnx abc, with changed files" in write_page(measured, tmp_path / "report.html").text


def test_title_names_the_processor_without_a_gpu(tmp_path: Path) -> None:
    measured = comparison()
    for row in measured.results:
        row.engine = {**row.engine, "device": "cpu"}
    assert "4 engines on Intel(R) Xeon(R) Processor" in write_page(measured, tmp_path / "report.html").text


# Missing measurements


@pytest.mark.parametrize(
    "kept", ["nothing", "results", "throughput", "resolutions", "kernels", "images", "environment"]
)
def test_omits_sections_without_measurements(tmp_path: Path, kept: str) -> None:
    whole = comparison()
    partial = Comparison(COMMAND, {})
    if kept != "nothing":
        setattr(partial, kept, getattr(whole, kept))
    found = write_page(partial, tmp_path / "report.html")
    plotted = ["Plots"] if kept in ("results", "throughput", "resolutions", "kernels") else []
    results = ["Fastest", "Numbers"] if kept == "results" else []
    images = ["Images"] if kept == "images" else []
    assert found.headings == [*results, *plotted, *images, "Machine", "Reproduce"]
    assert bool(found.figures) == bool(plotted)
    assert COMMAND in found.text
    assert ("plotly" in (tmp_path / "report.html").read_text(encoding="utf-8")) == bool(found.figures)


def test_comparison_with_failures_only(tmp_path: Path) -> None:
    rows = [Result(name, ONE, failure=f"{name} is not installed") for name in (OURS, EAGER)]
    found = write_page(made(*rows), tmp_path / "report.html")
    assert "torch failed: torch is not installed" in found.text
    assert not found.figures


# Escaping


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
    """Return a comparison in which every text is the given one."""
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
def test_escapes_known_attacks(text: str) -> None:
    assert_harmless(text)


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=40) | st.text("<>/!-&;\"'{}%scriptb= \n\r", min_size=1, max_size=40))
def test_escapes_random_text(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "")
        assert_harmless(text)


def test_page_loads_no_resources(page: Markup) -> None:
    assert [link for link in page.links if not link.startswith(("#", "data:"))] == []
    assert [tag for tag, _ in page.shape if tag in ("iframe", "object", "embed", "form", "base")] == []


# Writing


def test_failed_write_keeps_the_old_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("the old one", encoding="utf-8")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))  # smaller than the page
    try:
        with pytest.raises(OutputError, match=r"writing .*report\.html failed \(File too large\)"):
            write_report(comparison(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text(encoding="utf-8") == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_interruption_keeps_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("the old one", encoding="utf-8")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_report(made(), path)
    assert path.read_text(encoding="utf-8") == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_replaces_an_older_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(made(), path)
    write_report(made(result("torch", (0.5,))), path)
    assert "torch" in Markup(path.read_text(encoding="utf-8")).text
    assert list(tmp_path.iterdir()) == [path]


def test_page_has_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_report(made(), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_writes_through_a_symbolic_link(tmp_path: Path) -> None:
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
        "missing folder": (tmp_path / "no" / "report.html", "is not a folder"),
        "file as folder": (tmp_path / "file" / "report.html", "is not a folder"),
        "folder": (tmp_path, "is not a file"),
        # Not even root can create files in /proc.
        "unwritable": (Path("/proc/report.html"), "writing /proc/report.html failed"),
        "too long": (tmp_path / ("x" * 300), "File name too long"),
    }[request.param]


def test_rejects_paths_that_are_not_writable(unusable: tuple[Path, str]) -> None:
    path, reason = unusable
    with pytest.raises(OutputError, match=re.escape(reason)):
        check_report(path)
    with pytest.raises(OutputError, match=re.escape(reason)):
        write_report(made(), path)


def test_check_report_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    check_report(path)
    assert os.listdir(tmp_path) == []
    path.write_text("the old one", encoding="utf-8")
    check_report(path)
    assert path.read_text(encoding="utf-8") == "the old one"
    assert os.listdir(tmp_path) == ["report.html"]


def test_many_engines_and_workloads(tmp_path: Path) -> None:
    """There are more engines than colours."""
    sizes = [dataclasses.replace(ONE, batch_size=batch, height=height) for batch in (1, 4, 8) for height in (512, 768)]
    rows = [result(f"engine {index}", (0.1 * index,), size) for size in sizes for index in range(1, 13)]
    found = write_page(made(*rows), tmp_path / "report.html")
    assert len(found.figures) == 3 * 6 + 2 + 3
    batch = found.figures[-4]["data"]
    looks = {(trace["marker"]["color"], trace["marker"]["symbol"]) for trace in batch}
    assert len(looks) == 12
