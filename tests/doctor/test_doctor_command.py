"""The command `sdonnx doctor`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctor import CASE_SET, FOUND, GOOD, KEY, faulty, graphs_of, machine, refuse_to_open, small_set
from support.recording import Note

from sdonnx.__main__ import main
from sdonnx.cli import doctor as command
from sdonnx.doctor import cache, first_use
from sdonnx.doctor.check_kernels import ATTENTION
from sdonnx.doctor.sessions import kernel_opener


def doctor(*arguments: str) -> int:
    return main(["doctor", *arguments])


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], None]:
    """Let the command find a GPU; return a function that sets its kernels."""
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "collect_facts", lambda: GOOD)
    monkeypatch.setattr(command, "identity", lambda index, cases: {**KEY, "kernel_cases": cases})
    monkeypatch.setattr(command, "read_kernel_cases", small_set)

    def set_kernels(kernels: Any) -> None:
        monkeypatch.setattr(command, "kernel_opener", lambda provider, index: kernels)

    return set_kernels


def test_doctor_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], note: Note) -> None:
    start = time.monotonic()
    assert doctor("--provider", "cpu", "--json", str(tmp_path / "report.json")) == 0
    seconds = time.monotonic() - start
    shown = capsys.readouterr().out
    assert "SkipLayerNormalization" in shown
    count = sum(check.cpu for check in CASE_SET.checks)
    assert f"{count} of {count} kernel cases correct" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sound"] is True
    assert len(report["cases"]) == count
    note("doctor", {"provider": "cpu", "cases": count, "seconds": round(seconds, 2)})


def test_doctor_on_a_sound_gpu(
    on_h200: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_h200(machine())
    assert doctor() == 0
    first = capsys.readouterr().out
    for shown in (
        "kernels on NVIDIA H200",
        "one backend allowed",
        "flash",
        "memory-efficient",
        "8 of 8 kernel cases correct",
    ):
        assert shown in first
    on_h200(refuse_to_open)
    assert doctor() == 0
    again = capsys.readouterr().out
    assert "verdict: cached" in again
    table = [line for line in first.splitlines() if " float" in line]
    assert table == [line for line in again.splitlines() if " float" in line]


def test_fresh_ignores_the_cache(on_h200: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_h200(machine())
    assert doctor() == 0
    on_h200(machine(faulty("BiasAdd")))
    assert doctor() == 0
    assert doctor("--fresh") == 1
    shown = capsys.readouterr().out
    assert "wrong BiasAdd float16" in shown
    assert doctor() == 1  # from the cache
    assert doctor("--json", str(tmp_path / "report.json")) == 1
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert {row["operator"] for row in report["verdict"]["faults"]} == {"BiasAdd"}
    assert not report["sound"]


def test_kernels_that_do_not_run_keep_their_known_faults(
    on_h200: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = {**KEY, "kernel_cases": small_set().digest}
    cache.write_verdict(replace(FOUND, key=key, faults=FOUND.faults * 12), tmp_path / "cache")
    on_h200(machine(failure_of=lambda content, mask: "CUDA failure 700"))
    assert doctor() == 1
    shown = capsys.readouterr().out
    assert "flash; generating images avoids them (sdpa_kernel=26)" in shown
    assert "wrong BiasAdd" in shown
    assert "0 of 8 kernel cases correct" in shown


def test_doctor_replaces_the_verdict_of_a_first_use(on_h200: Any, tmp_path: Path) -> None:
    key = {**KEY, "kernel_cases": small_set().digest}
    cache.write_verdict(replace(FOUND, key=key), tmp_path / "cache")
    on_h200(machine())
    assert doctor() == 0
    cached = cache.read_verdict(key, tmp_path / "cache")
    assert cached is not None
    assert cached.full
    assert cached.sound


def test_doctor_on_a_gpu_with_faulty_flash_attention(on_h200: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on_h200(machine(faulty(ATTENTION, lambda mask: mask == 0 or bool(mask & 1))))
    assert doctor() == 1
    assert "flash; generating images avoids them (sdpa_kernel=26)" in capsys.readouterr().out
    on_h200(machine(faulty(ATTENTION, lambda mask: mask == 1)))
    assert doctor("--fresh") == 0
    assert "flash; ONNX Runtime does not choose them" in capsys.readouterr().out


def test_a_kernel_that_does_not_run_is_status_1(on_h200: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on_h200(machine(failure_of=lambda content, mask: "no memory" if content in graphs_of("BiasAdd") else ""))
    assert doctor() == 1
    shown = capsys.readouterr().out
    assert "not available BiasAdd float32 C=320 3x7: no memory" in shown
    assert "verdict: not cached" in shown


def test_a_missing_requirement_is_status_1_and_runs_no_kernel(
    on_h200: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_h200(refuse_to_open)
    monkeypatch.setattr(command, "collect_facts", lambda: replace(GOOD, missing=("libcudnn.so.9",)))
    assert doctor("--json", str(tmp_path / "report.json")) == 1
    shown = capsys.readouterr().out
    assert (
        "missing CUDA libraries: not found: libcudnn.so.9; expected the libraries of CUDA 13.0 and cuDNN 9; pip install"
        in shown
    )
    assert "kernels: not run" in shown
    assert json.loads((tmp_path / "report.json").read_text())["sound"] is False


def test_quick_fills_the_cache(on_h200: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_h200(machine())
    assert doctor("--quick") == 0
    shown = capsys.readouterr().out
    assert "3 of 3 kernel cases correct" in shown
    assert "kernels-" in shown
    on_h200(refuse_to_open)
    assert doctor("--quick") == 0
    key = {**KEY, "kernel_cases": small_set().digest}
    cached = cache.read_verdict(key, tmp_path / "cache")
    assert cached is not None
    assert not cached.full
    on_h200(machine(faulty("BiasAdd")))
    assert doctor("--quick", "--fresh") == 1
    assert "wrong BiasAdd float16" in capsys.readouterr().out


def test_quick_without_a_gpu_is_one_line_and_status_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For image builds on machines without a GPU."""
    monkeypatch.setattr(command, "collect_facts", lambda: replace(GOOD, driver="", driver_cuda=None, gpus=()))
    assert doctor("--quick") == 0
    shown = capsys.readouterr()
    assert shown.out == "no GPU here, so no kernels to check: they are checked where images are generated\n"
    assert shown.err == ""
    assert doctor("--quick", "--provider", "cuda") == 1
    assert "missing GPU: none that is visible to CUDA" in capsys.readouterr().out


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_the_report_goes_to_standard_output(
    quick: list[str], on_h200: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has all that the run-time and docs/results need, and nothing else is on standard output."""
    monkeypatch.chdir(tmp_path)
    on_h200(machine(faulty("BiasAdd")))
    assert doctor("--json", "-", *quick) == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out, parse_constant=pytest.fail)
    assert "wrong BiasAdd float16" in shown.err
    assert not (tmp_path / "-").exists()
    verdict = cache.verdict_from_json(report["verdict"])
    assert verdict == cache.read_verdict({**KEY, "kernel_cases": small_set().digest}, tmp_path / "cache")
    assert verdict.full == (not quick)
    assert report["command"]
    assert report["sdonnx"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--provider", "cpu"], "--quick checks a GPU; expected the provider cuda; leave out --quick"),
        (["--provider", "tpu"], "the provider 'tpu' is unknown; expected cuda or cpu"),
        (["--device", "1"], "--device is 1; expected a number below 1"),
        (["--device", "-1"], "--device is -1; expected a number below 1"),
        (["--provider", "cpu", "--json", "/nowhere/report.json"], "writing /nowhere/report.json failed"),
    ],
)
def test_wrong_usage_is_a_one_line_error_and_status_2(
    arguments: list[str],
    message: str,
    on_h200: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "kernel_opener", kernel_opener)
    assert doctor(*arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_doctor_without_onnxruntime(tmp_path: Path) -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; from sdonnx.__main__ import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "missing ONNX Runtime: " in done.stdout
    assert "pip install" in done.stdout
    assert done.stderr == ""


def test_the_guide_states_the_numbers() -> None:
    """The numbers of kernel cases are rounded: a new operator does not change the page."""
    page = Path(command.__file__).parents[2] / "docs" / "how-to" / "doctor.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    counts = [int(count) for count in re.findall(r"about (\d+) kernel cases", text)]
    first = [check for check in CASE_SET.checks if check.first_use]
    assert counts == [pytest.approx(len(CASE_SET.checks), rel=0.1), pytest.approx(len(first), rel=0.1)]
    assert f"within {first_use.LIMIT_S:.0f} s" in text
