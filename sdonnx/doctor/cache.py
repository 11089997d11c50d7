"""Where verdicts are kept: one JSON file for each machine, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdonnx.doctor.kernels import Row
from sdonnx.doctor.verdict import Key, Line, Verdict

__all__ = ["CACHE", "cache_folder", "read_verdict", "row_as_json", "verdict_path", "write_verdict"]

CACHE = "SDONNX_CACHE"
"""The environment variable that names the folder of verdicts."""

_FORMAT = 1


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the user's folder of verdicts: $SDONNX_CACHE, or `sdonnx` in $XDG_CACHE_HOME or in ~/.cache."""
    if environment.get(CACHE):
        return Path(environment[CACHE])
    base = environment.get("XDG_CACHE_HOME") or ""
    # The XDG base directory specification: a relative path is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "sdonnx"


def verdict_path(key: Key, folder: Path | None = None) -> Path:
    """Return the file that holds a machine's verdict."""
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return (cache_folder() if folder is None else folder) / f"kernels-{digest}.json"


def read_verdict(key: Key, folder: Path | None = None) -> Verdict | None:
    """Return a machine's verdict, None where none is kept or it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        document = json.loads(verdict_path(key, folder).read_text(encoding="utf-8"))
        if document["format"] == _FORMAT and document["key"] == dict(key):
            return Verdict(
                dict(key),
                int(document["sdpa_kernel"]),
                tuple(map(str, document["lying"])),
                tuple(map(_row, document["faults"])),
                tuple(map(_row, document["unavailable"])),
                int(document["checked"]),
                True,
                bool(document["full"]),
                float(document["seconds"]),
                tuple(map(_line, document["table"])),
            )
    return None


def write_verdict(verdict: Verdict, folder: Path | None = None) -> Path | None:
    """Keep a verdict and return its file, None where the folder cannot be written."""
    document = {
        "format": _FORMAT,
        "key": dict(verdict.key),
        "sdpa_kernel": verdict.sdpa_kernel,
        "lying": verdict.lying,
        "faults": [row_as_json(row) for row in verdict.faults],
        "unavailable": [row_as_json(row) for row in verdict.unavailable],
        "checked": verdict.checked,
        "full": verdict.full,
        "seconds": verdict.seconds,
        "table": [{**asdict(line), "largest": _finite(line.largest)} for line in verdict.table],
    }
    partial: str | None = None
    try:
        path = verdict_path(verdict.key, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the file, so that the last step is a rename: two processes may write it at once.
        handle, partial = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".partial", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
        os.replace(partial, path)
        partial = None
        return path
    except (OSError, RuntimeError):  # Path.expanduser raises the second where there is no home
        return None
    finally:
        if partial is not None:
            with suppress(OSError):
                os.unlink(partial)


def row_as_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON takes it, which has no infinity."""
    return {**asdict(row), "error": _finite(row.error), "state": row.state}


def _finite(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else str(number)


def _row(document: Mapping[str, Any]) -> Row:
    operator, corner, dtype, backend = (str(document[name]) for name in ("operator", "corner", "dtype", "backend"))
    return Row(operator, corner, dtype, backend, _number(document["error"]), str(document["failure"]))


def _line(document: Mapping[str, Any]) -> Line:
    right, wrong, unavailable = (int(document[name]) for name in ("right", "wrong", "unavailable"))
    return Line(str(document["name"]), str(document["dtype"]), right, wrong, unavailable, _number(document["largest"]))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
