"""Read malformed files in a separate process with limited memory."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from support.readers import READERS

__all__ = ["LIMIT_BYTES", "Reading"]

LIMIT_BYTES = 2 << 30
"""Maximum address space for reading, about 100 times the need of the valid folders."""

_DEADLINE_S = 20
_WORKER = Path(__file__).with_name("reading.py")


class Reading:
    """A folder with files that are replaced, and a process that reads it repeatedly.

    Args:
        name: the reader.
        source: a valid folder.
        work: folder for the copy.
    """

    def __init__(self, name: str, source: Path, work: Path) -> None:
        self.name, self.folder = name, work / "folder"
        shutil.copytree(source, self.folder)
        self._valid = {file: (self.folder / file).read_bytes() for file in READERS[name].files}
        self._process: subprocess.Popen[str] | None = None
        self.counts: Counter[str] = Counter()
        assert self.answer(warm=True) == ("read", [])

    def valid(self, file: str) -> bytes:
        """Return the original content of a file."""
        return self._valid[file]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def read(self, file: str, content: bytes) -> str:
        """Replace a file, read the folder, and check that reading succeeds or fails with a one-line error."""
        (self.folder / file).write_bytes(content)
        try:
            answer, seen = self.answer()
        finally:
            (self.folder / file).write_bytes(self._valid[file])
        self.counts[answer] += 1
        assert not seen, seen
        assert answer in ("read", "refused", "refused unforeseen"), answer
        return answer

    def answer(self, *, warm: bool = False) -> tuple[str, list[str]]:
        """Return the answer of the process and its forbidden events; a process that died or hangs is an answer too."""
        if self._process is None:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(_WORKER.parents[1]), *filter(None, sys.path)]),
                "OMP_NUM_THREADS": "1",
                "RUST_BACKTRACE": "0",
            }
            self._process = subprocess.Popen(
                [sys.executable, str(_WORKER), str(LIMIT_BYTES)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            )  # fmt: skip
            if not warm:
                self.answer(warm=True)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([self.name, str(self.folder), warm]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], 120 if warm else _DEADLINE_S)
        line = process.stdout.readline() if ready else ""
        if line:
            answer, seen = json.loads(line)
            return answer, seen
        status = process.poll() if not ready else process.wait()
        self.close()
        return "hangs" if status is None else f"dies with status {status}", []
