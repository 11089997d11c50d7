"""Where graphs run: buffers, memory and order of work on a device."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnxruntime import OrtValue

from sdonnx.errors import DeviceMemoryError, OptionError, ProviderError
from sdonnx.runtime.cuda import Event, cuda

__all__ = ["FATAL", "PROVIDERS", "Device", "device_for", "told_of_memory"]

PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}

FATAL = 4  # ONNX Runtime's severities go from 0, verbose, to 4


@dataclass(frozen=True)
class Device:
    """Where graphs run.

    Attributes:
        provider: "cuda" or "cpu".
        index: the number of the GPU.
    """

    provider: str
    index: int = 0

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> OrtValue:
        """Return a buffer of that shape and type, its values undefined."""
        with told_of_memory(self, f"a buffer of {tuple(shape)}"):
            return OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, self.provider, self.index)

    def upload(self, values: npt.NDArray[Any]) -> OrtValue:
        """Return a buffer that holds `values`."""
        with told_of_memory(self, f"a buffer of {values.shape}"):
            return OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values), self.provider, self.index)

    def enter(self) -> None:
        """Make the calling thread ready to work with the device."""
        if self.provider == "cuda":
            cuda(self.index).use()

    def synchronize(self) -> None:
        """Wait until every run is done."""
        if self.provider == "cuda":
            cuda(self.index).synchronize()

    def recording(self) -> AbstractContextManager[Any]:
        """Hold this while a CUDA graph is recorded, or to touch the device's stream from another thread."""
        return cuda(self.index).recording if self.provider == "cuda" else nullcontext()

    def spare(self, size: int) -> AbstractContextManager[None]:
        """Keep `size` bytes of a GPU's memory from what runs meanwhile."""
        return cuda(self.index).spare(size) if self.provider == "cuda" else nullcontext()

    def memory(self) -> tuple[int, int] | None:
        """Return the free memory and all of it, in bytes; None for the CPU."""
        return cuda(self.index).memory() if self.provider == "cuda" else None

    def capability(self) -> tuple[int, int] | None:
        """Return a GPU's compute capability, major and minor; None for the CPU."""
        return cuda(self.index).capability() if self.provider == "cuda" else None

    def mark(self) -> Event | float:
        """Return a mark after everything that is queued by now, for `milliseconds`."""
        return cuda(self.index).event() if self.provider == "cuda" else time.perf_counter()

    def milliseconds(self, start: Event | float, end: Event | float) -> float:
        """Return the time between two marks, by the device's own clock; on a GPU it waits for the second."""
        if isinstance(start, Event) and isinstance(end, Event):
            return cuda(self.index).milliseconds(start, end)
        assert isinstance(start, float)
        assert isinstance(end, float)
        return (end - start) * 1e3

    def copy(self, target: OrtValue, source: OrtValue, size: int) -> None:
        """Copy the first `size` bytes of a buffer of this device to the start of another one, and wait for it.

        Raises:
            OptionError: one of them is smaller.
        """
        least = min(source.tensor_size_in_bytes(), target.tensor_size_in_bytes())
        if size > least:
            raise OptionError(f"a copy of {size} bytes", f"at most {least}", "pass an array of the right shape")
        if self.provider == "cuda":
            cuda(self.index).copy(target.data_ptr(), source.data_ptr(), size)
        else:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), size)


@contextmanager
def told_of_memory(device: Device, what: str) -> Iterator[None]:
    """Turn the errors of an allocation that failed into one line.

    Raises:
        DeviceMemoryError: what runs within failed for want of memory.
    """
    try:
        yield
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        text = str(error)
        asked = re.search(r"requested buffer of size (\d+)", text)
        if asked is None and "out of memory" not in text and "Failed to allocate memory" not in text:
            raise
        memory = device.memory()
        wanted = f"{int(asked[1]) / 2**20:.0f} MB more" if asked else "more memory"
        free = f", {memory[0] / 2**20:.0f} of {memory[1] / 2**20:.0f} MB are free" if memory else ""
        raise DeviceMemoryError(
            f"{what} needs {wanted}{free}",
            "enough memory on the device",
            "ask for fewer or smaller images, or pass low_memory=True",
        ) from error


def device_for(provider: str, index: int = 0) -> Device:
    """Return the device that a provider's name stands for: "cuda", "cpu" or ONNX Runtime's names.

    Raises:
        ProviderError: the provider is unknown, or not available on this machine.
    """
    names = {name: name for name in PROVIDERS} | {long: name for name, long in PROVIDERS.items()}
    if provider not in names:
        raise ProviderError(f"the provider {provider!r} is unknown", f"one of {', '.join(PROVIDERS)}", "pass one")
    name = names[provider]
    if PROVIDERS[name] not in onnxruntime.get_available_providers():
        raise ProviderError(
            f"this installation of onnxruntime has no {PROVIDERS[name]}",
            "onnxruntime-gpu" if name == "cuda" else "onnxruntime",
            f"pip install 'sdonnx[{name}]'",
        )
    # ONNX Runtime's log for the whole process: a cuDNN plan that fails is reported there as an error
    # although the next plan is taken.
    onnxruntime.set_default_logger_severity(FATAL)
    if name == "cuda":
        # The CUDA and cuDNN wheels are found by this, not by the dynamic loader.
        onnxruntime.preload_dlls()
    return Device(name, index)
