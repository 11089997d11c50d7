"""Build backend of setuptools that finds nvcc, or asks for wheels with it where the machine has none.

NVCC and CUDA_LIB in the environment name another compiler, and the folder of its static CUDA run-time. SDONNX_GLIBC is
the oldest glibc that the library is for, such as 2.28; without it, that of this machine.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "WHEELS",
    "build_sdist",
    "build_wheel",
    "compiler_variables",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
    "sources_digest",
]

WHEELS = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
"""nvcc as wheels, 100 MB, each pinned, because pip would combine nvcc with parts of newer releases."""

LINKER = "ziglang==0.17.1"
"""What links for an older glibc: it has the symbols of each."""

TOOLKIT = "/usr/local/cuda"  # where NVIDIA's installers put it
OLDEST_RELEASE = 13  # of CUDA: cuBLASLt is called as in 13, and older releases cannot compile for all architectures


def get_requires_for_build_wheel(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    """Return the packages that building needs besides setuptools (PEP 517)."""
    for tool in ("make", "g++"):
        if shutil.which(tool) is None:
            raise SystemExit(
                f"sdonnx-kernels cannot be compiled: found no {tool}, expected make and g++, with which nvcc compiles; "
                "install them, on Debian with apt-get install make g++, or set SDONNX_KERNELS=0 to install sdonnx "
                "without our own kernels"
            )
    has_nvcc = "NVCC" in os.environ or machine_nvcc() is not None
    others = [*(() if has_nvcc else WHEELS), *([LINKER] if "SDONNX_GLIBC" in os.environ else [])]
    return [*build_meta.get_requires_for_build_wheel(config_settings), *others]


def sources_digest() -> str:
    """Return a digest of what the library is compiled from. A wheel contains it, to be compared with a checkout."""
    folder, digest = Path(__file__).resolve().parent, hashlib.sha256()
    files = [folder / "Makefile", folder / "exports.map", *folder.glob("src/*"), *folder.glob("weights/*")]
    for path in sorted(files):
        digest.update(f"{path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def compiler_variables() -> dict[str, str]:
    """Return the variables of the Makefile that name the compiler: NVCC, and CUDA_LIB for one of the wheels."""
    linker = {"ZIG": f"'{sys.executable}' -m ziglang"} if "SDONNX_GLIBC" in os.environ else {}
    if "NVCC" in os.environ:
        return linker | {name: os.environ[name] for name in ("NVCC", "CUDA_LIB") if name in os.environ}
    nvcc = machine_nvcc()
    if nvcc is not None:
        return linker | {"NVCC": str(nvcc)}
    for root in _wheel_roots():
        if (root / "bin" / "nvcc").is_file():
            return linker | {"NVCC": str(root / "bin" / "nvcc"), "CUDA_LIB": str(root / "lib")}
    raise SystemExit(
        f"sdonnx-kernels cannot be compiled: found no nvcc of CUDA {OLDEST_RELEASE} or newer, expected that of the "
        f"machine or that of wheels; pip install {' '.join(WHEELS)}"
    )


def machine_nvcc() -> Path | None:
    """Return the machine's nvcc, if it is new enough."""
    installed = [shutil.which("nvcc"), *(Path(root) / "bin" / "nvcc" for root in _toolkits())]
    return next((Path(path) for path in installed if path and _release(Path(path)) >= OLDEST_RELEASE), None)


def _toolkits() -> Iterator[str]:
    yield from (os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name))
    yield TOOLKIT


def _release(nvcc: Path) -> int:
    """Return the major number of the release; 0 if the file is no nvcc that runs."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return 0
    found = re.search(r"release (\d+)\.", text)
    return int(found[1]) if found else 0


def _wheel_roots() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(folder).glob("cu[0-9]*"), reverse=True)
