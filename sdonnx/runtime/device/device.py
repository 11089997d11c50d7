"""Devices: buffers, memory, synchronization and timing; and the memory of the host."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import resource
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnxruntime import OrtValue

from sdonnx.doctor.gpu import load_cuda_libraries
from sdonnx.errors import DeviceMemoryError, FolderError, OptionError, ProviderError, SdonnxError
from sdonnx.installation import install_command
from sdonnx.runtime.device.cuda import Event, cuda

__all__ = [
    "FATAL",
    "PROVIDERS",
    "Device",
    "available_memory",
    "device_for",
    "graph_errors",
    "host_memory_errors",
    "memory_errors",
    "total_memory",
]

PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}

FATAL = 4  # ONNX Runtime's severities range from 0 (verbose) to 4


@dataclass(frozen=True, eq=False)
class Device:
    """A device that runs graphs.

    It prints as torch's name of the device, "cpu" or "cuda:0", and equals that name and a `torch.device` with that
    name. "cuda" without an index equals every GPU.

    Attributes:
        provider: "cuda" or "cpu".
        index: index of the GPU.
    """

    provider: str
    index: int = 0

    @property
    def type(self) -> str:
        """The type of the device as torch names it: "cuda" or "cpu"."""
        return self.provider

    def __str__(self) -> str:
        return f"cuda:{self.index}" if self.provider == "cuda" else self.provider

    def __hash__(self) -> int:
        return hash((self.provider, self.index))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Device):
            return (self.provider, self.index) == (other.provider, other.index)
        if isinstance(other, str) or type(other).__module__ == "torch":  # torch.device, without an import of torch
            return str(other) in (self.provider, str(self), f"{self.provider}:{self.index}")
        return NotImplemented

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> OrtValue:
        """Return a buffer with undefined values."""
        with memory_errors(self, f"a buffer of {tuple(shape)}"):
            return OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, self.provider, self.index)

    def upload(self, values: npt.NDArray[Any]) -> OrtValue:
        """Return a buffer with a copy of an array."""
        with memory_errors(self, f"a buffer of {values.shape}"):
            return self.shared(np.array(values, order="C") if self.provider == "cpu" else values)

    def shared(self, values: npt.NDArray[Any]) -> OrtValue:
        """Return a buffer with the values of an array; on the CPU, a contiguous array is not copied.

        A write to the buffer then changes the array. The buffer keeps the array's memory alive.
        """
        with memory_errors(self, f"a buffer of {values.shape}"):
            return OrtValue.ortvalue_from_numpy(np.asarray(values, order="C"), self.provider, self.index)

    def write(self, target: OrtValue, values: npt.NDArray[Any]) -> None:
        """Write an array into a buffer of its size, and wait.

        Raises:
            OptionError: the buffer has another size.
        """
        source = np.ascontiguousarray(values)
        size = target.tensor_size_in_bytes()
        if source.nbytes != size:
            raise OptionError(f"an array of {source.nbytes} bytes", f"{size} bytes", "pass an array of the right shape")
        if self.provider == "cuda":
            cuda(self.index).copy(target.data_ptr(), source.ctypes.data, size, from_host=True)
        else:
            ctypes.memmove(target.data_ptr(), source.ctypes.data, size)

    def enter(self) -> None:
        """Select the device for the calling thread."""
        if self.provider == "cuda":
            cuda(self.index).use()

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        if self.provider == "cuda":
            cuda(self.index).synchronize()

    def recording(self) -> AbstractContextManager[Any]:
        """Return a lock to hold while capturing a CUDA graph, or while another thread uses the device's stream."""
        return cuda(self.index).recording if self.provider == "cuda" else nullcontext()

    def spare(self, size: int) -> AbstractContextManager[None]:
        """Return a context that reserves `size` bytes of a GPU's memory, so that code inside cannot use them."""
        return cuda(self.index).spare(size) if self.provider == "cuda" else nullcontext()

    def memory(self) -> tuple[int, int] | None:
        """Return the free and the total memory in bytes; None for the CPU."""
        return cuda(self.index).memory() if self.provider == "cuda" else None

    def capability(self) -> tuple[int, int] | None:
        """Return the compute capability (major, minor) of a GPU; None for the CPU."""
        return cuda(self.index).capability() if self.provider == "cuda" else None

    def mark(self) -> Event | float:
        """Return a mark after all work queued so far, for `milliseconds`."""
        return cuda(self.index).event() if self.provider == "cuda" else time.perf_counter()

    def wait(self, mark: Event | float) -> None:
        """Wait for all work that was queued before a mark."""
        if isinstance(mark, Event):
            cuda(self.index).wait(mark)

    def milliseconds(self, start: Event | float, end: Event | float) -> float:
        """Return the time in ms between two marks on the device's clock; a GPU waits for the second one."""
        if isinstance(start, Event) and isinstance(end, Event):
            return cuda(self.index).milliseconds(start, end)
        if isinstance(start, Event) or isinstance(end, Event):
            raise TypeError("marks of two devices")
        return (end - start) * 1e3

    def copy(
        self, target: OrtValue, source: OrtValue, size: int, *, target_offset: int = 0, source_offset: int = 0
    ) -> None:
        """Copy bytes between two buffers on this device, and wait.

        Args:
            target: the buffer to write.
            source: the buffer to read.
            size: number of bytes.
            target_offset: the first byte to write.
            source_offset: the first byte to read.

        Raises:
            OptionError: a buffer is smaller.
        """
        available = min(
            source.tensor_size_in_bytes() - source_offset,
            target.tensor_size_in_bytes() - target_offset,
        )
        if size > available:
            raise OptionError(f"a copy of {size} bytes", f"at most {available}", "pass an array of the right shape")
        addresses = target.data_ptr() + target_offset, source.data_ptr() + source_offset
        if self.provider == "cuda":
            cuda(self.index).copy(*addresses, size)
        else:
            ctypes.memmove(*addresses, size)


