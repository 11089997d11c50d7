"""Files that were made to break their reader, and the process in which they are read."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from readers import READERS

__all__ = ["LIMIT_BYTES", "Reading"]

LIMIT_BYTES = 2 << 30
"""How much address space reading may take: a hundred times what the valid folders do."""

_DEADLINE_S = 20
_WORKER = Path(__file__).with_name("reading.py")


class Reading:
    """A folder of which files may be replaced, and a process that reads it again and again.

    Args:
        name: the reader.
        source: a valid folder.
        work: where a copy is made.
    """

    def __init__(self, name: str, source: Path, work: Path) -> None:
        self.name, self.folder = name, work / "folder"
        shutil.copytree(source, self.folder)
        self._valid = {file: (self.folder / file).read_bytes() for file in READERS[name].files}
        self._process: subprocess.Popen[str] | None = None
        self.counts: Counter[str] = Counter()
        assert self.told(warm=True) == ["read", []]

    def valid(self, file: str) -> bytes:
        """Return what a file held at first."""
        return self._valid[file]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def read(self, file: str, content: bytes) -> str:
        """Put other bytes into a file, read the folder, and require that nothing happens that must not.

        What is left out of what happens is success, and a failure that the user is told of in one line.
        """
        (self.folder / file).write_bytes(content)
        try:
            answer, seen = self.told()
        finally:
            (self.folder / file).write_bytes(self._valid[file])
        self.counts[answer] += 1
        assert not seen, seen
        assert answer in ("read", "refused", "refused unforeseen"), answer
        return answer

    def told(self, *, warm: bool = False) -> list[object]:
        """Return what the process says of the folder; a process that died or hangs is told of too."""
        if self._process is None:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(_WORKER.parent), *filter(None, sys.path)]),
                "OMP_NUM_THREADS": "1",
                "RUST_BACKTRACE": "0",
            }
            self._process = subprocess.Popen(
                [sys.executable, str(_WORKER), str(LIMIT_BYTES)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            )  # fmt: skip
            if not warm:
                self.told(warm=True)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([self.name, str(self.folder), warm]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], 120 if warm else _DEADLINE_S)
        line = process.stdout.readline() if ready else ""
        if line:
            answer: list[object] = json.loads(line)
            return answer
        status = process.poll() if not ready else process.wait()
        self.close()
        return ["hangs" if status is None else f"dies with status {status}", []]
