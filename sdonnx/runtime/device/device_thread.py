"""The thread that runs all jobs of a device, its first block of scratch memory, and forked processes without it.

A captured CUDA graph belongs to the thread that captured it, and graphs share their scratch memory. So one thread of
the process runs all jobs of a device, one after another. ONNX Runtime's destructors join threads, which do not exist
in a forked process: they wait forever or crash.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from sdonnx.errors import DeviceMemoryError
from sdonnx.runtime.device.device import Device, memory_errors
from sdonnx.runtime.device.session import Graph

__all__ = ["RESERVED_BYTES", "DeviceThread", "device_thread", "keep_in_forked_processes", "reserve_scratch"]

_LOGGER = logging.getLogger(__name__)

Result = TypeVar("Result")


class DeviceThread:
    """Runs jobs for one device in the order of submission.

    Args:
        device: the device.
    """

    def __init__(self, device: Device) -> None:
        name = f"sdonnx-{device.provider}-{device.index}"
        self._executor = ThreadPoolExecutor(1, name, initializer=device.enter)
        self._ident: int | None = None

    def run(self, job: Callable[[], Result], stop: Callable[[], None] = lambda: None) -> Result:
        """Run a job and return its result.

        A job that is submitted by another job runs immediately.

        Args:
            job: the function to run.
            stop: called on Ctrl-C to end the job early; KeyboardInterrupt is raised when it has ended.
        """
        if threading.get_ident() == self._ident:
            return job()
        future = self._executor.submit(self._noted, job)
        try:
            return future.result()
        except KeyboardInterrupt:
            stop()
            future.cancel()
            wait([future])
            raise

    def start(self, job: Callable[[], object]) -> None:
        """Queue a job, and do not wait for it; an error ends the job, with a line in the log (level debug)."""
        self._executor.submit(self._noted, job).add_done_callback(_log_error)

    def _noted(self, job: Callable[[], Result]) -> Result:
        self._ident = threading.get_ident()
        return job()


def _log_error(job: Future[object]) -> None:
    if not job.cancelled() and (error := job.exception()) is not None:
        _LOGGER.debug("a job of the device failed: %s", error)


def device_thread(device: Device) -> DeviceThread:
    """Return the thread of a device, one for the process."""
    return _device_thread(device, os.getpid())


@functools.cache
def _device_thread(device: Device, process: int) -> DeviceThread:
    # A thread does not exist in a forked process, so each process has its own.
    return DeviceThread(device)


def keep_in_forked_processes(owner: object) -> None:
    """Never run the destructors of an object, and of all that it refers to, in processes that are forked from now on.

    Such a process ends with its own exit status. Python's exit handlers run in it. Exit handlers of C libraries run
    only if they were registered after the fork.

    Args:
        owner: holds sessions, for instance a pipeline. It is not kept alive in this process.
    """
    _owners().add(owner)


@functools.cache
def _owners() -> weakref.WeakSet[object]:
    """Return the objects to keep; the first call registers what forked processes do with them."""
    owners = weakref.WeakSet[object]()
    library = ctypes.CDLL(None)
    # musl has no on_exit: there, the objects are kept, and C++ destructors of static objects still run. Functions are
    # looked up before the fork, which another thread may hold the loader's lock at.
    on_exit, quit_, flush = getattr(library, "on_exit", None), library._exit, library.fflush

    def keep() -> None:
        inherited = list(owners)
        for each in inherited:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        if inherited and on_exit is not None:
            atexit.register(flush, None)
            on_exit(quit_, None)  # called first of all exit handlers so far, with the exit status

    os.register_at_fork(after_in_child=keep)
    return owners


RESERVED_BYTES = 2**28
"""Size of the block: about the scratch memory of a UNet for an image of 512x512, and less than half of what a decoder
needs for it. Stable Diffusion 1.5 takes 264 MB in 50 pieces for the UNet, and 604 MB in six for the decoder."""

_GRAPH = Path(__file__).with_name("one_block.onnx")  # of scripts/write_runtime_graphs.py


def reserve_scratch(device: Device) -> None:
    """Let ONNX Runtime's arena allocate a block of `RESERVED_BYTES`, once for each GPU.

    The arena allocates as much as each tensor needs, and never joins allocations. Without the block, the first graph
    that runs leaves many small ones, and none of them can hold a tensor of the decoder. It divides the block among the
    tensors of all graphs. ONNX Runtime's default, doubling allocations, would take up to twice the memory in use.

    Nothing is reserved on the CPU, or if memory is short.
    """
    if device.provider == "cuda":
        device_thread(device).run(lambda: _reserve(device))


@functools.cache
def _reserve(device: Device) -> None:
    with suppress(DeviceMemoryError), memory_errors(device, "scratch memory"):
        graph = Graph(_GRAPH, device)
        binding = graph.session.io_binding()
        binding.bind_cpu_input("size", np.array([RESERVED_BYTES], np.int64))
        binding.bind_output("block", device.provider, device.index)
        graph.session.run_with_iobinding(binding, graph.run_options())
