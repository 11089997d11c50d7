"""The versions of CUDA's libraries in a key: those of the libraries that kernels in the same process use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sdonnx

_SOURCES = {
    "libcudart.so.13": "int cudaRuntimeGetVersion(int* version) {{ *version = {} ; return 0; }}",
    "libcudnn.so.9": "unsigned long cudnnGetVersion() {{ return {}; }}",
    "libcublasLt.so.13": "unsigned long cublasLtGetVersion() {{ return {}; }}",
}

_ONNXRUNTIME = """
import ctypes, os
__version__ = "0"
def preload_dlls():
    for name in sorted(os.listdir(os.environ["WHEELS"])):
        ctypes.CDLL(os.path.join(os.environ["WHEELS"], name))
"""

_PROGRAM = """
import ctypes, json, os, sys
for path in sys.argv[1:]:
    ctypes.CDLL(path)
from sdonnx.doctor.gpu import cublas_version, cuda_libraries
print(json.dumps({**cuda_libraries(), "cublas": cublas_version()}))
"""
_REVERSED = _PROGRAM.replace("{**cuda_libraries(), ", "{").replace("()}", "(), **cuda_libraries()}")


def _libraries(folder: Path, version: int) -> Path:
    """Write libraries with the names of CUDA's that say that they are of a version."""
    folder.mkdir()
    for name, source in _SOURCES.items():
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run(command, input=source.format(version), text=True, check=True)
    return folder


@pytest.mark.parametrize("program", [_PROGRAM, _REVERSED])
@pytest.mark.parametrize(("first", "version"), [("", "91900"), ("torch", "92000")])
def test_versions_are_those_of_the_libraries_that_kernels_use(
    program: str, first: str, version: str, tmp_path: Path
) -> None:
    """The wheels' rather than the system's, but for a library that another package has loaded before."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed, which builds the libraries")
    folders = {
        name: _libraries(tmp_path / name, number)
        for name, number in (("system", 91400), ("wheels", 91900), ("torch", 92000))
    }
    (tmp_path / "onnxruntime.py").write_text(_ONNXRUNTIME)
    loaded = [str(folders[first] / name) for name in _SOURCES] if first else []
    environment = os.environ | {
        "WHEELS": str(folders["wheels"]),
        "LD_LIBRARY_PATH": str(folders["system"]),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(sdonnx.__file__).parents[1])]),
    }
    command = [sys.executable, "-P", "-c", program, *loaded]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == dict.fromkeys(("cuda_runtime", "cudnn", "cublas"), version)
