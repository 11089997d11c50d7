"""The versions of CUDA's libraries in a key: those of the libraries that kernels in the same process use.

The process that checks kernels in the background uses the same files as the one that starts it.
"""

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
from sdonnx.doctor.loaded_libraries import load_libraries, loaded_libraries

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

_LOADED = """
import ctypes, json, sys
for path in sys.argv[1:]:
    ctypes.CDLL(path)
from sdonnx.doctor.loaded_libraries import loaded_libraries
print(json.dumps(loaded_libraries()))
"""

# Starts the program of the check in the background, with a main that prints versions.
_ASKING = """
import ctypes, json, subprocess, sys
for path in sys.argv[2:]:
    ctypes.CDLL(path)
from sdonnx.doctor.background_check import check_command
from sdonnx.doctor.loaded_libraries import loaded_libraries
command = check_command(0)
command[3] = command[3].replace("from sdonnx.__main__ import main", sys.argv[1])
here = loaded_libraries()
done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
print(json.dumps([here, json.loads(done.stdout)]))
"""
_PRINT_VERSIONS = """
import json
from sdonnx.doctor.gpu import cublas_version, cuda_libraries
from sdonnx.doctor.loaded_libraries import loaded_libraries
main = lambda _: print(json.dumps([{**cuda_libraries(), "cublas": cublas_version()}, loaded_libraries()]))
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


@pytest.mark.parametrize("program", [_PROGRAM, _REVERSED])
@pytest.mark.parametrize(("first", "version"), [("", "91900"), ("torch", "92000")])
def test_versions_are_those_of_the_libraries_that_kernels_use(
    program: str, first: str, version: str, folders: dict[str, Path]
) -> None:
    """The wheels' rather than the system's, but for a library that another package has loaded before."""
    loaded = [str(folders[first] / name) for name in _SOURCES] if first else []
    found = _printed(program, loaded, folders)
    assert found == dict.fromkeys(("cuda_runtime", "cudnn", "cublas"), version)


@pytest.mark.parametrize("names", [tuple(_SOURCES), ("libcudnn.so.9",), ()])
def test_check_in_the_background_loads_the_files_of_the_asking_process(
    names: tuple[str, ...], folders: dict[str, Path]
) -> None:
    """The files that it has not loaded are those of the wheels, as they would be in the asking process."""
    asked = [str(folders["torch"] / name) for name in names]
    (here, (versions, there)) = _printed(_ASKING, [_PRINT_VERSIONS, *asked], folders)
    assert sorted(here) == sorted(asked)
    expected = {name: folders["torch" if name in names else "wheels"] / name for name in _SOURCES}
    assert sorted(there) == sorted(map(str, expected.values()))
    parts = {"libcudart.so.13": "cuda_runtime", "libcudnn.so.9": "cudnn", "libcublasLt.so.13": "cublas"}
    assert versions == {part: "92000" if name in names else "91900" for name, part in parts.items()}


def test_file_of_a_name_is_the_first_that_was_loaded(folders: dict[str, Path]) -> None:
    asked = [str(folders[name] / "libcudnn.so.9") for name in ("wheels", "torch", "system")]
    assert _printed(_LOADED, asked, folders) == asked[:1]


def test_libraries_that_cannot_be_loaded_are_left_out(tmp_path: Path) -> None:
    """Such as a file that an update has removed: the check then reports the versions that it finds itself."""
    (tmp_path / "libcudnn.so.9").write_text("no library")
    paths = [str(tmp_path / name) for name in ("libcudnn.so.9", "libcudart.so.13")]
    load_libraries(paths)
    assert not set(paths) & set(loaded_libraries())
