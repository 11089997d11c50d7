"""Append results to files, CSV rows and JSON lines, and check beforehand that they can be."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdonnx.errors import OutputError
from sdonnx.folder.pipeline_folder import finite

__all__ = ["append_json", "append_row", "check_csv", "check_writable", "json_line"]


def check_csv(path: Path, columns: Sequence[str]) -> bool:
    """Check that a row can be appended; return whether the file is new or empty and needs a header.

    Raises:
        OutputError: the file has other columns, or is not readable or writable.
    """
    check_writable(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), None)
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise OutputError(f"{path} cannot be read ({error})", "a CSV file", "choose another file with --csv") from error
    if header is not None and header != list(columns):
        raise OutputError(
            f"{path} has the columns {', '.join(header)!r}",  # escaped: the file may contain any characters
            ", ".join(columns),
            "choose another file with --csv, or move this file",
        )
    return header is None


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a CSV file, with the header if the file is new or empty.

    Raises:
        OutputError: the file has other columns, or is not writable.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(row), lineterminator="\n")
    if check_csv(path, list(row)):
        writer.writeheader()
    writer.writerow(row)
    _append(path, text.getvalue())


def check_writable(path: Path) -> None:
    """Check that a file can be written or appended to, before minutes are spent on measuring.

    Raises:
        OutputError: the file is not writable.
    """
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is not a folder", "an existing folder")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path} is not a file", "a file, or a new name")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputError(f"{path} is not writable", "permission to write")


def append_json(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a file of JSON lines. NaN and Inf, which JSON does not support, become null.

    Raises:
        OutputError: the file is not writable.
    """
    _append(path, json_line(record))


def json_line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of JSON, with its end. NaN and Inf become null."""
    return json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n"


def _append(path: Path, text: str) -> None:
    """Append lines to a file in one write. Adds a missing line end before them."""
    try:
        with path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            start = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(start + text.encode("utf-8", "backslashreplace"))  # file names may contain undecodable bytes
    except OSError as error:
        raise OutputError(
            f"writing {path} failed ({error.strerror})",
            "a folder with enough free space and permission to write",
        ) from error
