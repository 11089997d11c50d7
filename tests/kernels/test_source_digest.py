"""The digest of the kernels' sources: changed by every edit, the same everywhere, and built into the library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.kernel_library import SOURCES, compiled_library, emulated_library

from sdonnx.doctor import kernel_library
from sdonnx.doctor.kernel_library import open_kernel_library, usable_library
from sdonnx.errors import ProviderError

EDIT = "\n// an edit\n"


def digest(folder: Path = SOURCES, *variables: str) -> str:
    command = ["make", "-C", str(folder), "--silent", "--no-print-directory", "digest", *variables]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the sources in another folder."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed, which computes the digest")
    folder = tmp_path / "some kernels"
    shutil.copytree(SOURCES / "src", folder / "src")
    shutil.copy(SOURCES / "Makefile", folder)
    return folder


def test_every_source_that_nvcc_reads_changes_the_digest(copied: Path) -> None:
    before = digest(copied)
    for path in sorted((copied / "src").iterdir()):
        text = path.read_text(encoding="utf-8")
        path.write_text(text + EDIT, encoding="utf-8")
        # nvcc does not define SDONNX_EMULATION, for which device.cuh includes this file.
        assert (digest(copied) == before) == (path.name == "emulation.h"), path.name
        path.write_text(text, encoding="utf-8")
    (copied / "src" / "new.cuh").write_text(EDIT, encoding="utf-8")
    assert digest(copied) != before


def test_flags_of_the_code_change_the_digest(copied: Path) -> None:
    before, makefile = digest(copied), copied / "Makefile"
    text = makefile.read_text(encoding="utf-8")
    assert text.count(" -O3 ") == 1
    makefile.write_text(text.replace(" -O3 ", " -O3 -use_fast_math "), encoding="utf-8")
    assert digest(copied) != before


def test_digest_does_not_depend_on_the_machine(copied: Path) -> None:
    others = ("ARCHITECTURES=80 86", "THREADS=7", "NVCC=/some/nvcc", "CUDA_LIB=/some/lib", "OUT=/some/out")
    assert digest(copied, *others) == digest()


def test_emulation_is_what_the_digest_leaves_out() -> None:
    """Otherwise its edits would change what nvcc compiles."""
    including = [path for path in (SOURCES / "src").iterdir() if '"emulation.h"' in path.read_text(encoding="utf-8")]
    assert [path.name for path in including] == ["device.cuh"]
    head, _, _ = including[0].read_text(encoding="utf-8").partition('"emulation.h"')
    assert head.rpartition("#if")[2].startswith("def SDONNX_EMULATION\n")


@pytest.mark.parametrize("build", ["emulated", pytest.param("compiled", marks=pytest.mark.slow)])
def test_library_names_its_sources_and_compiler(build: str) -> None:
    library = open_kernel_library(emulated_library() if build == "emulated" else compiled_library())
    assert library.sources == digest()
    if build == "emulated":
        assert library.compiler == "emulation"
    else:
        version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
        assert f"V{library.compiler}\n" in version


def test_library_that_does_not_name_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of an older build: the results of a check would not name it."""
    program, file = tmp_path / "old.cpp", tmp_path / "old.so"
    words = f"operators={kernel_library.OPERATORS} api=18 architectures=90a"
    program.write_text(f'extern "C" const char* sdonnx_kernels_build() {{ return "{words}"; }}\n')
    emulated_library()  # skips without a compiler
    subprocess.run(["g++", "-shared", "-fPIC", str(program), "-o", str(file)], check=True)
    with pytest.raises(ProviderError, match=r"does not name its sources; .*; install it again"):
        open_kernel_library(file)
    monkeypatch.setenv(kernel_library.KERNEL_LIBRARY, str(file))
    library, reason = usable_library((9, 0))
    assert library is None
    assert "does not name its sources" in reason
