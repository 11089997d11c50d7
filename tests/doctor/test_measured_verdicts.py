"""Verdicts that ship with the package, and the records in docs/results that they are made from."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctor import FOUND, H200

from sdonnx.doctor.cache import verdict_as_json
from sdonnx.doctor.check_kernels import digest_of
from sdonnx.doctor.measured_verdicts import MEASURED_VERDICTS_FILE, measured_verdict, measured_verdict_file
from sdonnx.errors import FolderError

ROOT = Path(__file__).resolve().parents[2]
KEY = {
    "gpu": H200.name,
    "compute_capability": "9.0",
    "driver": "580.159.04",
    "cuda_runtime": "13000",
    "cudnn": "91900",
    "onnxruntime": "1.31.1",
    "kernel_cases": "c0ffee",
}
FULL = replace(FOUND, key=KEY, full=True)


def report(verdict: Any) -> str:
    """Return a report of the doctor."""
    return json.dumps({"provider": "cuda", "verdict": verdict_as_json(verdict)}, indent=1)


def made(*records: tuple[str, str]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(measured_verdict_file(records, "c0ffee"))
    return content


def test_the_shipped_file_is_made_from_the_results() -> None:
    """If this fails, run `python scripts/write_measured_verdicts.py`."""
    paths = sorted((ROOT / "docs" / "results").glob("*.json"))
    records = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    assert MEASURED_VERDICTS_FILE.read_text(encoding="utf-8") == measured_verdict_file(records, digest_of())


def test_every_shipped_verdict_can_be_read() -> None:
    for entry in json.loads(MEASURED_VERDICTS_FILE.read_text(encoding="utf-8"))["verdicts"]:
        assert (ROOT / entry["source"]).is_file()
        found = measured_verdict(entry["verdict"]["key"])
        assert found is not None
        assert verdict_as_json(found) == entry["verdict"]


def test_a_report_of_the_doctor_is_a_record(tmp_path: Path) -> None:
    content = made(("docs/results/doctor.json", report(FULL)))
    assert content["left_out"] == []
    assert [entry["source"] for entry in content["verdicts"]] == ["docs/results/doctor.json"]
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(content))
    assert measured_verdict(KEY, file) == FULL
    assert measured_verdict({**KEY, "driver": "590.1"}, file) == FULL
    for name in KEY.keys() - {"driver"}:
        assert measured_verdict({**KEY, name: "another"}, file) is None


def test_the_verdict_with_the_same_driver_is_preferred(tmp_path: Path) -> None:
    other = replace(FULL, key={**KEY, "driver": "590.1"}, sdpa_kernel=0)
    for records in ((FULL, other), (other, FULL)):
        file = tmp_path / "measured.json"
        file.write_text(json.dumps(made(*((str(index), report(each)) for index, each in enumerate(records)))))
        assert measured_verdict(KEY, file) == FULL
        assert measured_verdict(other.key, file) == other


def test_records_of_the_gpu_tests_are_read() -> None:
    row = {"seconds": 60.0, "verdict": verdict_as_json(FULL)}
    lines = [{"tests": "tests/gpu", "measured": {"doctor: whole check": [row]}}, {"measured": {"another": [{}]}}]
    content = made(("gpu-tests.json", "\n".join(map(json.dumps, lines))))
    assert [entry["verdict"]["key"] for entry in content["verdicts"]] == [KEY]


def test_a_full_check_is_preferred() -> None:
    quick = replace(FULL, full=False, checked=3)
    for records in ((("a", report(quick)), ("b", report(FULL))), (("a", report(FULL)), ("b", report(quick)))):
        (entry,) = made(*records)["verdicts"]
        assert entry["verdict"]["full"]


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (replace(FULL, key={**KEY, "cudnn": ""}), "does not name cudnn"),
        (replace(FULL, key={"gpu": "NVIDIA H200"}), "does not name compute_capability, driver"),
        (replace(FULL, key={**KEY, "kernel_cases": "0"}), r"checked other kernel cases \(0\) than .* \(c0ffee\)"),
        (replace(FULL, complete=False), "the check was not complete"),
    ],
)
def test_a_record_that_does_not_hold_is_left_out_with_the_reason(verdict: Any, reason: str) -> None:
    content = made(("doctor.json", report(verdict)))
    assert content["verdicts"] == []
    (row,) = content["left_out"]
    assert row["source"] == "doctor.json"
    assert re.match(reason, row["reason"])


def test_a_record_of_another_version_is_left_out() -> None:
    document = verdict_as_json(FULL) | {"format": 1}
    content = made(("doctor.json", json.dumps({"verdict": document})), ("rows.json", json.dumps([1, 2])))
    assert [row["reason"] for row in content["left_out"]] == ["a verdict of format 1, expected 3"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"verdicts": [{"verdict": {}}]}'])
def test_a_broken_file_is_a_one_line_error(content: str, tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(content)
    with pytest.raises(FolderError, match="install sdonnx again"):
        measured_verdict(KEY, file)
