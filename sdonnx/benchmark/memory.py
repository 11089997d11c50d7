"""Measure the memory in use and its peak during a run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sdonnx.errors import OptionError, ProviderError
from sdonnx.installation import install_command

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "GpuMemory",
    "MemorySource",
    "PeakMemory",
    "ResidentMemory",
    "clock_mhz",
    "first_gpu",
    "host_peak_bytes",
    "memory_source",
    "open_gpu",
]

_INTERVAL_S = 0.01


class MemorySource(Protocol):
    """A source of the current memory use."""

    @property
    def kind(self) -> str:
        """The kind of memory, for the record."""

    def bytes_used(self) -> int:
        """Return the memory in use, in bytes."""


class ResidentMemory:
    """The resident memory of this process, for runs on a CPU."""

    kind = "resident memory of the process"

    def __init__(self) -> None:
        """Open the statistics of this process."""
        try:
            import psutil
        except ImportError:
            raise OptionError("psutil is missing", "psutil installed", install_command("benchmark")) from None
        self._process = psutil.Process()

    def bytes_used(self) -> int:
        """Return the memory in use."""
        return int(self._process.memory_info().rss)


class GpuMemory:
    """The GPU memory that this process uses, from NVML, including contexts, libraries and graphs.

    In containers NVML often does not list processes. The value is then the growth of the whole GPU's memory since the
    creation of this object, as in ONNX Runtime's benchmark.py. Create it before loading anything.
    """

    def __init__(self, gpu: Any) -> None:
        """Record the memory in use on a GPU that `open_gpu` returned."""
        import pynvml

        self._nvml, self._gpu = pynvml, gpu
        self._before = self._all_used()
        self._own = False

    @property
    def kind(self) -> str:
        """The process's memory, or the growth of the GPU's memory."""
        return "NVML, this process" if self._own else "NVML, growth of the whole GPU"

    def bytes_used(self) -> int:
        """Return the memory in use."""
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._gpu):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                self._own = True
                return int(process.usedGpuMemory)
        return max(0, self._all_used() - self._before)

    def _all_used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._gpu).used)


def first_gpu() -> str | None:
    """Return the UUID of CUDA device 0 in NVML's format, or None if CUDA finds no GPU.

    CUDA and NVML number GPUs differently: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER affect only CUDA.
    Source: the CUDA driver API (cuInit, cuDeviceGet, cuDeviceGetUuid). No context is created.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, identifier = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if driver.cuDeviceGetUuid_v2(identifier, device):
        return None
    return f"GPU-{uuid.UUID(bytes=bytes(identifier))}"


def open_gpu() -> Any:
    """Return NVML's handle of CUDA device 0.

    Raises:
        ProviderError: there is no GPU, or NVML is missing or does not list the GPU.
    """
    try:
        import pynvml
    except ImportError:
        raise ProviderError("NVML's Python package is missing", "nvidia-ml-py", install_command("benchmark")) from None
    identifier = first_gpu()
    if identifier is None:
        raise ProviderError("CUDA finds no GPU", "a GPU and its driver", "check nvidia-smi, or pass -r cpu")
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(identifier)
    except pynvml.NVMLError as error:
        raise ProviderError(
            f"NVML does not list the GPU {identifier} ({error})", "the driver's NVML", "check nvidia-smi"
        ) from error


def memory_source(device: str) -> MemorySource:
    """Return the memory source for the provider "cuda" or "cpu". Call it before loading anything."""
    return GpuMemory(open_gpu()) if device == "cuda" else ResidentMemory()


def clock_mhz(device: str) -> list[int]:
    """Return the current clock of the GPU's multiprocessors in MHz; empty on a CPU or if NVML does not report it."""
    if device != "cuda":
        return []
    import pynvml

    try:
        return [int(pynvml.nvmlDeviceGetClockInfo(open_gpu(), pynvml.NVML_CLOCK_SM))]
    except pynvml.NVMLError:
        return []


def host_peak_bytes() -> int:
    """Return the peak resident memory of this process.

    On Linux it is VmHWM from /proc, which is reset when a program starts. The value of getrusage includes the peak of
    the parent process.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PeakMemory:
    """The peak memory of a source within a `with` block, sampled every 10 ms by a thread.

    Args:
        source: the memory source.
        device: "cuda" to sample the GPU's clock as well.
        interval_s: seconds between samples.

    Attributes:
        peak_bytes: the peak so far; final after the block.
        clocks_mhz: samples of the clock of the GPU's multiprocessors.
    """

    def __init__(self, source: MemorySource, device: str = "cpu", interval_s: float = _INTERVAL_S) -> None:
        """Create the thread."""
        self.peak_bytes = 0
        self.clocks_mhz: list[int] = []
        self._source, self._device, self._interval_s = source, device, interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        """Take a sample and start the thread."""
        self._read()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the thread and take the last sample."""
        self._ended.set()
        self._thread.join()
        self._read()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._read()
            self.clocks_mhz += clock_mhz(self._device)

    def _read(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._source.bytes_used())
