"""Find `libsdonnx_kernels.so`, the library of our own operators, and decide which kernels this machine can use.

The library comes with the package `sdonnx-kernels`, or is built in the repository's folder `kernels/`. It uses slots of
ONNX Runtime's C API that no header in a wheel describes, so only versions that were tried are accepted.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdonnx.errors import OptionError, ProviderError
from sdonnx.installation import kernels_command

__all__ = [
    "KERNEL_LIBRARY",
    "KNOWN_FAULTS",
    "OPERATORS",
    "TRIED_VERSIONS",
    "TRUSTED",
    "KernelLibrary",
    "find_kernel_library",
    "is_trusted",
    "open_kernel_library",
    "sdpa_kernel",
    "usable_library",
]

KERNEL_LIBRARY = "SDONNX_KERNELS"
"""The environment variable with the path of the library, or 0 to use none."""

TRIED_VERSIONS = ("1.31.1",)
"""The versions of ONNX Runtime that were tried: with the slots of kernels/src/ort_abi.h, and writing weights where
sessions read them (`sdonnx.runtime.device.session_weights`)."""

OPERATORS = 13
"""The version of the operators' contracts; it changes with their inputs, outputs and attributes."""

TRUSTED = {((9, 0), 13): "docs/results/own-kernels-h100.json"}
"""By compute capability and release of our kernels (`OPERATORS`), the record of the test that earned the trust: all of
their cases ran on such a GPU and were correct.

Add a row with the record of `test_whole_check` in tests/gpu/test_kernels_gpu.py, on a GPU of that capability.
"""

KNOWN_FAULTS: Mapping[tuple[tuple[int, ...], int], int] = {((1, 31, 1), 8): 2 | 16}
"""The provider option that leaves wrong backends of attention out, by the first version of ONNX Runtime that has the
fault and the major compute capability where it would choose one. A row of a later version replaces an earlier one.

Flash attention is wrong in fp16 for heads of 160 (docs/results/doctor-h200.json). From compute capability 9.0 on,
ONNX Runtime prefers cuDNN to it, and before 8.0 it has no flash attention.
"""

_PACKAGE = "sdonnx_kernels"
_FILE = "libsdonnx_kernels.so"


@dataclass(frozen=True)
class KernelLibrary:
    """A library that can be loaded, of this version's operators.

    Attributes:
        path: its file.
        architectures: the architectures that kernels were compiled for, as nvcc names them: "80", "90a".
        sources: the digest of the sources and flags that it was compiled from (kernels/Makefile).
        compiler: the version of nvcc, such as "13.0.88".
    """

    path: Path
    architectures: tuple[str, ...]
    sources: str
    compiler: str

    def architectures_for(self, capability: tuple[int, int]) -> tuple[str, ...]:
        """Return the architectures with kernels that run on a GPU; none if it has no kernels for the GPU.

        Code for sm_XY runs on all GPUs of the same major version and the same or a later minor version, and code for
        sm_XYa only on that one (CUDA C++ Programming Guide, "Binary Compatibility").

        Args:
            capability: compute capability, major and minor.
        """
        known = [name for name in self.architectures if name.rstrip("af").isdigit()]
        minors = {
            name: capability[1] - int(name.rstrip("af")[-1])
            for name in known
            if int(name.rstrip("af")[:-1]) == capability[0]
        }
        return tuple(name for name, ahead in minors.items() if ahead == 0 or (ahead > 0 and name.isdigit()))


def find_kernel_library(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the library, from the environment variable or else from the installed package, or None.

    Raises:
        OptionError: the variable names no file.
    """
    named = environment.get(KERNEL_LIBRARY, "")
    if named == "0":
        return None
    if named:
        path = Path(named)
        if not path.is_file():
            raise OptionError(f"{KERNEL_LIBRARY} is {named!r}, which is no file", f"the path of {_FILE}, or 0")
        return path.resolve()
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    return next((folder / _FILE for folder in folders if (folder / _FILE).is_file()), None)


def open_kernel_library(path: Path) -> KernelLibrary:
    """Load the library, which needs neither a GPU nor CUDA, and read what it was built for.

    Raises:
        ProviderError: it cannot be loaded, or has the operators of another version.
    """
    try:
        build = ctypes.CDLL(str(path)).sdonnx_kernels_build
    except (OSError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ProviderError(
            f"{path} cannot be loaded ({reason})", f"{_FILE} of this version", f"install it again: {kernels_command()}"
        ) from error
    build.restype = ctypes.c_char_p
    words = dict(word.split("=", 1) for word in build().decode().split())
    found = expected = ""
    if words.get("operators") != str(OPERATORS):
        found, expected = f"has operators of version {words.get('operators')}", f"version {OPERATORS}"
    elif not words.get("sources") or not words.get("compiler"):
        found, expected = "does not name its sources", "a library that does"
    if found:
        raise ProviderError(f"{path} {found}", expected, f"install it again: {kernels_command()}")
    return KernelLibrary(path, tuple(words.get("architectures", "").split("-")), words["sources"], words["compiler"])


def usable_library(
    capability: tuple[int, int] | None, environment: Mapping[str, str] = os.environ
) -> tuple[KernelLibrary | None, str]:
    """Return the library if this machine can use it, and otherwise the reason, in one line.

    Args:
        capability: compute capability of the GPU, major and minor; None for the CPU.
        environment: the environment variables.

    Raises:
        OptionError: SDONNX_KERNELS names no file.
    """
    import onnxruntime

    path = find_kernel_library(environment)
    if capability is None:
        return None, "our own kernels are for GPUs"
    if path is None:
        if environment.get(KERNEL_LIBRARY) == "0":
            return None, f"{KERNEL_LIBRARY} is 0"
        return None, f"sdonnx-kernels is not installed; {kernels_command()}"
    if (version := str(onnxruntime.__version__)) not in TRIED_VERSIONS:
        found = f"the operators of sdonnx-kernels were not tried with ONNX Runtime {version}"
        return None, f"{found}; expected one of {', '.join(TRIED_VERSIONS)}; install that version, or a newer sdonnx"
    try:
        library = open_kernel_library(path)
    except ProviderError as error:
        return None, str(error)
    if not library.architectures_for(capability):
        names = ", ".join(f"sm_{name}" for name in library.architectures)
        return None, f"{path} has kernels for {names}, and this GPU is sm_{capability[0]}{capability[1]}"
    return library, ""


def is_trusted(capability: tuple[int, int], release: int = OPERATORS) -> bool:
    """Return whether our own kernels of a release are used on a GPU without a check."""
    return (capability, release) in TRUSTED


def sdpa_kernel(version: str, capability: tuple[int, int]) -> int:
    """Return the bits of the attention backends that ONNX Runtime may use, 0 for its own choice.

    Args:
        version: the version of ONNX Runtime.
        capability: compute capability of the GPU, major and minor.
    """
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    rows = {since: bits for (since, major), bits in KNOWN_FAULTS.items() if major == capability[0] and since <= numbers}
    return rows[max(rows)] if rows else 0
