"""Find the files of CUDA's and cuDNN's libraries that this process uses, and load the same ones in another process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["LIBRARIES", "load_libraries", "loaded_libraries"]

_CUDA = ("libcudart", "libnvJitLink", "libcublasLt", "libcublas", "libnvrtc")
_CUDNN = ("", "_graph", "_ops", "_cnn", "_adv", "_heuristic")
_CUDNN_ENGINES = ("_engines_precompiled", "_engines_runtime_compiled", "_engines_tensor_ir")

LIBRARIES = (
    "libcuda.so.1",
    *(f"{name}.so.{major}" for major in (12, 13) for name in _CUDA),
    *("libcufft.so.11", "libcufft.so.12", "libcurand.so.10"),
    *(f"libcudnn{part}.so.9" for part in (*_CUDNN, *_CUDNN_ENGINES)),
)
"""The driver, CUDA 12 and 13, and cuDNN 9 with its parts: each library after those that it is linked with."""

_RTLD_DI_LINKMAP = 2  # <dlfcn.h>


class _LinkMap(ctypes.Structure):
    """The first fields of `struct link_map` (<link.h>)."""

    _fields_ = (("l_addr", ctypes.c_void_p), ("l_name", ctypes.c_char_p))


def loaded_libraries(names: Iterable[str] = LIBRARIES) -> tuple[str, ...]:
    """Return the absolute paths of the files that names of libraries stand for in this process; loads none.

    Two files with the same name may be loaded. The name then stands for the first one, as it does for ONNX Runtime's
    provider and our own kernels (docs/decisions/0160).

    Args:
        names: the names, such as "libcudnn.so.9". Those that are not loaded are left out.
    """
    found = []
    for name in names:
        with suppress(OSError, AttributeError, ValueError):  # not loaded, or not Linux
            handle = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)._handle
            entry = ctypes.POINTER(_LinkMap)()
            query = ctypes.CDLL(None).dlinfo
            query.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
            if not query(handle, _RTLD_DI_LINKMAP, ctypes.byref(entry)) and entry.contents.l_name:
                found.append(os.path.abspath(os.fsdecode(entry.contents.l_name)))
    return tuple(found)


def load_libraries(paths: Iterable[str]) -> None:
    """Load libraries, so that their names stand for these files from now on; call it before CUDA's are used.

    A file that cannot be loaded is left out: the process then finds the library as if it were the first one to ask.

    Args:
        paths: the files, each after those that it is linked with.
    """
    for path in paths:
        with suppress(OSError):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
