"""Run a command with a fault: `python tests/support/faulty.py FAULT NUMBER FOLDER MODULE [ARGUMENT ...]`.

Python calls audit hooks (PEP 578) before each file is opened or changed. FAULT happens at each change within FOLDER,
beginning with number NUMBER (from 0):

    count     no fault; the number of changes is written to standard error at the end
    kill      SIGKILL
    ENOSPC    the disk is full; any other name of `errno` raises that error
    MemoryError   no memory is left, only at that one change
"""

from __future__ import annotations

import errno
import os
import runpy
import signal
import sys
from typing import Any

_CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.copyfile", "os.chmod", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Fault:
    """Audit hook that injects the fault."""

    def __init__(self, kind: str, number: int, folder: str) -> None:
        self.kind, self.number, self.folder = kind, number, os.path.realpath(folder)
        self.seen = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event."""
        if not self._changes(event, arguments):
            return
        self.seen += 1
        if self.seen <= self.number or self.kind == "count":
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "MemoryError":
            if self.seen == self.number + 1:
                raise MemoryError
            return
        if event not in ("os.remove", "os.rmdir"):  # deleting works on a full disk
            code = getattr(errno, self.kind)
            raise OSError(code, os.strerror(code))

    def _changes(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            path, _, flags = arguments
            changes = isinstance(flags, int) and bool(flags & _WRITES)
        else:
            path = arguments[0] if arguments else None
            changes = event in _CHANGES
        return (
            changes and isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(self.folder + os.sep)
        )


def main(kind: str, number: str, folder: str, module: str, *arguments: str) -> None:
    """Run the module as a command."""
    fault = Fault(kind, int(number), folder)
    sys.addaudithook(fault)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        if kind == "count":
            print(f"changes: {fault.seen}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
