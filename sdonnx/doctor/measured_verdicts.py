"""Verdicts that ship with the package: of machines whose kernels were checked, from docs/results.

`scripts/write_measured_verdicts.py` writes them to `measured_verdicts.json`. Those on our own kernels name the sources
that were compiled, so no verdict holds for edited sources.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sdonnx.doctor.cache import verdict_as_json, verdict_from_json
from sdonnx.doctor.verdict import Verdict
from sdonnx.errors import FolderError

__all__ = ["MEASURED_VERDICTS_FILE", "measured_verdict_file", "measured_verdicts", "verdicts_of_record"]

MEASURED_VERDICTS_FILE = Path(__file__).with_name("measured_verdicts.json")

# Everything that a key names: see sdonnx.doctor.gpu.identity, and own_identity of sdonnx.doctor.own_kernel_check.
_PARTS = ("gpu", "compute_capability", "driver", "cuda_runtime", "cudnn", "onnxruntime", "kernel_cases")
_OWN_PARTS = (*_PARTS, "cublas", "kernel_sources", "kernel_compiler", "kernel_code")

# Titles of the GPU tests' records of full checks (tests/gpu/test_doctor_gpu.py and test_kernels_gpu.py).
_TEST_TITLES = ("doctor: whole check", "own kernels, whole check")

# Names of verdicts in a report of the doctor, and in those records.
_NAME, _OWN_NAME = "verdict", "own_kernels"


def measured_verdicts(file: Path = MEASURED_VERDICTS_FILE) -> list[Verdict]:
    """Return the shipped verdicts.

    Args:
        file: the file of verdicts.

    Raises:
        FolderError: the file cannot be read.
    """
    try:
        entries = json.loads(file.read_bytes())["verdicts"]
        return [verdict_from_json(entry["verdict"]) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderError(
            f"{file} cannot be read ({error})", "the file of this version", "install sdonnx again"
        ) from error


def verdicts_of_record(text: str) -> list[tuple[bool, dict[str, Any]]]:
    """Return the verdicts in a file of results, as JSON objects, each with whether it is on our own kernels.

    Args:
        text: output of `sdonnx doctor --json`, or records of the GPU tests, one JSON object for each line.
    """
    try:
        documents = [json.loads(text)]
    except ValueError:
        documents = [json.loads(line) for line in text.splitlines() if line.strip()]
    found = []
    for document in documents:
        if isinstance(document, dict):
            measured = document.get("measured")
            rows = [document]
            if isinstance(measured, dict):
                rows += [row for title in _TEST_TITLES for row in measured.get(title, [])]
            for row in rows:
                found += [
                    (name == _OWN_NAME, row[name]) for name in (_NAME, _OWN_NAME) if isinstance(row.get(name), dict)
                ]
    return found


def measured_verdict_file(records: Iterable[tuple[str, str]], kernel_cases: str, own_kernel_cases: str) -> str:
    """Return the content of the file of verdicts.

    Records that cannot be used are listed with the reason. A verdict on our own kernels is written whatever the sources
    are now: its key names the sources that it holds for.

    Args:
        records: (name, text) of each file of results.
        kernel_cases: digest of this version's kernel cases of ONNX Runtime's operators.
        own_kernel_cases: digest of this version's kernel cases of our own operators.
    """
    verdicts: dict[str, dict[str, Any]] = {}
    left_out = []
    for source, text in records:
        for is_own, document in verdicts_of_record(text):
            needed, cases = (_OWN_PARTS, own_kernel_cases) if is_own else (_PARTS, kernel_cases)
            verdict, reason = _usable(document, needed, cases)
            if verdict is None:
                left_out.append({"source": source, "reason": reason})
                continue
            name = json.dumps(dict(verdict.key), sort_keys=True)
            # A full check says more than one of a first use; of two alike, the first in order of names is kept.
            if name not in verdicts or (verdict.full and not verdicts[name]["verdict"]["full"]):
                verdicts[name] = {"source": source, "verdict": verdict_as_json(verdict)}
    content = {"verdicts": [verdicts[name] for name in sorted(verdicts)], "left_out": left_out}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _usable(document: Mapping[str, Any], parts: Iterable[str], kernel_cases: str) -> tuple[Verdict | None, str]:
    """Return the verdict of a record, or the reason why it does not hold for this version."""
    given = document.get("key")
    key: Mapping[str, Any] = given if isinstance(given, dict) else {}
    missing = [name for name in parts if not key.get(name)]
    if missing:
        return None, f"does not name {', '.join(missing)}"
    if key["kernel_cases"] != kernel_cases:
        return None, f"checked other kernel cases ({key['kernel_cases']}) than those of this version ({kernel_cases})"
    try:
        verdict = verdict_from_json(document)
    except ValueError as error:
        return None, str(error)
    return (verdict, "") if verdict.cacheable else (None, "the check was not complete")
