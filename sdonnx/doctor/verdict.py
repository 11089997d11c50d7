"""Judge the kernels of a GPU: the verdict, how it is reached, and the attention backends that the run-time avoids."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdonnx.doctor.check_kernels import (
    ATTENTION,
    BACKENDS,
    DEFAULT_BACKEND,
    CaseResult,
    Check,
    KernelCaseSet,
    compare,
)
from sdonnx.doctor.sessions import OpenKernel

__all__ = ["Key", "SummaryLine", "Verdict", "find_faulty_backends", "judge", "keep_known_faults", "summarize"]

_WITHOUT_FAULTY = "without faulty backends"

Key = Mapping[str, str]
"""The machine that a verdict holds for: the GPU, the driver, the libraries, the kernel cases."""


@dataclass(frozen=True)
class SummaryLine:
    """Counts of the results of one operator, or of attention with one backend, in one data type.

    Attributes:
        name: the operator or the backend.
        dtype: the data type.
        correct: the number of correct results.
        wrong: the number of wrong results.
        unavailable: the number of cases that did not run.
        max_error: the maximum relative error, None where no case ran.
    """

    name: str
    dtype: str
    correct: int
    wrong: int
    unavailable: int
    max_error: float | None


def summarize(results: Iterable[CaseResult]) -> tuple[SummaryLine, ...]:
    """Return one line for each operator, or backend, and data type."""
    grouped: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results:
        grouped.setdefault((result.backend or result.operator, result.dtype), []).append(result)
    lines = []
    for (name, dtype), group in sorted(grouped.items(), key=lambda item: item[0][0]):
        counts = [sum(result.state == state for result in group) for state in ("correct", "wrong", "not available")]
        errors = [result.error for result in group if result.error is not None]
        lines.append(SummaryLine(name, dtype, counts[0], counts[1], counts[2], max(errors, default=None)))
    return tuple(lines)


@dataclass(frozen=True)
class Verdict:
    """The result of a check of a GPU's kernels.

    Attributes:
        key: the machine that it holds for (`sdonnx.doctor.gpu.identity`).
        sdpa_kernel: the option that keeps attention from faulty backends, 0 where no backend must be avoided.
        faulty_backends: the attention backends whose numbers are wrong when only they are allowed.
        faults: the wrong results that remain with `sdpa_kernel`.
        unavailable: the cases that no kernel ran, in data types that every machine needs.
        checked: the number of cases that ran, counted once for each data type.
        complete: whether the check ended within its time limit.
        full: whether all cases were checked, rather than those of a first use.
        seconds: the duration of the check.
        summary: the counts of results by operator and by backend.
    """

    key: Key
    sdpa_kernel: int
    faulty_backends: tuple[str, ...]
    faults: tuple[CaseResult, ...]
    unavailable: tuple[CaseResult, ...]
    checked: int
    complete: bool
    full: bool
    seconds: float
    summary: tuple[SummaryLine, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether every kernel that ONNX Runtime chooses by default ran and is correct."""
        return not self.sdpa_kernel and not self.faults and not self.unavailable

    @property
    def cacheable(self) -> bool:
        """Whether a later check would come to the same verdict: it is complete, and no kernel ran out of memory."""
        return self.complete and not any(_ran_out_of_memory(result) for result in self.unavailable)


def _ran_out_of_memory(result: CaseResult) -> bool:
    text = result.failure.lower()
    return "memory" in text or "alloc" in text


def find_faulty_backends(results: Sequence[CaseResult]) -> tuple[tuple[str, ...], int]:
    """Return the faulty backends, and the value of sdpa_kernel that allows only the others (0 if there is none).

    Where a backend does not support a case, ONNX Runtime uses math (flash accepts no mask, memory-efficient accepts no
    key counts). A case for which math is wrong therefore shows nothing about another backend.

    Args:
        results: results of attention, with only one backend allowed at a time.
    """
    wrong = {
        name: {(result.case, result.dtype) for result in results if result.backend == name and result.wrong}
        for name in BACKENDS
    }
    faulty = tuple(name for name in BACKENDS if wrong[name] - (wrong["math"] if name != "math" else set()))
    return faulty, sum(bit for name, bit in BACKENDS.items() if name not in faulty)


