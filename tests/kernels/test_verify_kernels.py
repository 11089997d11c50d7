"""`scripts/verify_kernels.py`, as far as it runs without a GPU: two forms timed in turn, and its errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.pipelines import refused
from support.scripts import load_script

from sdonnx.doctor.kernel_library import KERNEL_LIBRARY
from sdonnx.errors import FolderError

verify_kernels = load_script("verify_kernels")


def test_form_is_compared_with_itself(micro_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a library both pipelines load the same graphs: the comparison must find no difference."""
    monkeypatch.setattr(verify_kernels, "_STEPS", (1, 3))
    monkeypatch.setattr(verify_kernels, "_ROUNDS", 2)
    monkeypatch.setenv(KERNEL_LIBRARY, "as it was")
    found = verify_kernels.forms(micro_cpu, "0", {"height": 64, "width": 64})
    assert found["latents_relative_error"] == 0
    assert found["image_psnr_db"] == float("inf")
    assert found["repeats"] == {"onnxruntime": True, "own": True}
    assert {name: len(times) for name, times in found["step_ms"].items()} == {"onnxruntime": 2, "own": 2}
    assert os.environ[KERNEL_LIBRARY] == "as it was"


def test_folder_with_one_form_is_refused(micro_cpu: Path) -> None:
    with refused(FolderError, "has no graphs with our own operators"):
        verify_kernels.forms(micro_cpu, "/some/library.so", {})


def test_missing_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_kernels, "find_kernel_library", lambda: None)
    monkeypatch.setattr(verify_kernels, "BUILT", tmp_path / "missing.so")
    assert verify_kernels.main(["--json", str(tmp_path / "record.json")]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "missing.so is missing; expected the library of kernels; run make -C kernels" in shown


@pytest.mark.parametrize(
    ("checks", "sanitizer", "expected"),
    [
        ("all", "/cuda/sanitizer", ["tests", *verify_kernels.TOOLS]),
        ("all", None, ["tests"]),
        ("tests", "/cuda/sanitizer", ["tests"]),
        ("sanitizer", "/cuda/sanitizer", list(verify_kernels.TOOLS)),
        ("none", "/cuda/sanitizer", []),
    ],
)
def test_chosen_checks_run(
    checks: str, sanitizer: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one fails, and so does the script."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> dict[str, Any]:
        commands.append(command)
        return {"status": int(len(commands) == len(expected))}

    monkeypatch.setattr(verify_kernels, "find_kernel_library", lambda: tmp_path / "x.so")
    monkeypatch.setattr(verify_kernels.shutil, "which", lambda name: sanitizer)
    monkeypatch.setattr(verify_kernels, "environment", dict)
    monkeypatch.setattr(verify_kernels, "_run", run)
    record = tmp_path / "record.json"
    assert verify_kernels.main(["--json", str(record), "--checks", checks]) == int(bool(expected))
    tools = [command[command.index("--tool") + 1] if "--tool" in command else "tests" for command in commands]
    assert tools == expected
    assert [command[0] == sanitizer for command in commands] == [tool != "tests" for tool in tools]
    assert json.loads(record.read_text())["checks"] == [{"status": int(tool == expected[-1])} for tool in expected]


def test_missing_sanitizer_is_one_line_if_it_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_kernels, "find_kernel_library", lambda: tmp_path / "x.so")
    monkeypatch.setattr(verify_kernels.shutil, "which", lambda name: None)
    assert verify_kernels.main(["--json", str(tmp_path / "record.json"), "--checks", "sanitizer"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "compute-sanitizer is not installed; expected that of CUDA's toolkit; pass --checks tests" in shown
    assert not (tmp_path / "record.json").exists()


def test_every_gpu_test_that_the_script_names_exists() -> None:
    text = (verify_kernels.ROOT / verify_kernels.TESTS).read_text(encoding="utf-8")
    assert "def test_sanitized(" in text
    assert all(selected.startswith("sanitized") for selected in verify_kernels.TOOLS.values())
