"""A complete comparison by one command, which takes less than two minutes on two idle cores."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.benchmarking import read_rows, run

from sdonnx.benchmark.results import REFERENCE

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str], float]:
    """Results of one command, from a sample pipeline to the report."""
    folder = tmp_path_factory.mktemp("whole")
    start = time.monotonic()
    done = run(
        folder, "--arch", "tiny", "-e", "onnxruntime", "onnxruntime-plain", "torch", "--height", "64", "-s", "3",
        "-c", "2", "--warmups", "1", "--json", "result.jsonl", "--report", "report.html", "--output-image", "image.png",
    )  # fmt: skip
    return folder, done, time.monotonic() - start


def test_one_command_writes_all_files(whole: Any) -> None:
    folder, done, _ = whole
    assert done.returncode == 0, done.stderr
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
    for line in ("median latency, s", "PSNR to torch fp32, dB", "report: report.html", "3 rows appended to"):
        assert line in done.stdout
    # One line a round instead of one a run; --arch first makes the folders.
    assert sum(": run " in line for line in done.stdout.splitlines()) < 4  # none, unless the machine is slow
    assert sum(": started" in line for line in done.stdout.splitlines()) == 1 + 3 * 2


def test_rows(whole: Any) -> None:
    rows = read_rows(whole[0] / "benchmark_result.csv")
    assert [row["engine"] for row in rows] == ["onnxruntime", "onnxruntime-plain", "torch"]
    for row in rows:
        assert [row[name] for name in ("version", "provider", "height", "width", "steps", "rounds", "batch_count")] == [
            "tiny", "cpu", "64", "64", "3", "2", "2",
        ]  # fmt: skip
        assert 0 < float(row["min_latency"]) <= float(row["median_latency"]) <= float(row["p99_latency"]) < 60
        assert float(row["first_image_s"]) > float(row["load_s"]) > 0
        # The weights take 300 MB.
        assert 300 < float(row["second_run_memory_MB"]) < 5000
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


def test_takes_less_than_two_minutes(whole: Any) -> None:
    """Limits the duration in CI; it does not measure the speed."""
    assert whole[2] < 120