def keep_known_faults(verdict: Verdict, known: Verdict | None) -> Verdict:
    """Return a verdict with those faults of a known one that its check did not refute.

    A check refutes the faults of an operator if it ended within its time limit, and all the operator's cases ran and
    are correct, for attention with `sdpa_kernel`. So a kernel that is known to be faulty does not become sound because
    a check lacked time or memory, or because a kernel failed.

    Args:
        verdict: the verdict of a check.
        known: the verdict that counted on this machine before the check: an earlier one, or the nearest; None for none.
    """
    if known is None:
        return verdict
    bad = {result.operator for result in (*verdict.faults, *verdict.unavailable)}

    def is_kept(operator: str) -> bool:
        return not verdict.complete or operator in bad

    changes: dict[str, Any] = {
        "faults": _united(verdict.faults, (result for result in known.faults if is_kept(result.operator)))
    }
    if not verdict.complete:
        changes["unavailable"] = _united(verdict.unavailable, known.unavailable)
    if is_kept(ATTENTION):
        # The backends that both allow; if there is none, those that were found now.
        both = verdict.sdpa_kernel & known.sdpa_kernel
        changes["sdpa_kernel"] = both or verdict.sdpa_kernel or known.sdpa_kernel
        names = {*verdict.faulty_backends, *known.faulty_backends}
        changes["faulty_backends"] = tuple(name for name in BACKENDS if name in names)
    return replace(verdict, **changes)


def _united(found: Sequence[CaseResult], known: Iterable[CaseResult]) -> tuple[CaseResult, ...]:
    """Return results, and known results of other cases."""
    cases = {(result.operator, result.case, result.dtype) for result in found}
    return *found, *(result for result in known if (result.operator, result.case, result.dtype) not in cases)


def judge(
    cases: KernelCaseSet,
    open_kernel: OpenKernel,
    key: Key,
    *,
    full: bool,
    limit_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    on_progress: Callable[[int], None] = lambda _: None,
) -> tuple[Verdict, list[CaseResult]]:
    """Check a GPU's kernels and return the verdict and all results.

    Args:
        cases: the kernel cases.
        open_kernel: opens graphs on the GPU.
        key: the machine that the verdict will hold for.
        full: check every case in every data type, and attention with each single backend. Otherwise check the cases of
            a first use in fp16, and single backends only if ONNX Runtime's choice is wrong.
        limit_s: seconds after which no case is started.
        clock: return the time in seconds.
        on_progress: called with the number of cases that have run.
    """
    start = clock()
    deadline = start + limit_s
    checks = [check for check in cases.checks if full or check.first_use]
    attention = [check for check in checks if check.case.op_type == ATTENTION]
    others = [check for check in checks if check.case.op_type != ATTENTION]
    dtypes = ("float16", "float32", "bfloat16") if full else ("float16",)
    results: list[CaseResult] = []

    def run(chosen: Sequence[Check], backends: Mapping[str, int]) -> list[CaseResult]:
        before = len(results)
        for result in compare(
            cases, chosen, open_kernel, dtypes=dtypes, backends=backends, deadline=deadline, clock=clock
        ):
            results.append(result)
            on_progress(len(results))
        return results[before:]

    of_attention = run(attention, {**DEFAULT_BACKEND, **BACKENDS} if full else DEFAULT_BACKEND)
    run(others, DEFAULT_BACKEND)
    of_single_backends = [result for result in of_attention if result.backend]
    faults = [result for result in of_attention if not result.backend and result.wrong]
    if faults and not full:
        of_single_backends = run(attention, BACKENDS)

    faulty, mask = find_faulty_backends(of_single_backends)
    sdpa_kernel = 0
    if faults and mask:
        # ONNX Runtime may choose another backend when several are allowed than when one is.
        again = run(attention, {_WITHOUT_FAULTY: mask})
        did_run = {(result.case, result.dtype) for result in again if result.error is not None}
        remaining = [result for result in again if result.wrong]
        remaining += [fault for fault in faults if (fault.case, fault.dtype) not in did_run]
        if len(remaining) < len(faults):
            sdpa_kernel, faults = mask, remaining
    by_default = [result for result in results if not result.backend]
    faults += [result for result in by_default if result.operator != ATTENTION and result.wrong]
    # Some GPUs that can generate images have no bfloat16.
    unavailable = [result for result in by_default if result.error is None and result.dtype != "bfloat16"]
    verdict = Verdict(
        dict(key),
        sdpa_kernel,
        faulty,
        tuple(faults),
        tuple(unavailable),
        len(by_default),
        clock() < deadline,
        full,
        round(clock() - start, 3),
        summarize(result for result in results if result.backend != _WITHOUT_FAULTY),
    )
    return verdict, results
