"""scripts/setup_venv.sh: the installation goes on without our own kernels where they cannot be compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Stands for the environment's Python: notes each installation, which fails as long as $FAILS of them are to fail.
PYTHON = """#!/bin/bash
[[ "$*" == *" install "* ]] || exit 0
echo "kernels=${SDONNX_KERNELS:-} ${*: -1}" >>"$NOTES"
echo "output of $(wc -l <"$NOTES")"
(($(wc -l <"$NOTES") > FAILS))
"""


def set_up(folder: Path, runtime: str, fails: int, script: Path = ROOT) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run `setup_venv export` with a pip that fails some times; return the run and what pip was asked."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin" / "python").write_text(PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    (folder / "sdonnx-runtime").write_text(f"{runtime}\n")
    notes = folder / "notes"
    notes.write_text("")
    variables = {"SDONNX_VENV": str(folder), "NOTES": str(notes), "FAILS": str(fails)}
    environment = {name: value for name, value in os.environ.items() if name != "SDONNX_KERNELS"} | variables
    command = ["bash", "-euo", "pipefail", "-c", f"source '{script}/scripts/setup_venv.sh'; setup_venv export"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done, notes.read_text()


@pytest.mark.parametrize("runtime", ["cuda", "cpu"])
def test_one_installation_suffices(runtime: str, tmp_path: Path) -> None:
    for asked in (f"kernels= {ROOT}[{runtime},export]\n", ""):  # the second time, nothing is left to do
        done, notes = set_up(tmp_path, runtime, 0)
        assert (done.returncode, done.stderr, notes) == (0, "", asked)


def test_kernels_that_cannot_be_compiled_are_left_out(tmp_path: Path) -> None:
    done, notes = set_up(tmp_path, "cuda", 1)
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith(" s")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"our own kernels could not be compiled, so ONNX Runtime's are used; the reason is in {tmp_path}"
    )
    assert line.endswith(f"pip install {ROOT}/kernels")
    assert notes == f"kernels= {ROOT}[cuda,export]\nkernels=0 {ROOT}[cuda,export]\n"
    assert (tmp_path / "sdonnx-kernels.log").read_text() == "output of 1\n"
    assert (tmp_path / "sdonnx-install.log").read_text() == "output of 2\n"
    assert set_up(tmp_path, "cuda", 0)[1] == ""


@pytest.mark.parametrize(("runtime", "tries"), [("cuda", 2), ("cpu", 1)])
def test_installation_that_fails(runtime: str, tries: int, tmp_path: Path) -> None:
    done, notes = set_up(tmp_path, runtime, 9)
    assert (done.returncode, len(notes.splitlines())) == (2, tries)
    log, line = done.stderr.splitlines()
    assert log == f"output of {tries}"
    assert "the installation failed" in line
    assert len(set_up(tmp_path, runtime, 0)[1].splitlines()) == 1


@pytest.mark.parametrize(("runtime", "repeats"), [("cuda", 1), ("cpu", 0)])
def test_changed_kernels_are_installed_again(runtime: str, repeats: int, tmp_path: Path) -> None:
    script = tmp_path / "project"
    for name in ("scripts/setup_venv.sh", "setup.cfg", "setup.py", "pyproject.toml", "requirements.txt"):
        (script / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, script / name)
    shutil.copytree(ROOT / "kernels", script / "kernels", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    assert len(set_up(tmp_path / "venv", runtime, 0, script)[1].splitlines()) == 1
    (script / "kernels" / "sdonnx_kernels.egg-info").mkdir(exist_ok=True)  # as installing leaves it
    assert len(set_up(tmp_path / "venv", runtime, 0, script)[1].splitlines()) == 0
    (script / "kernels" / "src" / "library.cu").write_text("")
    assert len(set_up(tmp_path / "venv", runtime, 0, script)[1].splitlines()) == repeats
