"""A process that reads folders which may be hostile, with little memory, and watches what reading does.

Each line of its standard input names a reader and a folder; each line of its standard output says how that went:
"read", "refused", or what must not be.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from readers import READERS

# Code is run, or another process or machine is spoken to. Libraries compile their own code when they are imported,
# hence these events are told from "<string>" and the like below.
_FORBIDDEN = {
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.fork", "os.forkpty",
    "socket.connect", "socket.getaddrinfo", "ctypes.dlopen", "code.__new__", "marshal.load", "marshal.loads",
}  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# Beside the folder, what Python and its libraries read for themselves.
_OWN = tuple(
    os.path.realpath(path)
    for path in {*sys.path, sys.prefix, sys.base_prefix, "/dev/null", "/dev/urandom", "/proc", "/sys", "/usr/share"}
    if path
)


class Watch:
    """The audit hook: what happened that must not, while a folder is read."""

    def __init__(self) -> None:
        self.folder = ""
        self.seen: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take part in an event."""
        if not self.folder:
            return
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            writes = isinstance(arguments[2], int) and bool(arguments[2] & _WRITES)
            own = path.startswith(_OWN) and not writes
            if not own and (writes or not path.startswith(self.folder + os.sep)) and path != "/dev/null":
                self.seen.append(f"{'writes' if writes else 'reads'} {path}")
        elif event in _FORBIDDEN and not self._of_an_import():
            self.seen.append(f"{event} {arguments!r:.200}")

    def _of_an_import(self) -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False


def main(limit_bytes: int) -> None:
    """Read folders until there are no more lines."""
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    tempfile.tempdir = tempfile.gettempdir()
    from sdonnx.errors import SdonnxError

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    watch = Watch()
    sys.addaudithook(watch)
    limited = False
    for line in sys.stdin:
        name, folder, warm = json.loads(line)
        if not warm and not limited:  # from what the libraries took on
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
        except BaseException as error:
            answer = f"raised {type(error).__name__}: {error!s:.300}"
        watch.folder = ""
        print(json.dumps([answer, watch.seen[:3]]), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
