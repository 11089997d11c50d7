"""Find `libsdonnx_kernels.so`, the library of our own operators, and decide whether this machine can use it.

The library comes with the package `sdonnx-kernels`, or is built in the repository's folder `kernels/`. It uses slots of
ONNX Runtime's C API that no header in a wheel describes, so only versions that were tried are accepted.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdonnx.errors import OptionError, ProviderError
from sdonnx.installation import kernels_command

__all__ = [
    "KERNEL_LIBRARY",
    "OPERATORS",
    "TRIED_VERSIONS",
    "KernelLibrary",
    "find_kernel_library",
    "open_kernel_library",
    "require_tried_version",
    "usable_library",
]

KERNEL_LIBRARY = "SDONNX_KERNELS"
"""The environment variable with the path of the library, or 0 to use none."""

TRIED_VERSIONS = ("1.31.1",)
"""The versions of ONNX Runtime that the slots of kernels/src/ort_abi.h were tried with."""

OPERATORS = 13
"""The version of the operators' contracts; it changes with their inputs, outputs and attributes."""

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
        major, minor = capability
        found = []
        for name in self.architectures:
            digits = name.rstrip("af")
            if not digits.isdigit() or int(digits[:-1]) != major:
                continue
            if int(digits[-1]) == minor or (name == digits and int(digits[-1]) < minor):
                found.append(name)
        return tuple(found)


def find_kernel_library(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the library, from the environment variable or else from the installed package.

    Returns:
        None if there is none, or if the variable is 0.

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
    if words.get("operators") != str(OPERATORS):
        raise ProviderError(
            f"{path} has operators of version {words.get('operators')}",
            f"version {OPERATORS}, that of this sdonnx",
            f"install that: {kernels_command()}",
        )
    if not words.get("sources") or not words.get("compiler"):
        raise ProviderError(
            f"{path} does not name its sources", "a library that does", f"install it again: {kernels_command()}"
        )
    return KernelLibrary(path, tuple(words.get("architectures", "").split("-")), words["sources"], words["compiler"])


def require_tried_version(version: str) -> None:
    """Raise unless the library was tried with a version of ONNX Runtime.

    Raises:
        ProviderError: it was not.
    """
    if version not in TRIED_VERSIONS:
        raise ProviderError(
            f"the operators of sdonnx-kernels were not tried with ONNX Runtime {version}",
            f"one of {', '.join(TRIED_VERSIONS)}",
            "install that version, or a newer sdonnx",
        )


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
    try:
        require_tried_version(str(onnxruntime.__version__))
        library = open_kernel_library(path)
    except ProviderError as error:
        return None, str(error)
    if not library.architectures_for(capability):
        names = ", ".join(f"sm_{name}" for name in library.architectures)
        return None, f"{path} has kernels for {names}, and this GPU is sm_{capability[0]}{capability[1]}"
    return library, ""
