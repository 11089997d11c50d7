"""The end of a call within a step, requested by another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import onnxruntime

from sdonnx.errors import UnavailableError

__all__ = ["Cancellation"]


class Cancellation:
    """Ends the run of a graph that another thread executes, and all later runs until `reset`.

    ONNX Runtime reads the flag `terminate` of a run's options between two operators.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: onnxruntime.RunOptions | None = None
        self._is_requested = False

    def request(self) -> None:
        """End the current run and later ones."""
        self._set(True)

    def reset(self) -> None:
        """Allow runs again."""
        self._set(False)

    def check(self) -> None:
        """Raise UnavailableError if the end was requested."""
        if self._is_requested:
            raise UnavailableError("the call was cancelled", "a call that nobody cancels", "call the pipeline again")

    @contextmanager
    def running(self, options: onnxruntime.RunOptions) -> Iterator[None]:
        """Run a graph with these options inside the context.

        Raises:
            UnavailableError: the end was requested.
        """
        self.check()
        with self._lock:
            options.terminate = self._is_requested
            self._running = options
        try:
            yield
        except Exception as error:  # exceptions of onnxruntime have no common base class
            self.check()
            raise error
        finally:
            with self._lock:
                self._running = None

    def _set(self, is_requested: bool) -> None:
        with self._lock:
            self._is_requested = is_requested
            if self._running is not None:
                self._running.terminate = is_requested
