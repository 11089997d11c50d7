"""`scripts/verify_kernels.py`, as far as it runs without a GPU: two forms timed in turn, and its errors."""

from __future__ import annotations

import os
from pathlib import Path

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


def test_every_gpu_test_that_the_script_names_exists() -> None:
    text = (verify_kernels.ROOT / verify_kernels.TESTS).read_text(encoding="utf-8")
    assert "def test_sanitized(" in text
    assert all(selected.startswith("sanitized") for selected in verify_kernels.TOOLS.values())
