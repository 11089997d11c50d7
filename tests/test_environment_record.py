"""The record of the machine, the packages and the commit of a measurement."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import psutil
import pytest

from sdonnx.environment_record import environment, git_commit


def test_environment_contains_versions_and_machine() -> None:
    found = environment()
    versions = found["packages"]
    assert versions["python"] == platform.python_version()
    for name in ("torch", "diffusers", "onnxruntime", "numpy", "transformers", "jinja2"):
        assert versions[name] == importlib.metadata.version(name)
    assert versions["sdonnx"]
    assert versions["xformers"] is None
    assert found["machine"]["cpu"]
    assert found["machine"]["cpus"] == len(psutil.Process().cpu_affinity() or ())


def test_commit_from_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDONNX_COMMIT", "abc")
    assert environment()["git"] == {"commit": "abc"}


def test_commit_of_a_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert git_commit(tmp_path) == {"commit": head, "changed": False}
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == {"commit": head, "changed": True}
