"""Verdicts that ship with the package, and the records in docs/results that they are made from."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctor import FOUND, H200
from support.scripts import load_script

from sdonnx.doctor import own_kernel_check
from sdonnx.doctor.cache import verdict_as_json
from sdonnx.doctor.kernel_library import KernelLibrary
from sdonnx.doctor.measured_verdicts import MEASURED_VERDICTS_FILE, measured_verdict_file, measured_verdicts
from sdonnx.doctor.nearest_verdict import nearest_verdict
from sdonnx.doctor.own_kernel_check import known_own_verdict
from sdonnx.doctor.verdict import SummaryLine, Verdict
from sdonnx.errors import FolderError
from sdonnx.operators.operator_table import CONTRACTS, OWN_CONTRACTS

script = load_script("write_measured_verdicts")

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


OWN_KEY = KEY | {
    "cublas": "130001",
    "kernel_sources": "5eed",
    "kernel_compiler": "13.0.88",
    "kernel_code": "90a",
    "kernel_cases": "facade",
}
OWN = replace(FULL, key=OWN_KEY, sdpa_kernel=0, faulty_backends=(), faults=())
LIBRARY = KernelLibrary(Path("x.so"), ("80", "90a"), "5eed", "13.0.88")


def report(verdict: Any, name: str = "verdict") -> str:
    """Return a report of the doctor."""
    return json.dumps({"provider": "cuda", name: verdict_as_json(verdict)}, indent=1)


def made(*records: tuple[str, str]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(measured_verdict_file(records, "c0ffee", "facade"))
    return content


def test_the_shipped_file_is_made_from_the_results() -> None:
    """If this fails, run `python scripts/write_measured_verdicts.py`."""
    assert MEASURED_VERDICTS_FILE.read_text(encoding="utf-8") == script.content()


def test_every_shipped_verdict_can_be_read() -> None:
    for entry in json.loads(MEASURED_VERDICTS_FILE.read_text(encoding="utf-8"))["verdicts"]:
        assert (ROOT / entry["source"]).is_file()
        found = nearest_verdict(entry["verdict"]["key"], measured_verdicts())
        assert found is not None
        assert verdict_as_json(found) == entry["verdict"]


def test_a_report_of_the_doctor_is_a_record(tmp_path: Path) -> None:
    content = made(("docs/results/doctor.json", report(FULL)))
    assert content["left_out"] == []
    assert [entry["source"] for entry in content["verdicts"]] == ["docs/results/doctor.json"]
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(content))
    assert measured_verdicts(file) == [FULL]


def test_verdict_on_our_own_kernels_ships_for_the_sources_that_were_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = made(("docs/results/doctor.json", report(OWN, "own_kernels")))
    assert content["left_out"] == []
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(content))
    monkeypatch.setattr(own_kernel_check, "cublas_version", lambda: OWN_KEY["cublas"])
    monkeypatch.setattr(own_kernel_check, "digest_of", lambda path: "facade")

    def found(library: KernelLibrary, **changed: str) -> Verdict | None:
        identify = lambda index, cases: {**KEY, "kernel_cases": cases, **changed}  # noqa: E731
        folder = tmp_path / "cache"
        return known_own_verdict(0, library, folder=folder, measured=file, identify=identify)[1]

    assert found(LIBRARY) == OWN
    assert found(LIBRARY, driver="590.1", cudnn="91400", cuda_runtime="13010") == OWN
    assert found(LIBRARY, gpu="NVIDIA H100") is None
    assert found(replace(LIBRARY, sources="ed17ed")) is None
    assert found(replace(LIBRARY, compiler="13.1.5")) is None


def test_verdict_that_ships_is_used_only_for_its_sources() -> None:
    of_ours = [verdict for verdict in measured_verdicts() if "kernel_sources" in verdict.key]
    assert of_ours
    for verdict in of_ours:
        assert nearest_verdict({**verdict.key, "kernel_sources": "ed17ed"}, measured_verdicts()) is None


def test_verdicts_ship_for_the_kernels_as_they_are() -> None:
    """If this fails, an edit has voided a verdict that ships: run the commands of the message (decision 0163)."""
    lines = script.missing(measured_verdicts(), script.kernels_of_checkout())
    assert not lines, "\n".join(lines)


def summary(kernels: Any, full: bool) -> tuple[SummaryLine, ...]:
    """Return the summary of a check in fp16 that found no fault."""
    counts = Counter(check.case.op_type for check in kernels.cases.checks if full or check.first_use)
    return tuple(SummaryLine(name, "float16", count, 0, 0, 1e-4) for name, count in counts.items())


def holding(of_ours: bool) -> tuple[Verdict, Any]:
    """Return a verdict that holds, whatever ships, and the kernels that it is on."""
    kernels = script.kernels_of_checkout()[of_ours]
    key = (OWN_KEY if of_ours else KEY) | kernels.key
    return replace(OWN, key=key, complete=True, full=True, summary=summary(kernels, True)), kernels


@pytest.mark.parametrize("of_ours", [False, True])
def test_every_part_of_a_verdict_is_compared(of_ours: bool) -> None:
    verdict, kernels = holding(of_ours)
    parts = {"onnxruntime", "kernel_cases", *(("kernel_sources", "kernel_compiler") if of_ours else ())}
    assert kernels.key.keys() == parts
    for part in parts:
        changed = replace(kernels, key={**kernels.key, part: "another"})
        (line,) = script.missing([verdict], [changed])
        found = f"{kernels.name}: {part} of the verdict that ships is {kernels.key[part]}, expected another; "
        assert line == f"{found}run on a GPU: {kernels.command}; then: python scripts/write_measured_verdicts.py"


@pytest.mark.parametrize("of_ours", [False, True])
def test_every_operator_has_to_have_run(of_ours: bool) -> None:
    """A case that is missing, or that no kernel ran, is noticed, in a full check and in one of a first use."""
    verdict, kernels = holding(of_ours)
    names = {check.case.op_type for check in kernels.cases.checks if check.first_use}
    assert names == (OWN_CONTRACTS if of_ours else CONTRACTS).keys()
    for full in (True, False):
        rows = summary(kernels, full)
        assert {row.name for row in rows} == names
        assert script.reasons_against(replace(verdict, full=full, summary=rows), kernels) == []
        for row in rows:
            fewer = replace(row, correct=row.correct - 1, unavailable=1)
            others = tuple(each for each in rows if each != row)
            for lost, count in (((fewer,), row.correct - 1), ((), 0)):
                reasons = script.reasons_against(replace(verdict, full=full, summary=(*others, *lost)), kernels)
                assert reasons == [f"{count} cases of {row.name} ran, expected {row.correct}"]
    assert script.reasons_against(replace(verdict, complete=False), kernels) == ["the check was not complete"]


def test_one_verdict_that_holds_is_enough() -> None:
    verdict, kernels = holding(True)
    older = replace(verdict, key={**verdict.key, "kernel_sources": "older"})
    oldest = replace(older, key={**older.key, "kernel_cases": "older"})
    assert script.missing([oldest, verdict, older], [kernels]) == []
    (line,) = script.missing([oldest, older], [kernels])
    assert "kernel_sources" in line
    assert "kernel_cases" not in line


@pytest.mark.parametrize("kept", [(), (False,), (True,), (False, True)])
def test_check_of_a_release_reports_what_is_missing(
    kept: tuple[bool, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "measured.json"
    rows = [{"verdict": verdict_as_json(holding(of_ours)[0])} for of_ours in kept]
    file.write_text(json.dumps({"verdicts": rows}))
    before = file.read_bytes()
    monkeypatch.setattr(script, "MEASURED_VERDICTS_FILE", file)
    assert script.main(["--check"]) == int(len(kept) < 2)
    shown = capsys.readouterr().out.splitlines()
    lost = [name for name, of_ours in (("ONNX Runtime's", False), ("our own", True)) if of_ours not in kept]
    expected = [f"{name} kernels: no verdict ships; expected one; run on a GPU: " for name in lost]
    assert len(shown) == max(len(expected), 1)
    assert all(line.startswith(start) for line, start in zip(shown, expected or ["verdicts ship for all"], strict=True))
    assert file.read_bytes() == before


def test_records_of_the_gpu_tests_are_read() -> None:
    row = {"seconds": 60.0, "verdict": verdict_as_json(FULL)}
    own = {"checked": 265, "own_kernels": verdict_as_json(OWN)}
    lines = [{"tests": "tests/gpu", "measured": {"doctor: whole check": [row]}}, {"measured": {"another": [{}]}}]
    lines.append({"measured": {"own kernels, whole check": [own, {"checked": 148}]}})
    content = made(("gpu-tests.json", "\n".join(map(json.dumps, lines))))
    assert [entry["verdict"]["key"] for entry in content["verdicts"]] == [OWN_KEY, KEY]


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


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ({**OWN_KEY, "kernel_sources": ""}, "does not name kernel_sources"),
        ({**OWN_KEY, "kernel_cases": "c0ffee"}, r"checked other kernel cases \(c0ffee\) than .* \(facade\)"),
        (KEY, "does not name cublas, kernel_sources, kernel_compiler, kernel_code"),
    ],
)
def test_a_record_on_our_own_kernels_names_what_was_checked(key: dict[str, str], reason: str) -> None:
    (row,) = made(("doctor.json", report(replace(OWN, key=key), "own_kernels")))["left_out"]
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
        measured_verdicts(file)
