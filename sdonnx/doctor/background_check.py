"""Check a GPU's kernels in another process, while this one generates images.

It has to be another process: while a CUDA graph is captured, work that other threads of the process give to the GPU
breaks the capture.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import IO

from sdonnx.doctor.cache import verdict_from_json
from sdonnx.doctor.loaded_libraries import loaded_libraries
from sdonnx.doctor.verdict import Verdict

__all__ = ["BackgroundCheck", "background_check", "check_command"]

_LOG = logging.getLogger(__name__)

_LIMIT_S = 180
"""Seconds after which the process ends itself, such as when a kernel does not end."""

# Lower than the priority of the process that generates images. SIGALRM also ends a process that waits for a kernel.
_PROGRAM = """
import os, signal, sys
os.nice(10)
signal.alarm({limit_s})
from sdonnx.doctor.loaded_libraries import load_libraries
load_libraries({libraries})
from sdonnx.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def check_command(index: int) -> list[str]:
    """Return the command that checks a GPU and prints its report as JSON.

    It loads the files of CUDA's and cuDNN's libraries that this process uses, so that the verdict holds for this one:
    another package, such as torch, may have loaded other versions than ONNX Runtime would.

    Args:
        index: the number of the GPU.
    """
    import multiprocessing.spawn  # here, as few processes check a GPU

    # Programs that embed Python say by multiprocessing.set_executable where the interpreter is.
    python = os.fsdecode(multiprocessing.spawn.get_executable() or sys.executable)
    doctor = ["doctor", "--quick", "--provider", "cuda", "--device", str(index), "--json", "-"]
    program = _PROGRAM.format(limit_s=_LIMIT_S, libraries=loaded_libraries())
    return [python, "-P", "-c", program, *doctor]


class BackgroundCheck:
    """A check of a GPU's kernels in another process.

    The process is not ended with this one: it ends within seconds, and its verdict is in the cache for the next start.

    Args:
        index: the number of the GPU.
        command: return the command of the check from the number of the GPU.
    """

    def __init__(self, index: int, command: Callable[[int], Sequence[str]] = check_command) -> None:
        self._index, self._command = index, command
        self._lock = threading.Lock()
        self._is_started = False
        self._thread: threading.Thread | None = None
        self._verdict: Verdict | None = None
        self._own_verdict: Verdict | None = None

    def start(self) -> None:
        """Start the process, unless it was started before. Failures are logged and not raised."""
        with self._lock, ExitStack() as stack:
            if self._is_started:
                return
            self._is_started = True
            try:
                # Files and not pipes, which would be closed with this process.
                output, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                process = subprocess.Popen(
                    list(self._command(self._index)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # Ctrl-C in a terminal is for this process
                )
                # A daemon: the interpreter does not wait for it at its exit.
                name, files = "sdonnx-self-check", (output, errors)
                thread = threading.Thread(target=self._wait_for, args=(process, *files), name=name, daemon=True)
                thread.start()
                self._thread = thread
                stack.pop_all()  # the thread closes them
            except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no threads, or the interpreter ends
                self._log(str(error))

    def _wait_for(self, process: subprocess.Popen[bytes], output: IO[bytes], errors: IO[bytes]) -> None:
        """Wait for the process, so that no zombie remains, and read its verdicts."""
        with output, errors:
            status = process.wait()
            try:
                report = json.loads(_read(output))
                verdict, own = verdict_from_json(report["verdict"]), report.get("own_kernels")
                # The other one last: a reader of both sees both.
                self._own_verdict = None if own is None else verdict_from_json(own)
                self._verdict = verdict
            except (ValueError, KeyError, TypeError):
                lines = [line.strip() for line in _read(errors).splitlines() if line.strip()]
                self._log(lines[-1] if lines else f"status {status}")

    def _log(self, reason: str) -> None:
        _LOG.warning(
            "the kernels of GPU %d were not checked in the background (%s); run sdonnx doctor --quick once",
            self._index,
            reason,
        )

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on ONNX Runtime's kernels; None while the check runs, if it was not started, and if it failed."""
        return self._verdict

    @property
    def own_verdict(self) -> Verdict | None:
        """The verdict on our own kernels; None as `verdict` is, and if the GPU cannot use them."""
        return self._own_verdict

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the process has ended and its verdicts are read.

        Args:
            timeout_s: maximum seconds to wait; None for no limit.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@functools.cache
def background_check(index: int) -> BackgroundCheck:
    """Return the check of a GPU, one for the process: all pipelines share it."""
    return BackgroundCheck(index)
