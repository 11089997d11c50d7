"""Read folders that may be malicious, with limited memory, and watch for forbidden events.

Each line of standard input names a reader and a folder; each line of standard output is the result: "read", "refused",
or a description of the violation.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from support.readers import READERS

# Events that run code, or reach another process or machine. Imports of libraries compile code as well, which
# `_of_an_import` excludes.
_FORBIDDEN = {
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.fork", "os.forkpty",
    "socket.connect", "socket.getaddrinfo", "ctypes.dlopen", "code.__new__", "marshal.load", "marshal.loads",
}  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# Files outside the folder that Python and its libraries read.
_OWN = tuple(
    os.path.realpath(path)
    for path in {*sys.path, sys.prefix, sys.base_prefix, "/dev/null", "/dev/urandom", "/proc", "/sys", "/usr/share"}
    if path
)


class Watch:
    """Audit hook that records forbidden events while a folder is read."""

    def __init__(self) -> None:
        self.folder = ""
        self.seen: list[str] = []
        self.temporary: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event."""
        if not self.folder:
            return
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            writes = isinstance(arguments[2], int) and bool(arguments[2] & _WRITES)
            own = (path.startswith(_OWN) and not writes) or f"{path}{os.sep}".startswith(tuple(self.temporary))
            inside = path.startswith(self.folder + os.sep) and not writes
            # An import writes a cache of compiled code, if there is none yet.
            if not own and not inside and path != "/dev/null" and not (writes and self._of_an_import()):
                self.seen.append(f"{'writes' if writes else 'reads'} {path}")
        elif event == "tempfile.mkdtemp":
            self.temporary.append(f"{os.path.realpath(arguments[0])}{os.sep}")
        elif event in _FORBIDDEN and not self._of_an_import():
            self.seen.append(f"{event} {arguments!r:.200}")

    def _of_an_import(self) -> bool:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False


def main(limit_bytes: int) -> None:
    """Read folders until there are no more lines."""
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    tempfile.tempdir = tempfile.gettempdir()
    from sdonnx.errors import SdonnxError

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries is not an answer
    watch = Watch()
    sys.addaudithook(watch)
    limited = False
    for line in sys.stdin:
        name, folder, warm = json.loads(line)
        if not warm and not limited:  # on top of the memory of the libraries
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + limit_bytes, resource.RLIM_INFINITY))
            limited = True
        watch.seen.clear()
        watch.folder = "" if warm else os.path.realpath(folder)
        try:
            READERS[name].read(Path(folder))
            answer = "read"
        except SdonnxError as error:
            text = str(error)
            answer = "refused" if text.isprintable() and len(text) < 4000 else f"refused badly: {text!r:.200}"
            if error.__cause__ is not None and "cannot be used (" in text:
                answer = "refused unforeseen"
            if isinstance(error.__cause__, MemoryError):
                answer = f"runs out of memory: {text:.200}"
        except BaseException as error:
            answer = f"raised {type(error).__name__}: {error!s:.300}"
        watch.folder = ""
        print(json.dumps([answer, watch.seen[:3]]), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
