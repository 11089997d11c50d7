"""Build the library of our own operators for tests: for the CPU with g++, or for one GPU architecture with nvcc."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import onnxruntime
import pytest
from filelock import FileLock

from support.pipeline_cache import CACHE_VARIABLE

SOURCES = Path(__file__).resolve().parents[2] / "kernels"


def _code() -> str:
    digest = hashlib.sha256()
    for path in [SOURCES / "Makefile", *sorted((SOURCES / "src").iterdir())]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _built(target: str, *variables: str) -> Path:
    """Return the file that `make` wrote, built once for each state of the sources."""
    root = Path(os.environ.get(CACHE_VARIABLE) or Path(tempfile.gettempdir()) / "sdonnx-test-kernels")
    folder = root / f"kernels-{_code()}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        command = ["make", "-C", str(SOURCES), "--no-print-directory", target, f"OUT={folder}", *variables]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@functools.cache
def emulated_library() -> Path:
    """Return the library with kernels for the CPU (`kernels/src/emulation.h`); skip the test without g++ or make."""
    for tool in ("g++", "make"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, which builds the emulated kernels")
    return _built("emulated") / "libsdonnx_kernels_emulated.so"


@functools.cache
def compiled_library(architecture: str = "90a") -> Path:
    """Return the library with kernels for one architecture; skip the test without nvcc or make."""
    for tool in ("nvcc", "make"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, which builds the kernels; kernels/compiler.py names its wheels")
    return _built("all", f"ARCHITECTURES={architecture}") / "libsdonnx_kernels.so"


def options_with(library: Path) -> onnxruntime.SessionOptions:
    """Return quiet session options for graphs with our own operators."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.register_custom_ops_library(str(library))
    return options
