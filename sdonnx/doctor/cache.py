"""Cache verdicts: one JSON file for each machine, in the user's cache folder."""

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

from sdonnx.doctor.check_kernels import CaseResult
from sdonnx.doctor.verdict import Key, SummaryLine, Verdict
from sdonnx.folder.cache_root import cache_folder

__all__ = [
    "cached_verdicts",
    "read_verdict",
    "result_as_json",
    "verdict_as_json",
    "verdict_from_json",
    "verdict_path",
    "write_verdict",
]

_FORMAT = 3


def verdict_path(key: Key, folder: Path | None = None) -> Path:
    """Return the path of a machine's verdict."""
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return (cache_folder() if folder is None else folder) / f"kernels-{digest}.json"


def read_verdict(key: Key, folder: Path | None = None) -> Verdict | None:
    """Return a machine's verdict, None if it is not cached or cannot be read."""
    with suppress(OSError, ValueError, RuntimeError):
        verdict = verdict_from_json(json.loads(verdict_path(key, folder).read_text(encoding="utf-8")))
        if verdict.key == dict(key):
            return verdict
    return None


def cached_verdicts(folder: Path | None = None) -> list[Verdict]:
    """Return the verdicts on all machines that are cached and can be read, in the order of their files' names."""
    found = []
    with suppress(OSError, RuntimeError):
        for path in sorted((cache_folder() if folder is None else folder).glob("kernels-*.json")):
            with suppress(OSError, ValueError):
                found.append(verdict_from_json(json.loads(path.read_text(encoding="utf-8"))))
    return found


def verdict_from_json(document: Any) -> Verdict:
    """Return the verdict of a JSON object written by `verdict_as_json`.

    Raises:
        ValueError: it is not such an object, or one of another version.
    """
    try:
        if document["format"] != _FORMAT:
            raise ValueError(f"a verdict of format {document['format']}, expected {_FORMAT}")
        return Verdict(
            {str(name): str(value) for name, value in document["key"].items()},
            int(document["sdpa_kernel"]),
            tuple(map(str, document["faulty_backends"])),
            tuple(map(_result, document["faults"])),
            tuple(map(_result, document["unavailable"])),
            int(document["checked"]),
            bool(document["complete"]),
            bool(document["full"]),
            float(document["seconds"]),
            tuple(map(_line, document["summary"])),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a verdict ({type(error).__name__}: {error})") from error


def verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as a JSON object, with everything that `verdict_from_json` reads."""
    return {
        "format": _FORMAT,
        "key": dict(verdict.key),
        "sdpa_kernel": verdict.sdpa_kernel,
        "faulty_backends": list(verdict.faulty_backends),
        "faults": [result_as_json(result) for result in verdict.faults],
        "unavailable": [result_as_json(result) for result in verdict.unavailable],
        "checked": verdict.checked,
        "complete": verdict.complete,
        "full": verdict.full,
        "seconds": verdict.seconds,
        "summary": [{**asdict(line), "max_error": _finite(line.max_error)} for line in verdict.summary],
    }


def write_verdict(verdict: Verdict, folder: Path | None = None) -> Path | None:
    """Write a verdict and return its path, None if the folder cannot be written."""
    partial: str | None = None
    try:
        path = verdict_path(verdict.key, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the last step is a rename: two processes may write it at once.
        handle, partial = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".partial", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(verdict_as_json(verdict), file, indent=1)
        os.replace(partial, path)
        partial = None
        return path
    except (OSError, RuntimeError):  # Path.expanduser raises RuntimeError where there is no home
        return None
    finally:
        if partial is not None:
            with suppress(OSError):
                os.unlink(partial)


def result_as_json(result: CaseResult) -> dict[str, Any]:
    """Return a result as a JSON object; infinity becomes a string."""
    return {**asdict(result), "error": _finite(result.error), "state": result.state}


def _finite(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else str(number)


def _result(document: Mapping[str, Any]) -> CaseResult:
    operator, case, dtype, backend = (str(document[name]) for name in ("operator", "case", "dtype", "backend"))
    return CaseResult(operator, case, dtype, backend, _number(document["error"]), str(document["failure"]))


def _line(document: Mapping[str, Any]) -> SummaryLine:
    correct, wrong, unavailable = (int(document[name]) for name in ("correct", "wrong", "unavailable"))
    name, dtype, max_error = str(document["name"]), str(document["dtype"]), _number(document["max_error"])
    return SummaryLine(name, dtype, correct, wrong, unavailable, max_error)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
