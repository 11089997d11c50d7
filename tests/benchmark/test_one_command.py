"""A complete comparison by one command, from the name of a sample pipeline to the report."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.benchmarking import read_rows
from support.micro import narrowed
from support.pipeline_cache import PipelineCache
from support.preloaded import interpreter

from sdonnx.__main__ import main
from sdonnx.reference import REFERENCE

PLAIN = f"{Path(__file__).parents[2] / 'lab' / 'plain_engine.py'}:onnxruntime-plain"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, pipelines: PipelineCache) -> tuple[Path, int, str]:
    """Return the folder of the results, the exit status and the text on standard output."""
    folder, shown = tmp_path_factory.mktemp("whole"), io.StringIO()
    arguments = [
        "benchmark", "--arch", "tiny", "-e", "onnxruntime", PLAIN, "torch", "--height", "64", "-s", "3",
        "-c", "2", "--warmups", "1", "--json", "result.jsonl", "--report", "report.html", "--output-image", "image.png",
    ]  # fmt: skip
    with (
        narrowed("tiny"),
        pipelines.reusing_components(pipelines.micro()),  # equal to the sample that the command writes
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(shown),
    ):
        patch.setattr(sys, "orig_argv", ["sdonnx", *arguments])
        patch.setattr(sys, "executable", str(interpreter(tmp_path_factory.mktemp("bin") / "python")))
        status = main(arguments)
    return folder, status, shown.getvalue()


def test_one_command_writes_all_files(whole: Any) -> None:
    folder, status, shown = whole
    assert status == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "benchmark_result.csv",
        "benchmark_work",
        "image-onnxruntime-64x64-b1.png",
        "image-onnxruntime-plain-64x64-b1.png",
        "image-torch-64x64-b1.png",
        "image-torch-fp32-64x64-b1.png",
        "report.html",
        "result.jsonl",
    ]
    for line in ("latency, ms", "PSNR, dB", "report: report.html", "3 rows appended to"):
        assert line in shown
    # One line a round instead of one a run; --arch first makes the folders.
    assert sum(": run " in line for line in shown.splitlines()) < 4  # none, unless the machine is slow
    assert sum(": started" in line for line in shown.splitlines()) == 1 + 3 * 2


def test_rows(whole: Any) -> None:
    rows = read_rows(whole[0] / "benchmark_result.csv")
    assert [row["engine"] for row in rows] == ["onnxruntime", "onnxruntime-plain", "torch"]
    for row in rows:
        assert [row[name] for name in ("version", "provider", "height", "width", "steps", "rounds", "batch_count")] == [
            "tiny", "cpu", "64", "64", "3", "2", "2",
        ]  # fmt: skip
        assert 0 < float(row["min_latency"]) <= float(row["median_latency"]) <= float(row["p99_latency"]) < 60
        assert float(row["first_image_s"]) > float(row["load_s"]) > 0
        # The interpreter, the libraries and the weights take more than 100 MB.
        assert 100 < float(row["second_run_memory_MB"]) < 5000
        assert float(row["host_peak_MB"]) >= 0.9 * float(row["second_run_memory_MB"])
        assert float(row["psnr_db"] or 999) > 50
        assert float(row["ssim"]) > 0.999
        assert float(row["iterations_per_second"]) == pytest.approx(1e3 / float(row["step_ms"]), rel=1e-3)
        assert row["scheduler"] == "PNDMScheduler"


def test_records_contain_every_run(whole: Any) -> None:
    records = [json.loads(line) for line in (whole[0] / "result.jsonl").read_text().splitlines()]
    assert [record["benchmark"] for record in records] == ["pipeline"] * 3
    for record, row in zip(records, read_rows(whole[0] / "benchmark_result.csv"), strict=True):
        latencies = [latency for each in record["rounds"] for latency in each["latencies_s"]]
        assert len(latencies) == 4
        assert float(row["average_latency"]) == pytest.approx(np.mean(latencies), abs=1e-5)
        assert float(row["median_latency"]) == pytest.approx(np.median(latencies), abs=1e-5)
        assert float(row["p90_latency"]) == pytest.approx(np.percentile(latencies, 90), abs=1e-5)
        # The record contains the command line.
        assert record["command"].endswith("--output-image image.png")
        assert record["environment"]["machine"]["cpu"]


def test_report_shows_every_engine(whole: Any) -> None:
    page = (whole[0] / "report.html").read_text()
    for name in ("sdonnx", "plain ONNX Runtime", "torch eager", REFERENCE, "data:image/"):
        assert name in page


def test_saved_images_match_the_reference(whole: Any) -> None:
    images = {path.name: np.asarray(Image.open(path)) for path in whole[0].glob("image-*.png")}
    reference = images["image-torch-fp32-64x64-b1.png"].astype(int)
    assert len(images) == 4
    for image in images.values():
        assert np.abs(image - reference).max() <= 2
