"""Measure the memory in use and its peak during a run."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.environment_record import open_gpu
from sdonnx.errors import OptionError
from sdonnx.installation import install_command

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "GpuMemory",
    "PeakMemory",
    "ResidentMemory",
    "clock_mhz",
    "host_peak_bytes",
    "memory_source",
]

_INTERVAL_S = 0.01


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


def memory_source(device: str) -> ResidentMemory | GpuMemory:
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

    Attributes:
        peak_bytes: the peak so far; final after the block.
        clocks_mhz: samples of the clock of the GPU's multiprocessors.
    """

    def __init__(
        self, source: ResidentMemory | GpuMemory, device: str = "cpu", interval_s: float = _INTERVAL_S
    ) -> None:
        """Create the thread."""
        self.peak_bytes = 0
        self.clocks_mhz: list[int] = []
        self._source, self._device = source, device
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
        while not self._ended.wait(_INTERVAL_S):
            self._read()
            self.clocks_mhz += clock_mhz(self._device)

    def _read(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._source.bytes_used())
