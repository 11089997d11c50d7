"""Start the engines' processes, read their events and end them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdonnx.folder.folder_cache import CACHE, cache_folder

__all__ = ["WorkerError", "make_caches", "run_worker"]

_ROOT = Path(__file__).resolve().parents[2]


class WorkerError(Exception):
    """An engine's process failed; the message is the reason in one line."""


def run_worker(
    job: dict[str, Any],
    on_progress: Callable[[str], None],
    *,
    python: str | None = None,
    timeout_s: float | None = None,
    scratch: Path | None = None,
) -> dict[str, Any]:
    """Run a job in a new process and return the values of its events by name.

    Args:
        job: see `sdonnx.benchmark.engine_worker`.
        on_progress: callback for progress messages of the process.
        python: the interpreter. Default: the current one.
        timeout_s: time limit of the process.
        scratch: folder for temporary files and compiler caches. Default: the system's folders.

    Raises:
        WorkerError: the process failed, ended without a result, or exceeded the time limit.
    """
    # Another interpreter imports this checkout, too.
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if scratch is not None:
        environment |= make_caches(scratch)
    command = [python or sys.executable, "-m", "sdonnx.benchmark.engine_worker"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,  # so that its children can be ended with it
            )
        except OSError as error:
            raise WorkerError(f"{command[0]} could not be started ({error.strerror})") from error
        late = threading.Event()

        def end() -> None:
            late.set()
            _end(process)

        timer = threading.Timer(threading.TIMEOUT_MAX if timeout_s is None else timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            values = _listen(process, job, on_progress)
            status = process.wait()
        finally:
            timer.cancel()
            _end(process)
            process.wait()
        if "done" in values:
            return values
        if late.is_set():
            raise WorkerError(f"not done within {timeout_s:g} s")
        errors.seek(0)
        raise WorkerError(values.get("failed") or _last_words(status, errors.read()))


def _listen(process: subprocess.Popen[str], job: dict[str, Any], on_progress: Callable[[str], None]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    values: dict[str, Any] = {}
    with process.stdin, process.stdout:
        with contextlib.suppress(BrokenPipeError):  # the process has already ended
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.close()
        for line in process.stdout:
            try:
                event = json.loads(line)
                name, value = event["event"], event["value"]
            except (ValueError, KeyError, TypeError):
                continue  # printed while the interpreter started, before the worker redirected its output
            if name == "progress":
                on_progress(value)
            else:
                values[name] = value
    return values


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def make_caches(scratch: Path) -> dict[str, str]:
    """Return environment variables that move temporary files and compiler caches to the scratch folder.

    Results of checks of the GPU's kernels, which belong to the machine, are copied into a new folder.
    """
    names = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", CACHE)
    folders = {name: scratch / name.lower() for name in names}
    if not folders[CACHE].exists():
        for folder in folders.values():
            folder.mkdir(parents=True)
        for path in cache_folder().glob("kernels-*.json"):
            shutil.copy(path, folders[CACHE])
    return {name: str(folder) for name, folder in folders.items()}


def _last_words(status: int, errors: str) -> str:
    """Return the reason of a failure that the process did not report."""
    if status < 0:
        name = signal.Signals(-status).name
        return f"ended by {name}" + (", possibly because memory ran out" if name == "SIGKILL" else "")
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"ended with status {status}" + (f": {lines[-1][:300]}" if lines else "")
