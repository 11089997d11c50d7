"""Return the verdict that the run-time uses: from the cache, or by a quick check at the first use of a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from sdonnx.doctor.cache import read_verdict, write_verdict
from sdonnx.doctor.check_kernels import KERNEL_CASES_FILE, KernelCaseSet, digest_of, read_kernel_cases
from sdonnx.doctor.gpu import identity
from sdonnx.doctor.sessions import OpenKernel, kernel_opener
from sdonnx.doctor.verdict import Verdict, judge

__all__ = ["LIMIT_S", "SELF_CHECK", "KernelWarning", "complaint", "first_use", "is_wanted"]

SELF_CHECK = "SDONNX_SELF_CHECK"
"""The environment variable that disables the check where it is 0."""

LIMIT_S = 10.0
"""Seconds after which the check at a first use starts no further case; libraries are loaded before it."""


class KernelWarning(UserWarning):
    """A kernel of ONNX Runtime computes wrong numbers on this GPU, or could not be checked."""


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether kernels are checked at all."""
    return environment.get(SELF_CHECK, "1") != "0"


def first_use(
    index: int,
    *,
    folder: Path | None = None,
    cases: Path = KERNEL_CASES_FILE,
    open_kernel: OpenKernel | None = None,
    identify: Callable[[int, str], Mapping[str, str]] = identity,
    read: Callable[[Path], KernelCaseSet] = read_kernel_cases,
    limit_s: float = LIMIT_S,
) -> Verdict:
    """Return the verdict on a GPU: from the cache, or from a quick check whose verdict is then cached.

    With a cached verdict this reads two files. If the folder cannot be written, every call runs the check.

    Args:
        index: the number of the GPU.
        folder: the folder of verdicts, by default the user's cache.
        cases: the file of kernel cases.
        open_kernel: opens graphs on the GPU.
        identify: return the machine's key from the GPU's number and the digest of the kernel cases.
        read: read the kernel cases.
        limit_s: seconds after which no case is started.

    Raises:
        FolderError: the kernel cases cannot be read.
    """
    key = identify(index, digest_of(cases))
    cached = read_verdict(key, folder)
    if cached is not None:
        return cached
    case_set, open_kernel = read(cases), open_kernel or kernel_opener("cuda", index)
    _load_libraries(case_set, open_kernel)
    verdict, _ = judge(case_set, open_kernel, key, full=False, limit_s=limit_s)
    if verdict.cacheable:
        write_verdict(verdict, folder)
    return verdict


def _load_libraries(cases: KernelCaseSet, open_kernel: OpenKernel) -> None:
    """Open one graph, which loads gigabytes of libraries: from a cold disk that takes longer than the check."""
    check = next(check for check in cases.checks if check.first_use and not check.case.weights)
    with suppress(Exception):  # the check itself reports a failure
        open_kernel(cases.graphs[check.kernels["float16"]], {}, 0)


def complaint(verdict: Verdict, operators: Collection[str], cases: Path = KERNEL_CASES_FILE) -> str:
    """Return a one-line warning about the kernels that a folder uses, "" if there is nothing to warn about.

    Args:
        verdict: the verdict on the GPU.
        operators: the operators of the folder's graphs; faults of other operators are ignored.
        cases: the file of kernel cases, which holds the flags that leave operators out; read only if there are faults.

    Raises:
        FolderError: the file cannot be read.
    """
    wrong = sorted({result.operator for result in verdict.faults} & set(operators))
    gpu = verdict.key.get("gpu") or "this GPU"
    if wrong:
        known = read_kernel_cases(cases).flags
        flags = " ".join(dict.fromkeys(known[name] for name in wrong if name in known))
        fix = f"optimize the folder again with {flags}" if flags else "use another version of onnxruntime-gpu"
        return (
            f"ONNX Runtime's {', '.join(wrong)} computes wrong numbers on {gpu}; expected those of its reference; "
            f"{fix}, or see python -m sdonnx doctor"
        )
    if not verdict.cacheable:
        lost = [f"; {result.operator} did not run ({result.failure})" for result in verdict.unavailable[:1]]
        return (
            f"the kernels of {gpu} were not all checked in {verdict.seconds:.0f} s{''.join(lost)}; "
            "expected a check of all; run python -m sdonnx doctor once"
        )
    return ""
