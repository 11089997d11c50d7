"""The report's content, and escaping of external text."""

from __future__ import annotations

import dataclasses
import html
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
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
    TITLES,
    comparison,
)
from support.markup import Markup

from sdonnx.benchmark.extra_results import Kernels, Throughput, fit_line
from sdonnx.benchmark.report.report_page import write_report
from sdonnx.benchmark.results import Agreement, Comparison, Result, Round, Stages, shown_name
from sdonnx.benchmark.rivals import NAMES, parse_rivals
from sdonnx.models.registry import model_name
from sdonnx.reference import REFERENCE
from sdonnx.reference.workload import Workload
from sdonnx.sample.shapes.shape_architectures import SHIPPED
from sdonnx.sample.write_sample import ARCHITECTURES

DASH = "\N{EN DASH}"


def write_page(measured: Comparison, path: Path) -> Markup:
    write_report(measured, path)
    return Markup(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Markup:
    return write_page(comparison(), tmp_path_factory.mktemp("page") / "report.html")


def result(rival: str, latencies: tuple[float, ...], workload: Workload = ONE, **others: Any) -> Result:
    peak = (1000 * MB, *[2000 * MB] * len(latencies))
    return Result(rival, workload, rounds=[Round(2.5, (3.25,), latencies, peak, "NVML")], **others)


def made(*results: Result, **others: Any) -> Comparison:
    return Comparison(COMMAND, {}, list(results), **others)


# The headline


def ranking(page: Markup, index: int = 0) -> dict[str, list[str]]:
    return [table for table in page.tables if table.caption.startswith("Median latency")][index].rows


def sentence(page: Path) -> str:
    found = re.search(r'<p class="result">(.*?)</p>', page.read_text(encoding="utf-8"))
    assert found is not None
    return html.unescape(found[1])


def test_headline_shows_the_engines_and_ratios(tmp_path: Path) -> None:
    found = write_page(
        made(
            result("onnxruntime", (0.2, 0.2, 0.2)),
            result("torch", (0.5, 0.5, 0.5)),
            result("other", (0.1, 0.1, 0.1)),
        ),
        tmp_path / "report.html",
    )
    assert ranking(found) == {
        "sdonnx": ["0.200 s", "1.00\N{MULTIPLICATION SIGN}"],
        "torch eager": ["0.500 s", "2.50\N{MULTIPLICATION SIGN}"],
        "other": ["0.100 s", "0.50\N{MULTIPLICATION SIGN}"],
    }
    assert "3 runs in 1 round for each engine" in found.text
    assert "oo close" not in found.text


@pytest.mark.parametrize(
    ("medians", "batch", "expected"),
    [
        (
            {"onnxruntime": 0.316, "torch-compile:reduce-overhead": 0.395, "torch": 1.433},
            1,
            "sdonnx generates an image in 0.316 s, 1.25 times as fast as torch.compile.",
        ),
        (
            {"optimum": 1.6, "onnxruntime": 0.8},
            4,
            "sdonnx generates 4 images in 0.800 s, 2.00 times as fast as optimum.",
        ),
        (
            {"onnxruntime": 0.03, "other": 0.06},
            1,
            "sdonnx generates an image in 30.00 ms, 2.00 times as fast as other.",
        ),
        ({"onnxruntime": 2, "other": 1}, 1, "other generates an image in 1.000 s, 2.00 times as fast as sdonnx."),
        ({"onnxruntime": 0.316}, 1, "sdonnx generates an image in 0.316 s."),
        ({"c": 0.9, "a": 0.3, "b": 0.6}, 1, "a generates an image in 0.300 s, 2.00 times as fast as b."),
        # The runs do not overlap, but the ratio would be shown as 1.00.
        (
            {"onnxruntime": 4.0, "torch": 4.01},
            1,
            "sdonnx and torch eager are too close to call: they generate an image in 4.000 s and 4.010 s.",
        ),
    ],
)
def test_result_in_one_sentence(medians: dict[str, float], batch: int, expected: str, tmp_path: Path) -> None:
    workload = dataclasses.replace(ONE, batch_size=batch)
    write_report(made(*(result(name, (each,) * 3, workload) for name, each in medians.items())), tmp_path / "a.html")
    assert sentence(tmp_path / "a.html") == expected


def test_no_winner_if_runs_overlap(tmp_path: Path) -> None:
    ours, theirs = tuple(np.linspace(1.0, 1.2, 9)), tuple(np.linspace(1.05, 1.25, 9))
    path = tmp_path / "report.html"
    write_report(made(result("onnxruntime", ours), result("torch", theirs)), path)
    assert sentence(path) == (
        "sdonnx and torch eager are too close to call: they generate an image in 1.100 s and 1.150 s."
    )
    assert 'class="fastest"' not in path.read_text(encoding="utf-8")


def test_names_all_engines_that_are_too_close(tmp_path: Path) -> None:
    overlapping = (result("optimum", (1.0, 1.2, 1.1)), result("torch", (1.05, 1.25, 1.15)))
    path = tmp_path / "report.html"
    found = write_page(made(result("onnxruntime", (3.0,)), *overlapping), path)
    assert sentence(path) == "optimum generates an image in 1.100 s, 2.73 times as fast as sdonnx."
    assert "Too close to call: the runs of optimum, torch eager overlap." in found.text


def test_headline_has_no_ratios_if_the_first_engine_failed(tmp_path: Path) -> None:
    first = Result("onnxruntime", ONE, failure="no such folder")
    found = write_page(made(first, result("torch", (0.5,))), tmp_path / "report.html")
    assert ranking(found) == {"torch eager": ["0.500 s"]}
    assert "Omitted: sdonnx (failed)" in found.text
    assert "the ratio is" not in found.text


def test_headline_omits_untrusted_results(page: Markup) -> None:
    for index in (0, 1):
        assert ranking(page, index).keys() == {OURS, EAGER, COMPILED}
    assert f"Omitted: {PLAIN} (untrusted)." in page.text
    assert f"Omitted: {PLAIN} (failed)." in page.text


def test_every_architecture_and_engine_has_a_name() -> None:
    names = {arch: model_name(arch, "family") for arch in ARCHITECTURES}
    assert {arch for arch, name in names.items() if "(family)" in name} == {
        arch for arch in ARCHITECTURES if "tiny" in arch or arch in SHIPPED
    }
    titles = {rival.title for name in NAMES for rival in parse_rivals([name])}
    assert {title for title in titles if shown_name(title) == title} == set()
    assert shown_name("torch-compile:max-autotune") == "torch.compile, max-autotune"


def test_one_workload_is_named_once(tmp_path: Path) -> None:
    measured = comparison()
    for name in ("results", "throughput", "resolutions", "kernels"):
        setattr(measured, name, [each for each in getattr(measured, name) if each.workload == ONE])
    measured.images = {key: image for key, image in measured.images.items() if key[1] == ONE}
    found = write_page(measured, tmp_path / "report.html")
    assert found.text.count("512x512, batch 1, 50 steps") == 1
    assert found.text.count("batch 1") == 1


# The numbers


def test_times_of_known_runs(tmp_path: Path) -> None:
    """The runs take 0.100, 0.101 ... 0.200 s: 101 equally spaced values with obvious percentiles."""
    latencies = tuple(np.linspace(0.1, 0.2, 101)[::-1])
    row = result("torch", latencies, stages=Stages(2.0, 2.5, 12.0, 400.0, 50), cached_start_s=1.25)
    assert write_page(made(row), tmp_path / "report.html").table("Times").column(EAGER) == {
        "median": "0.150",
        "average": "0.150",
        "min": "0.100",
        "p90": "0.190",
        "p99": "0.199",
        "spread": "53.3 %",
        "it/s": "400",
        "text": "2.00",
        "step": "2.50",
        "decode": "12.0",
        "load": "2.50",
        "first image": "5.75",
        "first image, filled cache": "1.25",
        "warm-up": "3.25",
    }


def test_memory_agreement_and_work_of_a_known_row(tmp_path: Path) -> None:
    row = result(
        "torch",
        (0.5,),
        stages=Stages(2.0, 10.0, 12.0, 100.0, 50),
        agreement=Agreement(47.25, 0.99876, 0.25, None),
        flops=0.8e12,
        matrix_rate=800e12,
    )
    # The allocator's memory, the host's and LPIPS were not measured.
    assert write_page(made(row), tmp_path / "report.html").table("Memory, agreement and work").column(EAGER) == {
        "first run": "1,000",
        "second run": "2,000",
        "PSNR, dB": "47.2",
        "SSIM": "0.9988",
        "differing values": "25.0 %",
        "TFLOP per call": "0.800",
        "share of matrix rate": "10.0 %",
    }


def test_columns_show_remarks_and_failures(page: Markup) -> None:
    one, four = (table for table in page.tables if table.caption == "Times")
    assert [" ".join(name.split()) for name in one.head] == ["", OURS, EAGER, COMPILED, f"{PLAIN} untrusted"]
    assert set(four.column(f"{PLAIN} failed").values()) == {DASH}
    assert f"{PLAIN} untrusted: {PALE_REASON}" in page.text
    assert f"{PLAIN} failed: {FAILURE}" in page.text
    assert f"{EAGER} spread of 14%" in page.text


@pytest.mark.parametrize(
    ("latency", "unit", "shown"),
    [
        (0.00345, "ms", "3.450"),
        (0.0995, "ms", "99.50"),
        (0.3311, "s", "0.331"),
        (0.99999, "s", "1.000"),
        (75, "s", "75.00"),
    ],
)
def test_unit_of_latencies(tmp_path: Path, latency: float, unit: str, shown: str) -> None:
    found = write_page(made(result("torch", (latency,))), tmp_path / "report.html")
    assert found.table("Times").column(EAGER)["median"] == shown
    assert f"latency, {unit}" in found.text


# The plots


def trusted(workload: Workload = ONE) -> list[Result]:
    return [row for row in comparison().results if row.workload == workload and not row.failure]


def test_latency_bars_are_medians(page: Markup) -> None:
    plot, rows = page.plot("Latency"), trusted()
    assert plot.texts == [OURS, "0.321 s", EAGER, "0.978 s", COMPILED, "0.353 s"]
    medians = [float(np.median(row.latencies_s)) for row in rows]
    assert plot.lengths == pytest.approx([median / max(medians) for median in medians], abs=1e-4)
    table = next(table for table in page.tables if table.caption == "Latency, s")
    for row, name in zip(rows, (OURS, EAGER, COMPILED), strict=True):
        expected = np.percentile(row.latencies_s, [10, 50, 90])
        assert [float(cell) for cell in table.column(name).values()] == pytest.approx(expected, abs=5e-4)


def test_first_image_is_loading_and_the_first_run(page: Markup) -> None:
    plot = page.plot("Time to the first image")
    assert plot.titles == [
        f"{OURS}: load 1.28 s", f"{OURS}: first run 4.84 s",
        f"{EAGER}: load 8.72 s", f"{EAGER}: first run 4.83 s",
        f"{COMPILED}: load 8.93 s", f"{COMPILED}: first run 41.20 s",
    ]  # fmt: skip
    assert [each / plot.lengths[0] for each in plot.lengths] == pytest.approx(
        [each / 1.28 for each in (1.28, 4.84, 8.72, 4.83, 8.93, 41.2)], rel=0.02
    )


def test_stages_add_up_to_the_median(page: Markup) -> None:
    table = next(table for table in page.tables if table.caption == "Time by stage, ms")
    for row, name in zip(trusted(), (OURS, EAGER, COMPILED), strict=True):
        assert row.stages is not None
        cells = {part: float(cell.replace(",", "")) for part, cell in table.column(name).items()}
        assert (cells["text"], cells["decode"]) == (2.1, 7.4)
        assert cells["steps"] == pytest.approx(51 * row.stages.step_ms, rel=1e-3)
        parts = cells["text"] + cells["steps"] + cells["decode"] + cells["rest"]
        assert parts == pytest.approx(cells["total"], rel=1e-3)
        assert cells["total"] == pytest.approx(1e3 * np.median(row.latencies_s), rel=1e-3)
    assert "the stages add up to" not in page.text


def test_stages_that_exceed_the_median_are_explained(tmp_path: Path) -> None:
    row = result("torch", (6.483,), stages=Stages(50.0, 2173.0, 507.0, 0.5, 4))
    found = write_page(made(row), tmp_path / "report.html")
    assert (
        "torch eager: the stages add up to 9,249 ms, more than the median latency of 6,483 ms, because they were "
        "measured in a separate, slower run."
    ) in found.text
    assert found.table("Time by stage, ms").column(EAGER)["rest"] == "0"


def test_images_per_second_by_batch(page: Markup) -> None:
    table = page.table("Images per second by batch size")
    for name, *rows in zip((OURS, EAGER, COMPILED), trusted(ONE), trusted(FOUR), strict=True):
        shown = {batch: float(cell) for batch, cell in table.column(name).items()}
        expected = [row.workload.batch_size / np.median(row.latencies_s) for row in rows]
        assert list(shown) == ["1", "4"]
        assert list(shown.values()) == pytest.approx(expected, abs=0.006)


def test_latency_by_size(tmp_path: Path) -> None:
    sizes = ((512, 512), (512, 768), (768, 512), (1024, 1024))
    rows = [
        result("torch", (0.1 * index,), Workload(height=height, width=width))
        for index, (height, width) in enumerate(sizes, 1)
    ]
    found = write_page(made(*rows), tmp_path / "report.html")
    table = found.table("Latency, seconds by image size")
    assert table.column(EAGER) == {"512x512": "0.100", "512x768": "0.200", "768x512": "0.300", "1024x1024": "0.400"}


def test_formula_of_the_fitted_line(page: Markup) -> None:
    assert f"{OURS}: 6.200 ms \N{MULTIPLICATION SIGN} steps + 11.0 ms (R² 1.0000)" in page.text
    assert f"{COMPILED}: 6.800 ms \N{MULTIPLICATION SIGN} steps \N{MINUS SIGN} 2.0 ms (R² 1.0000)" in page.text
    shown = page.table("Latency by steps").column(OURS)
    assert list(shown.values()) == ["0.073", "0.135", "0.197", "0.321", "6.200", "11.0", "1.0000"]


def test_stalls_after_size_changes(page: Markup) -> None:
    table = page.table("Images of each size, in order, s")
    assert [name for name, cells in table.rows.items() if not cells] == ["512x512", "768x512", "768x768"]
    plot = page.plot("First images after a change of size")
    assert f"{COMPILED}, 768x768: first 25.100 s, second 0.790 s, later 0.790 s" in plot.titles
    assert "25.10 s" in plot.texts


def test_kernels_by_kind(page: Markup) -> None:
    table = page.table("Device time by kind of operator, ms")
    assert table.head == ["kind", OURS, EAGER, COMPILED]
    assert table.rows["convolution"] == ["91.2", "95.0", "92.8"]
    assert table.rows["copies"] == ["1.1", "31.0", DASH]
    assert table.rows["total"] == ["312.5", "936.7", "331.4"]
    assert table.rows["launches"] == ["38,454", "71,900", "32,946"]
    assert list(table.rows)[-3:] == ["idle", "total", "launches"]


def test_an_engine_has_one_colour_everywhere(page: Markup) -> None:
    colours = page.plot("Latency").colours
    assert len(set(colours)) == 3
    # Parts have tones of it, and the columns of tables its swatch.
    assert [each[:7] for each in page.plot("Time to the first image").colours[::2]] == colours
    assert set(colours) <= set(page.swatches)


def test_plots_without_finite_values(tmp_path: Path) -> None:
    rows = (result("onnxruntime", (0.2,)), result("torch", (math.inf, 0.3, math.nan)))
    found = write_page(made(*rows), tmp_path / "report.html")
    assert found.plots
    assert found.plot("Latency").lengths == [1, 0]


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


def test_engine_settings_in_words(page: Markup) -> None:
    table = page.table("Settings that differ")
    assert table.column(COMPILED) == {
        "library": "PyTorch", "version": "2.11.0", "compile mode": "reduce-overhead", "folder": "sd15",
    }  # fmt: skip
    assert table.column(OURS) == {
        "library": "ONNX Runtime", "version": "1.31.1", "compile mode": DASH, "folder": "fast",
    }  # fmt: skip
    assert "device cuda precision float16 sampler PNDMScheduler family stable-diffusion" in page.text
    for name in ("False", "None", "[]", "regional"):
        assert name not in page.text


def test_title_names_the_processor_without_a_gpu(tmp_path: Path) -> None:
    measured = comparison()
    for row in measured.results:
        row.engine = {**row.engine, "device": "cpu"}
    assert "Stable Diffusion 1.5 on Intel Xeon Processor" in write_page(measured, tmp_path / "report.html").text


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
    fastest, tables = (["Engines"], ["Numbers"]) if kept == "results" else ([], [])
    images = ["Images"] if kept == "images" else []
    assert found.headings == [*fastest, *plotted, *images, *tables, "Machine", "Reproduce"]
    assert bool(found.plots) == bool(plotted and kept != "throughput")  # steps have a table only
    assert COMMAND in found.text
    assert ("interrupted before the first result" in found.text) == (kept != "results")


def test_comparison_with_failures_only(tmp_path: Path) -> None:
    rows = [Result(TITLES[name], ONE, failure=f"{name} is not installed") for name in (OURS, EAGER)]
    found = write_page(made(*rows), tmp_path / "report.html")
    assert f"{EAGER} failed: {EAGER} is not installed" in found.text
    assert "No engine has a trusted result." in found.text
    assert not found.plots


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


@pytest.mark.parametrize("text", HOSTILE)
def test_escapes_known_attacks(text: str) -> None:
    assert_harmless(text)


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=40) | st.text("<>/!-&;\"'{}%scriptb= \n\r", min_size=1, max_size=40))
def test_escapes_random_text(text: str) -> None:
    assert_harmless(text)


def test_many_engines_and_workloads(tmp_path: Path) -> None:
    """There are more engines than colours."""
    sizes = [dataclasses.replace(ONE, batch_size=batch, height=height) for batch in (1, 4, 8) for height in (512, 768)]
    rows = [result(f"engine {index}", (0.1 * index,), size) for size in sizes for index in range(1, 13)]
    found = write_page(made(*rows), tmp_path / "report.html")
    assert len(found.plots) == 3 * 6
    assert len(found.plot("Latency").lengths) == 12
    tables = [table for table in found.tables if table.caption == "Images per second by batch size"]
    assert [len(table.head) for table in tables] == [13, 13]
