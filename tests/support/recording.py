"""Append measurements of tests to a file of results, with the command, the versions and the commit."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Note", "recorded"]

Note = Callable[[str, dict[str, Any]], None]


@contextlib.contextmanager
def recorded(tests: str, path: Path | None) -> Iterator[Note]:
    """Yield a function that records a row under a title; at the end all rows become one record of the file, if given.

    Args:
        tests: which tests they are.
        path: the file of JSON lines; None to keep nothing.
    """
    from sdonnx.benchmark.files import append_json
    from sdonnx.benchmark.record import environment

    rows: dict[str, list[dict[str, Any]]] = {}
    yield lambda title, row: rows.setdefault(title, []).append(row)
    if path is not None and rows:
        record = {"tests": tests, "command": shlex.join(sys.orig_argv), "measured": rows, "environment": environment()}
        append_json(path, record)
