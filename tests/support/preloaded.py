"""Start processes of Python that have torch, diffusers and transformers imported already.

Importing them takes 12 s of a processor on the machines that run the tests. A server imports them once, and forks for
each process. What a test starts is a client, a process that stands for the forked one: it has its arguments, input,
output, folder and environment, passes signals on, and ends as it ends. If the client is killed, so is the other.

Start processes as usual if the start of the interpreter, imports, memory or time are what is tested.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["interpreter", "python"]

_PRELOADED = {
    "diffusers": ("AutoencoderKL", "PNDMScheduler", "StableDiffusionPipeline", "UNet2DConditionModel"),
    "onnxscript": (),
    "sdonnx.export.export_pipeline": (),
    "sdonnx.optimize.optimizer": (),
    "torch.onnx": (),
    "transformers": ("CLIPTextModel", "CLIPTokenizer", "CLIPTokenizerFast"),
}
"""Modules, and names in them that are imported at their first use. ONNX Runtime is not: it starts a thread."""

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # of the server, which could not fork otherwise
_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def python(*arguments: str) -> list[str]:
    """Return a command that does what Python does with these arguments, "-m" MODULE or a script and its arguments."""
    return [sys.executable, "-I", "-S", __file__, str(_server()), *arguments]


def interpreter(path: Path) -> Path:
    """Write an executable file that takes arguments like `python`, and return its path."""
    command = python()
    path.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in command) + ' "$@"\n')
    path.chmod(0o755)
    return path


@functools.cache
def _server() -> Path:
    """Start the server of this process, and return the path of its socket; the server ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="sdonnx-preloaded-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "socket"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_ONE_THREAD}
    command = [sys.executable, __file__, "serve", str(path)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", "the server did not start"
    return path


class _Server:
    """Forks a process for each connection."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(16)
        self._running: dict[int, socket.socket] = {}
        self._ended, waking = os.pipe()
        for end in (self._ended, waking):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> NoReturn:
        while True:
            watched: list[Any] = [self._listener, self._ended, *self._running.values()]
            for ready in select.select(watched, [], [])[0]:
                if ready is self._listener:
                    self._accept()
                elif ready == self._ended:
                    os.read(self._ended, 4096)
                    self._report()
                else:
                    self._signal(ready)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        message, files, *_ = socket.recv_fds(connection, 1 << 20, 3)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._ended)
            for other in (self._listener, connection, *self._running.values()):
                other.close()
            _become(json.loads(message), files)
        for file in files:
            os.close(file)
        self._running[pid] = connection

    def _report(self) -> None:
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                connection = self._running.pop(pid)
                with contextlib.suppress(OSError), connection:
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _signal(self, connection: Any) -> None:
        pid = next((pid for pid, other in self._running.items() if other is connection), None)
        if pid is None:  # ended meanwhile
            return
        number = connection.recv(1)
        if number:
            os.kill(pid, number[0])
            return
        os.kill(pid, signal.SIGKILL)  # the client was killed
        os.waitpid(pid, 0)
        self._running.pop(pid).close()


def _become(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Run the program of a request in this process, which was just forked."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    arguments: list[str] = request["arguments"]
    while arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        del arguments[0]
    sys.orig_argv = [sys.executable, *arguments]
    status = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0] = request["folder"]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    for finish in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            finish()
    os._exit(status)


def _serve(path: str) -> NoReturn:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from support.call_budget import count_calls  # the clients have no such path
    from support.committed_graphs import replay_exports

    replay_exports()
    count_calls()
    for module, names in _PRELOADED.items():
        imported = importlib.import_module(module)
        for name in names:
            getattr(imported, name)
    threads = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"a process with threads cannot be forked: {threads}"
    server = _Server(path)
    print("ready", flush=True)
    server.serve()


def _stand_for(path: str, arguments: list[str]) -> NoReturn:
    """Run as the client of the server at `path`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    for number in _FORWARDED:  # also if SIGINT is ignored, as in background jobs of a shell
        signal.signal(number, lambda which, _: connection.send(bytes([which])) and None)
    connection.connect(path)
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    status = int(connection.recv(16) or b"1")
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    _stand_for(sys.argv[1], sys.argv[2:])
