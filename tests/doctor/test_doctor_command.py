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
from support.doctor import CASE_SET, GOOD, MACHINE, OWN_CASE_SET, EmulatedGpu, faulty, graphs_of, machine, small_set
from support.recording import Note

from sdonnx.__main__ import main
from sdonnx.cli import doctor as command
from sdonnx.doctor import first_check, kernel_library
from sdonnx.doctor.check_kernels import ATTENTION, BACKENDS, KERNEL_CASES_FILE, kernel_opener


def doctor(*arguments: str) -> int:
    return main(["doctor", *arguments])


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], None]:
    """Let the command find a GPU without our own kernels; return a function that sets its kernels."""
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "machine_of", lambda index, library: dict(MACHINE))
    monkeypatch.setattr(command, "collect_facts", lambda: GOOD)
    monkeypatch.setattr(command, "read_kernel_cases", lambda path=None: small_set())
    monkeypatch.setattr(command, "usable_library", lambda capability: (None, f"no code for {capability}"))

    def set_kernels(kernels: Any) -> None:
        monkeypatch.setattr(command, "kernel_opener", lambda provider, index, library: kernels)

    return set_kernels


@pytest.fixture
def emulated(on_h200: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EmulatedGpu:
    """Let the command find our own kernels, too, and check two operators of them."""
    gpu = EmulatedGpu(monkeypatch, tmp_path / "cache")
    gpu.machine = dict(MACHINE)
    ours = tuple(check for check in OWN_CASE_SET.checks if check.case.op_type in ("LayerNorm", "SumRows"))
    monkeypatch.setattr(
        command,
        "read_kernel_cases",
        lambda path: small_set() if path == KERNEL_CASES_FILE else replace(OWN_CASE_SET, checks=ours),
    )
    monkeypatch.setattr(command, "kernel_opener", gpu.opener)
    monkeypatch.setattr(command, "machine_of", first_check.machine_of)
    monkeypatch.setattr(command, "usable_library", lambda capability: (gpu.library, ""))
    return gpu


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


def test_doctor_on_a_sound_gpu(on_h200: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Every case in every data type, and attention with every single backend."""
    masks: list[int] = []
    on_h200(machine(lambda content, mask: masks.append(mask) or 0.0))  # type: ignore[func-returns-value]
    assert doctor() == 0
    found = capsys.readouterr().out
    for shown in (
        "kernels on NVIDIA H200",
        "one backend allowed",
        "flash",
        "memory-efficient",
        "8 of 8 kernel cases correct",
        "note our own kernels are not used: no code for (9, 0)",
    ):
        assert shown in found
    assert {mask: masks.count(mask) for mask in masks} == {0: 2 * 3 + 2, **dict.fromkeys(BACKENDS.values(), 2 * 3)}


def test_kernels_are_always_checked(on_h200: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_h200(machine())
    assert doctor() == 0
    on_h200(machine(faulty("BiasAdd")))
    assert doctor("--fresh") == 1
    shown = capsys.readouterr().out
    assert "wrong BiasAdd float16" in shown
    assert "faulty: BiasAdd; optimize folders again with --disable_bias_add" in shown
    assert doctor("--json", str(tmp_path / "report.json")) == 1
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert {row["operator"] for row in report["verdict"]["faults"]} == {"BiasAdd"}
    assert not report["sound"]


def test_doctor_on_a_gpu_with_faulty_flash_attention(
    on_h200: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_flash = faulty(ATTENTION, lambda mask: mask == 0 or bool(mask & BACKENDS["flash"]))
    on_h200(machine(is_flash))
    assert doctor() == 1
    assert 'faulty backends: flash; pass provider_options={"sdpa_kernel": "26"}' in capsys.readouterr().out
    on_h200(machine(faulty(ATTENTION, lambda mask: mask == BACKENDS["flash"])))
    assert doctor() == 0
    assert "faulty backends: flash; generating images does not use them" in capsys.readouterr().out
    monkeypatch.setattr(command, "machine_of", lambda index, library: MACHINE | {"compute_capability": "8.0"})
    on_h200(machine(is_flash))
    assert doctor() == 0  # the fault is known there, and the run-time leaves flash out
    assert "faulty backends: flash; generating images does not use them" in capsys.readouterr().out


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_our_own_kernels_are_checked_and_remembered(
    quick: list[str], emulated: EmulatedGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*quick, "--json", str(tmp_path / "report.json")) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"our own kernels, used without a check on this GPU: {emulated.library.path}" in shown
    assert "our own kernels on NVIDIA H200" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    found = report["own_kernels"]
    names = ("LayerNorm", "SumRows")
    count = sum(each.case.op_type in names and (each.first_use or not quick) for each in OWN_CASE_SET.checks)
    assert (found["checked"], found["full"], found["faults"]) == (count, not quick, [])
    assert {line["name"] for line in found["summary"]} == set(names)
    assert found["key"]["kernel_sources"] == emulated.library.sources
    emulated.ran.clear()
    assert first_check.kernel_faults(0, emulated.library, names, ("e4m3", "e5m2", "int8")) == []
    assert emulated.ran == []  # a pipeline on a GPU that is not trusted needs no check


def test_wrong_kernels_of_our_own_are_found(emulated: EmulatedGpu, capsys: pytest.CaptureFixture[str]) -> None:
    emulated.factors = {"LayerNorm": 1.25}
    assert doctor() == 1
    shown = capsys.readouterr().out
    assert "wrong LayerNorm float16" in shown
    assert "faulty: LayerNorm; set SDONNX_KERNELS=0 to do without our own kernels" in shown


def test_doctor_says_how_the_library_is_installed(
    on_h200: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_h200(machine())
    monkeypatch.setattr(command, "usable_library", kernel_library.usable_library)
    monkeypatch.setattr(kernel_library, "find_kernel_library", lambda environment: None)
    monkeypatch.delenv(kernel_library.KERNEL_LIBRARY, raising=False)
    assert doctor() == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "note our own kernels are not used: sdonnx-kernels is not installed; pip install " in shown
    assert "[cuda]'" in shown


def test_a_kernel_that_does_not_run_is_status_1(on_h200: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on_h200(machine(failure_of=lambda content, mask: "no memory" if content in graphs_of("BiasAdd") else ""))
    assert doctor() == 1
    shown = capsys.readouterr().out
    assert "not available BiasAdd float32 C=320 3x7: no memory" in shown


def test_a_missing_requirement_is_status_1_and_runs_no_kernel(
    on_h200: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_h200(lambda content, weights, mask: pytest.fail("a kernel"))
    monkeypatch.setattr(command, "collect_facts", lambda: replace(GOOD, missing=("libcudnn.so.9",)))
    assert doctor("--json", str(tmp_path / "report.json")) == 1
    shown = capsys.readouterr().out
    assert (
        "missing CUDA libraries: not found: libcudnn.so.9; expected the libraries of CUDA 13 and cuDNN 9; pip install"
        in shown
    )
    assert "kernels: not run" in shown
    assert json.loads((tmp_path / "report.json").read_text())["sound"] is False


def test_quick_runs_the_cases_of_a_first_use(on_h200: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on_h200(machine())
    assert doctor("--quick") == 0
    assert "3 of 3 kernel cases correct" in capsys.readouterr().out
    on_h200(machine(faulty("BiasAdd")))
    assert doctor("--quick") == 1
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
    assert (report["verdict"]["key"], report["verdict"]["full"]) == (MACHINE, not quick)
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
    assert counts == [pytest.approx(len(CASE_SET.checks), rel=0.1), pytest.approx(len(OWN_CASE_SET.checks), rel=0.1)]
    assert f"{first_check.LIMIT_S:.0f} s" in text