# Of CUDA, of ONNX Runtime's arena, and of C++.
_NO_MEMORY = ("out of memory", "Failed to allocate memory", "bad_alloc", "bad allocation")


@contextmanager
def host_memory_errors(what: str) -> Iterator[None]:
    """Convert a MemoryError inside the context to one line.

    Args:
        what: the work inside the context, for the message.

    Raises:
        DeviceMemoryError: the host has too little memory.
    """
    try:
        yield
    except MemoryError as error:
        reason = " ".join(str(error).split())
        raise DeviceMemoryError(
            f"{what} needs more memory than this machine has free{f' ({reason})' if reason else ''}",
            "enough memory on the host",
            "ask for fewer or smaller images, or close other programs",
        ) from error


@contextmanager
def memory_errors(device: Device, what: str) -> Iterator[None]:
    """Convert errors of failed allocations inside the context to one line.

    Args:
        device: the device that runs out of memory.
        what: the work inside the context, for the message.

    Raises:
        DeviceMemoryError: an allocation failed.
    """
    try:
        yield
    except Exception as error:  # exceptions of onnxruntime have no common base class
        text = str(error)
        asked = re.search(r"requested buffer of size (\d+)", text)
        if asked is None and not isinstance(error, MemoryError) and not any(words in text for words in _NO_MEMORY):
            raise
        memory = device.memory()
        wanted = f"{int(asked[1]) / 2**20:.0f} MB more" if asked else "more memory"
        free = f", {memory[0] / 2**20:.0f} of {memory[1] / 2**20:.0f} MB are free" if memory else ""
        raise DeviceMemoryError(
            f"{what} needs {wanted}{free}",
            "enough memory on the device",
            "ask for fewer or smaller images, or pass low_memory=True",
        ) from error


@contextmanager
def graph_errors(folder: object) -> Iterator[None]:
    """Convert errors that this project's calls of ONNX Runtime raise inside the context to one line.

    Its exceptions have no common base class. Some are a RuntimeError, which other code such as callbacks raises too.

    Args:
        folder: the folder of the graphs, for the message.

    Raises:
        FolderError: ONNX Runtime raised an error.
    """
    try:
        yield
    except (SdonnxError, OSError, MemoryError):
        raise
    except Exception as error:
        modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
        callers = [module for module, called in itertools.pairwise(modules) if _is_onnxruntime(called)]
        if not callers or not callers[0].startswith("sdonnx."):
            raise
        raise FolderError(
            f"ONNX Runtime refused a graph of {folder} or its inputs ({type(error).__name__}: {error})",
            "graphs that match their config.json, and accept the sizes of the call",
            "optimize the exported pipeline again, or report the call",
        ) from error


