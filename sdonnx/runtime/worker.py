"""The one thread that works with a device.

A captured CUDA graph belongs to the thread that captured it, and graphs share their scratch memory: everything
that a process asks of a device is done by one thread, one job after the other.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from sdonnx.runtime.device import Device

__all__ = ["DeviceThread", "device_thread"]

Result = TypeVar("Result")


class DeviceThread:
    """Runs jobs for one device, in the order in which they are given.

    Args:
        device: the device.
    """

    def __init__(self, device: Device) -> None:
        name = f"sdonnx-{device.provider}-{device.index}"
        self._executor = ThreadPoolExecutor(1, name, initializer=device.enter)
        self._ident: int | None = None

    def run(self, job: Callable[[], Result], stop: Callable[[], None] = lambda: None) -> Result:
        """Run the job and return what it returns.

        A job may ask for another one: that runs at once.

        Args:
            job: what to do.
            stop: called at Ctrl-C, to let the job end early; KeyboardInterrupt is raised when it has.
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

    def _noted(self, job: Callable[[], Result]) -> Result:
        self._ident = threading.get_ident()
        return job()


@functools.cache
def device_thread(device: Device) -> DeviceThread:
    """Return the thread of a device, one for the whole process."""
    return DeviceThread(device)
