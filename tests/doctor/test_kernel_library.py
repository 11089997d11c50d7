"""Finding the library of our own operators, and the reasons not to use it."""

from __future__ import annotations

import sys
from pathlib import Path

import onnxruntime
import pytest
from support.kernel_library import emulated_library
from support.pipelines import refused

from sdonnx.doctor import kernel_library
from sdonnx.doctor.kernel_library import (
    KERNEL_LIBRARY,
    OPERATORS,
    KernelLibrary,
    find_kernel_library,
    open_kernel_library,
    usable_library,
)
from sdonnx.errors import OptionError, ProviderError
from sdonnx.installation import install_command

ALL = ("80", "86", "89", "90a", "100", "120")


@pytest.mark.parametrize(
    ("architectures", "capability", "found"),
    [
        (ALL, (8, 0), "80"),
        (ALL, (8, 6), "80 86"),
        (ALL, (8, 7), "80 86"),
        (ALL, (8, 9), "80 86 89"),
        (ALL, (9, 0), "90a"),
        (ALL, (10, 0), "100"),
        (ALL, (10, 3), "100"),
        (ALL, (12, 1), "120"),
        (ALL, (7, 5), ""),
        (ALL, (11, 0), ""),
        (("86",), (8, 0), ""),
        (("90a",), (9, 1), ""),
        (("emulation",), (9, 0), ""),
        (("",), (9, 0), ""),
    ],
)
def test_code_that_runs_on_a_gpu(architectures: tuple[str, ...], capability: tuple[int, int], found: str) -> None:
    library = KernelLibrary(Path("x.so"), architectures, "c0ffee", "13.0.88")
    assert library.architectures_for(capability) == tuple(found.split())


def test_library_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "mine.so"
    file.touch()
    assert find_kernel_library({KERNEL_LIBRARY: str(file)}) == file
    assert find_kernel_library({KERNEL_LIBRARY: "0"}) is None
    with refused(OptionError):
        find_kernel_library({KERNEL_LIBRARY: str(tmp_path / "other.so")})


def test_library_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sdonnx_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sdonnx_kernels", raising=False)
    assert find_kernel_library({}) is None  # a source tree that was not built
    library = package / "libsdonnx_kernels.so"
    library.touch()
    assert find_kernel_library({}) == library
    assert "sdonnx_kernels" not in sys.modules


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "_PACKAGE", "sdonnx_kernels_that_is_missing")
    assert find_kernel_library({}) is None
    assert usable_library((9, 0), {}) == (None, f"sdonnx-kernels is not installed; {install_command('cuda')}")
    assert usable_library((9, 0), {KERNEL_LIBRARY: "0"}) == (None, "SDONNX_KERNELS is 0")
    assert usable_library(None, {}) == (None, "our own kernels are for GPUs")


def test_broken_library_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.so"
    file.write_text("no library")
    with refused(ProviderError):
        open_kernel_library(file)
    library, reason = usable_library((9, 0), {KERNEL_LIBRARY: str(file)})
    assert library is None
    assert "cannot be loaded" in reason
    assert "\n" not in reason


def test_version_of_onnxruntime_that_was_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.99.0")
    library, reason = usable_library((9, 0), {KERNEL_LIBRARY: str(emulated_library())})
    assert library is None
    assert reason.startswith("the operators of sdonnx-kernels were not tried with ONNX Runtime 1.99.0")


def test_operators_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "OPERATORS", OPERATORS + 1)
    with refused(ProviderError, f"has operators of version {OPERATORS}; expected version {OPERATORS + 1}"):
        open_kernel_library(emulated_library())


def test_library_for_other_gpus() -> None:
    library, reason = usable_library((9, 0), {KERNEL_LIBRARY: str(emulated_library())})
    assert library is None
    assert reason.endswith("has kernels for sm_emulation, and this GPU is sm_90")
