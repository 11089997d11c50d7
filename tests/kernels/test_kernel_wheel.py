"""The wheel `sdonnx-kernels`: built, installed, found by sdonnx, and registered with ONNX Runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.kernel_library import SOURCES

import sdonnx
from sdonnx.doctor.kernel_library import KERNEL_LIBRARY

ARCHITECTURE = "90a"  # one, so that the test takes seconds; `make kernels` builds all

USE = """
import onnxruntime
from sdonnx.doctor.kernel_library import find_kernel_library, open_kernel_library, require_tried_version
path = find_kernel_library()
require_tried_version(onnxruntime.__version__)
print(path, *open_kernel_library(path).architectures)
onnxruntime.SessionOptions().register_custom_ops_library(str(path))
"""


def test_version_is_that_of_sdonnx() -> None:
    project = tomllib.loads((SOURCES / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == sdonnx.__version__


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed; kernels/Makefile names its wheels")
def test_wheel_is_built_and_installed(tmp_path: Path) -> None:
    source, target = tmp_path / "kernels", tmp_path / "site"
    shutil.copytree(SOURCES, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    environment = os.environ | {"ARCHITECTURES": ARCHITECTURE}
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    name, version, *tags = wheel.stem.split("-")
    assert (name, version) == ("sdonnx_kernels", sdonnx.__version__)
    assert tags[:2] == ["py3", "none"]
    assert tags[2].startswith("linux_")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", str(target), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(target), str(SOURCES.parent)])}
    found.pop(KERNEL_LIBRARY, None)
    used = subprocess.run([sys.executable, "-c", USE], env=found, capture_output=True, text=True, cwd=tmp_path)
    assert used.stderr == ""
    assert used.stdout.split() == [str(target / "sdonnx_kernels" / "libsdonnx_kernels.so"), ARCHITECTURE]
