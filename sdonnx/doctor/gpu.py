"""Ask the NVIDIA driver and libraries for the GPUs and versions of this machine."""

from __future__ import annotations

import ctypes
import functools
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Gpu", "cuda_driver_version", "cuda_libraries", "driver_version", "gpus", "load_cuda_libraries"]

# cuda.h
_DRIVER = "libcuda.so.1"
_COMPUTE_CAPABILITY = (75, 76)

# Files in which Linux shows the version of the kernel module.
_VERSION_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/nvidia/version"))


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: NVIDIA's name of the model.
        compute_capability: for example (9, 0).
    """

    name: str
    compute_capability: tuple[int, int]


def driver_version(files: tuple[Path, ...] = _VERSION_FILES) -> str:
    """Return the version of the NVIDIA driver, such as "580.82.07"; "" where it is unknown."""
    for path in files:
        with suppress(OSError):
            found = re.search(r"(?:Kernel Module.*?\s|^)(\d+(?:\.\d+)+)", path.read_text(encoding="utf-8"))
            if found:
                return found[1]
    return ""


def cuda_driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, such as (13, 0); None without a driver."""
    with suppress(OSError, AttributeError):
        version = ctypes.c_int()
        if not ctypes.CDLL(_DRIVER).cuDriverGetVersion(ctypes.byref(version)):
            return version.value // 1000, version.value % 1000 // 10
    return None


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that are visible to this process, in CUDA's order; none without a driver."""
    found = []
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(_DRIVER)
        count, handle = ctypes.c_int(), ctypes.c_int()
        if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
            return ()
        for index in range(count.value):
            name = ctypes.create_string_buffer(256)
            if library.cuDeviceGet(ctypes.byref(handle), index) or library.cuDeviceGetName(name, len(name), handle):
                return ()
            numbers = []
            for attribute in _COMPUTE_CAPABILITY:
                number = ctypes.c_int()
                library.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle)
                numbers.append(number.value)
            found.append(Gpu(name.value.decode(errors="replace"), (numbers[0], numbers[1])))
    return tuple(found)


@functools.cache
def load_cuda_libraries() -> None:
    """Load CUDA's and cuDNN's libraries as ONNX Runtime does: from their wheels, or otherwise as the system finds them.

    The first library of a name that a process loads is the one that all others in it use, ONNX Runtime's provider and
    our own kernels among them. So a version is right only if this was called before: asking for a version
    without it may load the system's library instead of the wheel's. It is done once for the process, and does
    nothing if ONNX Runtime was not built for CUDA.
    """
    import onnxruntime

    onnxruntime.preload_dlls()


def cuda_libraries() -> dict[str, str]:
    """Return the versions of CUDA's run-time, cuDNN and cuBLASLt that this process loads; "" for a missing library."""
    load_cuda_libraries()
    versions = dict.fromkeys(("cuda_runtime", "cudnn", "cublas"), "")
    with suppress(OSError, AttributeError):
        number = ctypes.c_int()
        if not ctypes.CDLL("libcudart.so.13").cudaRuntimeGetVersion(ctypes.byref(number)):
            versions["cuda_runtime"] = str(number.value)
    for part, name in (("cudnn", "libcudnn.so.9"), ("cublas", "libcublasLt.so.13")):
        with suppress(OSError, AttributeError):
            get_version = getattr(ctypes.CDLL(name), "cudnnGetVersion" if part == "cudnn" else "cublasLtGetVersion")
            get_version.restype = ctypes.c_size_t
            versions[part] = str(get_version())
    return versions
