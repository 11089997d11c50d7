"""How much memory is in use, and its peak in a run."""

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

_MISSING_NVML = ("NVML's Python package is missing", "nvidia-ml-py", "pip install 'sdonnx[benchmark]'")


class MemorySource(Protocol):
    """Something that says how much memory is in use now."""

    @property
    def kind(self) -> str:
        """What is counted, for the record."""

    def bytes_used(self) -> int:
        """Return the memory in use, in bytes."""


class ResidentMemory:
    """The resident memory of this process: what counts on a CPU."""

    kind = "resident memory of the process"

    def __init__(self) -> None:
        """Open this process's figures."""
        try:
            import psutil
        except ImportError:
            raise OptionError("psutil is missing", "it installed", "pip install 'sdonnx[benchmark]'") from None
        self._process = psutil.Process()

    def bytes_used(self) -> int:
        """Return the memory in use."""
        return int(self._process.memory_info().rss)


class GpuMemory:
    """The memory of the GPU that this process uses, from NVML: contexts, libraries and graphs included.

    Containers often hide which process holds what. There the growth of the whole GPU's memory since this
    was made is the figure, as in ONNX Runtime's benchmark.py; so make it before anything is loaded.
    """

    def __init__(self, gpu: Any) -> None:
        """Note how much is in use already on a GPU that `open_gpu` opened."""
        import pynvml

        self._nvml, self._gpu = pynvml, gpu
        self._before = self._all_used()
        self._own = False

    @property
    def kind(self) -> str:
        """Which of the two figures it is."""
        return "NVML, this process" if self._own else "NVML, growth of the whole GPU's"

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
    """Return the UUID of the GPU that CUDA calls 0, as NVML writes it; None where CUDA has no GPU.

    CUDA and NVML number GPUs differently: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER bind CUDA alone.
    Source: the CUDA driver API (cuInit, cuDeviceGet, cuDeviceGetUuid); no context is made.
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
    """Return NVML's handle of the GPU that CUDA calls 0.

    Raises:
        ProviderError: there is none, or NVML is not there or does not show it.
    """
    try:
        import pynvml
    except ImportError:
        raise ProviderError(*_MISSING_NVML) from None
    identifier = first_gpu()
    if identifier is None:
        raise ProviderError("CUDA finds no GPU", "a GPU and its driver", "check nvidia-smi, or pass -r cpu")
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(identifier)
    except pynvml.NVMLError as error:
        raise ProviderError(
            f"NVML does not show the GPU {identifier} ({error})", "the driver's NVML", "check nvidia-smi"
        ) from error


def memory_source(device: str) -> MemorySource:
    """Return what measures memory for the provider "cuda" or "cpu"; call it before anything is loaded."""
    return GpuMemory(open_gpu()) if device == "cuda" else ResidentMemory()


def clock_mhz(device: str) -> list[int]:
    """Return the clock of the GPU's multiprocessors now, in MHz; nothing on a CPU or where NVML does not tell."""
    if device != "cuda":
        return []
    import pynvml

    try:
        return [int(pynvml.nvmlDeviceGetClockInfo(open_gpu(), pynvml.NVML_CLOCK_SM))]
    except pynvml.NVMLError:
        return []


def host_peak_bytes() -> int:
    """Return the highest resident memory that this process has had.

    On Linux it is VmHWM of /proc, which begins anew with a program; getrusage's figure is that of the process that
    started it, where that one was larger.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PeakMemory:
    """The highest figure of a source within a `with` block, read every 10 ms by a thread of its own.

    Args:
        source: what is watched.
        device: "cuda" to read the GPU's clock too.
        interval_s: seconds between two looks.

    Attributes:
        peak_bytes: the peak so far; final once the block has ended.
        clocks_mhz: of the GPU's multiprocessors, at each look.
    """

    def __init__(self, source: MemorySource, device: str = "cpu", interval_s: float = _INTERVAL_S) -> None:
        """Watch a source."""
        self.peak_bytes = 0
        self.clocks_mhz: list[int] = []
        self._source, self._device, self._interval_s = source, device, interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        """Read once and start the thread."""
        self._read()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the thread and read a last time."""
        self._ended.set()
        self._thread.join()
        self._read()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._read()
            self.clocks_mhz += clock_mhz(self._device)

    def _read(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._source.bytes_used())
