"""Records of `--json` read back, and the report that is written from recorded results."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.comparison import comparison

from sdonnx.benchmark.record import measurement_record, read_comparison, result_record

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "results"


def test_records_are_read_back() -> None:
    measured = comparison()
    records = [result_record(each, ["a"], None, measured) for each in measured.results]
    records += [measurement_record(each, measured) for each in measured.throughput]
    records += [measurement_record(each, measured) for each in measured.resolutions]
    records += [measurement_record(each, measured) for each in measured.kernels]
    found = read_comparison(map(json.loads, map(json.dumps, records)))
    for name in ("command", "environment", "results", "throughput", "resolutions", "kernels"):
        assert getattr(found, name) == getattr(measured, name)
    assert found.results[0].summary == measured.results[0].summary


def test_no_records() -> None:
    with pytest.raises(ValueError, match="no records"):
        read_comparison([])


@pytest.mark.parametrize("path", sorted(RECORDS.glob("benchmark-*-h200.json")), ids=lambda path: path.stem)
def test_committed_records_are_read(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if any("benchmark" not in record for record in records):
        pytest.skip("a record of tests")
    found = read_comparison(records)
    assert len(found.results) == sum(record["benchmark"] == "pipeline" for record in records) > 0
    for result, record in zip(found.results, (r for r in records if r["benchmark"] == "pipeline"), strict=True):
        assert result.summary is not None
        assert result.summary.median_s == record["summary"]["median_s"]


def test_report_of_the_documentation(tmp_path: Path) -> None:
    """The picture in docs/lab/benchmarks.md shows the numbers of a row of its table."""
    script = [sys.executable, str(ROOT / "scripts" / "write_report.py"), str(RECORDS / "benchmark-sd15-h200.json")]
    options = ["--commit", "c6925bb", "--height", "512", "-b", "1", "-o", "report.html"]
    subprocess.run([*script, *options], cwd=tmp_path, check=True)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>Stable Diffusion 1.5 on NVIDIA H200</h1>" in page
    result = re.search('<p class="result">(.*?)</p>', page)
    assert result is not None
    assert html.unescape(result[1]) == "sdonnx generates an image in 0.316 s, 1.25 times as fast as torch.compile."
    rows = (ROOT / "docs" / "lab" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    assert any("sdonnx | **0.316**" in row for row in rows)
    assert any("torch-compile | 0.395 (1.25x)" in row for row in rows)
    options[1] = "no such commit"
    failed = subprocess.run([*script, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "has no such records" in failed.stderr
