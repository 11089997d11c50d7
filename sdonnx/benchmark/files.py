"""The files that results are appended to: rows of CSV, lines of JSON."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdonnx.benchmark.record import COLUMNS, Row
from sdonnx.errors import OutputError
from sdonnx.folder import finite

__all__ = ["append_json", "append_row", "refuse_csv", "refuse_file"]


def refuse_csv(path: Path) -> None:
    """Look whether a row can be appended, before minutes of measuring are spent.

    Raises:
        OutputError: the file has other columns, or cannot be read or written.
    """
    refuse_file(path)
    header = _header(path)
    if header is not None and header != COLUMNS:
        raise OutputError(
            f"{path} has the columns {', '.join(header)!r}",  # whatever characters it holds
            ", ".join(COLUMNS),
            "choose another file with --csv, or move this one away",
        )


def append_row(path: Path, row: Row) -> None:
    """Append a row to a CSV file, after the header where the file is new or empty.

    Raises:
        OutputError: the file has other columns, or cannot be written.
    """
    refuse_csv(path)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if _header(path) is None:
        writer.writeheader()
    writer.writerow(row)
    _append(path, text.getvalue())


def refuse_file(path: Path) -> None:
    """Look whether a file can be written or appended to, before minutes of measuring are spent.

    Raises:
        OutputError: the file cannot be written.
    """
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is no folder", "a folder to write into", "make it first")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path} is no file", "a file, or a new name", "choose another name")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputError(f"{path} cannot be written", "permission to write", "choose another place")


def append_json(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a file of JSON lines; numbers that JSON does not have (NaN, infinity) become null.

    Raises:
        OutputError: the file cannot be written.
    """
    _append(path, json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n")


def _header(path: Path) -> tuple[str, ...] | None:
    """Return the columns of a CSV file, None where the file is missing or empty."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = next(csv.reader(file), None)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise OutputError(f"{path} cannot be read ({error})", "a CSV file", "choose another file with --csv") from error
    return None if first is None else tuple(first)


def _append(path: Path, text: str) -> None:
    """Append lines to a file in one piece; a last line that was left without its end gets it."""
    try:
        with path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            start = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(start + text.encode("utf-8", "backslashreplace"))  # names of files need not be text
    except OSError as error:
        raise OutputError(
            f"writing {path} failed ({error.strerror})",
            "a place with enough free space and permission to write",
            "choose another place",
        ) from error
