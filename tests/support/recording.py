"""Append measurements of tests to a file of results, with the command, the versions and the commit."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Note", "recorded"]

Note = Callable[[str, dict[str, Any]], None]


@contextlib.contextmanager
def recorded(tests: str, path: Path | None) -> Iterator[Note]:
    """Yield a function that records a row under a title; all rows become one record of the file, if given.

    The record is written again with each row, so that a run that is killed leaves the rows until then.

    Args:
        tests: which tests they are.
        path: the file of JSON lines; None to keep nothing.
    """
    from sdonnx.benchmark.files import json_line
    from sdonnx.environment_record import environment

    rows: dict[str, list[dict[str, Any]]] = {}
    surroundings: dict[str, Any] = {}
    written = b""

    def write() -> None:
        nonlocal written
        if path is None or not rows:
            return
        if not surroundings:  # once, since it starts programs
            surroundings.update(environment())
        record = {"tests": tests, "command": shlex.join(sys.orig_argv), "measured": rows, "environment": surroundings}
        line = json_line(record).encode("utf-8", "backslashreplace")
        _replace_line(path, written, line)
        written = line

    def note(title: str, row: dict[str, Any]) -> None:
        rows.setdefault(title, []).append(row)
        write()

    yield note
    write()  # a test may have completed a row after it noted it


def _replace_line(path: Path, old: bytes, new: bytes) -> None:
    """Replace the last line of a file that equals `old`, or append `new`; a reader never sees half of it."""
    content = path.read_bytes() if path.exists() else b""
    before, found, after = content.rpartition(old) if old else (content, b"", b"")
    if old and not found:  # another program has replaced the file
        before, after = content, b""
    start = b"" if not before or before.endswith(b"\n") else b"\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(before + start + new + after)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