def _is_onnxruntime(module: str) -> bool:
    return module.partition(".")[0] == "onnxruntime"


def device_for(provider: str, index: int = 0) -> Device:
    """Return the device of a provider: "cuda", "cpu" or ONNX Runtime's name of either.

    Raises:
        ProviderError: the provider is unknown, or not available on this machine.
    """
    names = {name: name for name in PROVIDERS} | {long: name for name, long in PROVIDERS.items()}
    if provider not in names:
        raise ProviderError(f"the provider {provider!r} is unknown", f"one of {', '.join(PROVIDERS)}")
    name = names[provider]
    if PROVIDERS[name] not in onnxruntime.get_available_providers():
        raise ProviderError(
            f"this installation of onnxruntime has no {PROVIDERS[name]}",
            "onnxruntime-gpu" if name == "cuda" else "onnxruntime",
            f"optimize again with --provider cpu, or with an NVIDIA GPU: pip uninstall -y onnxruntime && "
            f"{install_command('cuda')}"
            if name == "cuda"
            else install_command("cpu"),
        )
    # Sets the log level of the whole process: ONNX Runtime logs a cuDNN plan that fails as an error although it then
    # uses the next plan.
    onnxruntime.set_default_logger_severity(FATAL)
    if name == "cuda":
        # Finds the CUDA and cuDNN wheels, unlike the dynamic loader.
        load_cuda_libraries()
    return Device(name, index)


_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

# Files with the limit and the usage in bytes, of cgroups 2 and 1, and the entry of memory.stat with the part of the
# usage that the kernel reclaims: cached files.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def total_memory() -> int:
    """Return the memory of the machine in bytes, or the limit of this process's cgroup if that is lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _cgroup_limits())])


def available_memory() -> int:
    """Return the bytes of memory that this process can use at most, including those that it uses already.

    It is the minimum of the machine's available memory and free swap, and the memory that the process's cgroups leave,
    each plus the memory that the process holds, which libraries may reuse; and of the limit of the process's address
    space (RLIMIT_AS).
    """
    held = _kilobytes("self/status", "VmRSS")
    free = [_kilobytes("meminfo", "MemAvailable") + _kilobytes("meminfo", "SwapFree") or total_memory()]
    free += [max(limit - used, 0) for limit, used in _cgroup_limits()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    available = min(free) + held
    return available if soft == resource.RLIM_INFINITY else min(available, soft)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the usage, in bytes, of each cgroup of this process that has a limit."""
    for folder in _cgroups():
        for limit_file, usage_file, cached in _CGROUP_FILES:
            limit = _number(folder / limit_file, r"(\d+)")
            if limit:  # otherwise "max", or no file
                reclaimable = _number(folder / "memory.stat", rf"{cached} (\d+)")
                yield limit, max(_number(folder / usage_file, r"(\d+)") - reclaimable, 0)


def _cgroups() -> Iterator[Path]:
    """Yield the folders of this process's memory cgroups, from the innermost to the root."""
    roots = {"": _CGROUPS, "memory": _CGROUPS / "memory"}
    seen = set()
    for line in _text(_PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "none", "/")
        for controller in controllers.split(","):
            if controller not in roots:
                continue
            root = roots[controller]
            # In a container the path may be the host's path, and the container's own cgroup is the root.
            folder = root / path.lstrip("/")
            for each in (folder, *folder.parents):
                if each.is_relative_to(root) and each not in seen:
                    seen.add(each)
                    yield each


def _kilobytes(file: str, name: str) -> int:
    """Return an entry of a file of /proc, in bytes; 0 if it is missing."""
    return _number(_PROC / file, rf"{name}:\s*(\d+) kB") * 1024


def _number(path: Path, pattern: str) -> int:
    """Return the number that a pattern finds at the start of a line of a file; 0 if there is none."""
    found = re.search(f"^{pattern}", _text(path), re.MULTILINE)
    return int(found[1]) if found else 0


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
