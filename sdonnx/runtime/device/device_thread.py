"""The thread that runs all jobs of a device.

A captured CUDA graph belongs to the thread that captured it, and graphs share their scratch memory. So one thread of
the process runs all jobs of a device, one after another.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from sdonnx.runtime.device.device import Device

__all__ = ["DeviceThread", "device_thread"]

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
