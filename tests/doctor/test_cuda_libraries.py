"""The versions of CUDA's libraries are reported of the files that kernels in the same process use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from sdonnx.doctor.gpu import cuda_libraries
print(json.dumps(cuda_libraries()))
"""


def _libraries(folder: Path, version: int) -> Path:
    """Write libraries with the names of CUDA's that say that they are of a version."""
    folder.mkdir()
    for name, source in _SOURCES.items():
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run(command, input=source.format(version), text=True, check=True)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Return folders of libraries of three versions, by the origin that they stand for."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed, which builds the libraries")
    (tmp_path / "onnxruntime.py").write_text(_ONNXRUNTIME)
    versions = (("system", 91400), ("wheels", 91900), ("torch", 92000))
    return {name: _libraries(tmp_path / name, number) for name, number in versions}


def _printed(program: str, arguments: Sequence[str], folders: Mapping[str, Path]) -> Any:
    """Run a program where ONNX Runtime loads the wheels' libraries, and return the JSON that it prints."""
    environment = os.environ | {
        "WHEELS": str(folders["wheels"]),
        "LD_LIBRARY_PATH": str(folders["system"]),
        "PYTHONPATH": os.pathsep.join([str(folders["wheels"].parent), str(Path(sdonnx.__file__).parents[1])]),
    }
    command = [sys.executable, "-P", "-c", program, *arguments]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(("first", "version"), [("", "91900"), ("torch", "92000")])
def test_versions_are_those_of_the_libraries_that_kernels_use(
    first: str, version: str, folders: dict[str, Path]
) -> None:
    """The wheels' rather than the system's, but for a library that another package has loaded before."""
    loaded = [str(folders[first] / name) for name in _SOURCES] if first else []
    found = _printed(_PROGRAM, loaded, folders)
    assert found == dict.fromkeys(("cuda_runtime", "cudnn", "cublas"), version)
