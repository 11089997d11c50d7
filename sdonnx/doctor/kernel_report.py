"""Summarize the results of a machine's kernels for `sdonnx doctor`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sdonnx.doctor.check_kernels import BACKENDS, CaseResult

__all__ = ["faults_of", "faulty_backends", "report_of", "result_as_json", "summarize"]


def summarize(results: Iterable[CaseResult]) -> list[dict[str, Any]]:
    """Return a row for each operator, or backend, and data type: counts, and the maximum error, None if none ran."""
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results:
        groups.setdefault((result.backend or result.operator, result.dtype), []).append(result)
    rows = []
    for (name, dtype), group in sorted(groups.items(), key=lambda item: item[0][0]):
        states = [result.state for result in group]
        counts = {"correct": states.count("correct"), "wrong": states.count("wrong")}
        counts["unavailable"] = len(states) - sum(counts.values())
        error = max((result.error for result in group if result.error is not None), default=None)
        rows.append({"name": name, "dtype": dtype, **counts, "max_error": _finite(error)})
    return rows


def faults_of(results: Iterable[CaseResult]) -> list[CaseResult]:
    """Return the cases that are wrong or did not run as the run-time runs them; some GPUs have no bfloat16."""
    by_default = [result for result in results if not result.backend]
    return [each for each in by_default if each.wrong or (each.error is None and each.dtype != "bfloat16")]


def faulty_backends(results: Sequence[CaseResult]) -> list[str]:
    """Return the attention backends that are wrong if only they are allowed.

    Where a backend does not support a case, ONNX Runtime uses math (flash accepts no mask, memory-efficient accepts no
    key counts). A case for which math is wrong therefore shows nothing about another backend.
    """
    wrong = {
        name: {(result.case, result.dtype) for result in results if result.backend == name and result.wrong}
        for name in BACKENDS
    }
    return [name for name in BACKENDS if wrong[name] - (wrong["math"] if name != "math" else set())]


def report_of(machine: Mapping[str, str], results: Sequence[CaseResult], full: bool, seconds: float) -> dict[str, Any]:
    """Return the report on a machine's kernels, as a JSON object.

    Args:
        machine: all that the results depend on (`sdonnx.doctor.first_check.machine_of`).
        results: the results.
        full: whether all cases ran, or only the cases of a first use.
        seconds: the duration.
    """
    return {
        "key": dict(machine),
        "faulty_backends": faulty_backends(results),
        "faults": [result_as_json(result) for result in faults_of(results)],
        "checked": sum(not result.backend for result in results),
        "full": full,
        "seconds": round(seconds, 3),
        "summary": summarize(results),
    }


def result_as_json(result: CaseResult) -> dict[str, Any]:
    """Return a result as a JSON object; infinity becomes a string."""
    return {**asdict(result), "error": _finite(result.error), "state": result.state}


def _finite(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else str(number)
