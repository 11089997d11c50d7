"""Return the verdict that the run-time uses: cached, shipped with the package, or by a quick check of the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from pathlib import Path

from sdonnx.doctor.cache import cached_verdicts, read_verdict, verdict_path, write_verdict
from sdonnx.doctor.check_kernels import KERNEL_CASES_FILE, KernelCaseSet, digest_of, read_kernel_cases
from sdonnx.doctor.gpu import identity
from sdonnx.doctor.measured_verdicts import MEASURED_VERDICTS_FILE, measured_verdicts
from sdonnx.doctor.nearest_verdict import nearest_verdict
from sdonnx.doctor.sessions import OpenKernel, kernel_opener
from sdonnx.doctor.verdict import Key, Verdict, judge, keep_known_faults
from sdonnx.errors import OptionError
from sdonnx.folder.lock import lock_file

__all__ = [
    "LIMIT_S",
    "SELF_CHECK",
    "KernelWarning",
    "SelfCheck",
    "complaint",
    "first_use",
    "known_verdict",
    "self_check",
]

SELF_CHECK = "SDONNX_SELF_CHECK"
"""The environment variable with a value of `SelfCheck`."""

LIMIT_S = 10.0
"""Seconds after which the check at a first use starts no further case; libraries are loaded before it."""


# Seconds to wait while another process checks the same machine, which ends within LIMIT_S once libraries are loaded.
_MAX_WAIT_S = 60.0


class KernelWarning(UserWarning):
    """A kernel computes wrong numbers on this GPU, or could not be checked."""


class SelfCheck(Enum):
    """When a GPU is checked on which no verdict is known; the values of `SELF_CHECK`."""

    OFF = "0"
    """Never; known verdicts are ignored, too."""
    BACKGROUND = "1"
    """In another process, behind the first image: the default."""
    STRICT = "strict"
    """Before the first image."""


def self_check(environment: Mapping[str, str] = os.environ) -> SelfCheck:
    """Return when kernels are checked.

    Raises:
        OptionError: the environment variable has another value.
    """
    value = environment.get(SELF_CHECK) or SelfCheck.BACKGROUND.value
    try:
        return SelfCheck(value)
    except ValueError:
        known = ", ".join(each.value for each in SelfCheck)
        raise OptionError(
            f"{SELF_CHECK} is {value!r}", f"one of {known}", "unset it to check a GPU behind its first image"
        ) from None


def known_verdict(
    key: Key, *, folder: Path | None = None, measured: Path = MEASURED_VERDICTS_FILE
) -> tuple[Verdict | None, bool]:
    """Return the nearest cached or shipped verdict on a machine, and whether it is of a machine equal in everything.

    If it is not, only versions of NVIDIA's driver and libraries differ (`sdonnx.doctor.nearest_verdict`).

    Args:
        key: the machine (`sdonnx.doctor.gpu.identity`).
        folder: the folder of verdicts, by default the user's cache.
        measured: the file of verdicts that ships with the package.

    Raises:
        FolderError: the file of verdicts cannot be read.
    """
    verdict = read_verdict(key, folder)
    if verdict is None:
        verdict = nearest_verdict(key, [*cached_verdicts(folder), *measured_verdicts(measured)])
    return verdict, verdict is not None and verdict.key == dict(key)


def first_use(
    index: int,
    *,
    folder: Path | None = None,
    cases: Path = KERNEL_CASES_FILE,
    measured: Path = MEASURED_VERDICTS_FILE,
    open_kernel: OpenKernel | None = None,
    identify: Callable[[int, str], Mapping[str, str]] = identity,
    read: Callable[[Path], KernelCaseSet] = read_kernel_cases,
    limit_s: float = LIMIT_S,
    fresh: bool = False,
) -> Verdict:
    """Return the verdict on a GPU: a known one, or that of a quick check, which is then cached.

    With a known verdict this reads two files. One process checks at a time, and the others wait for its verdict. If the
    folder cannot be written, every call runs the check. Known faults that a check does not refute are kept.

    Args:
        index: the number of the GPU.
        folder: the folder of verdicts, by default the user's cache.
        cases: the file of kernel cases.
        measured: the file of verdicts that ships with the package.
        open_kernel: opens graphs on the GPU.
        identify: return the machine's key from the GPU's number and the digest of the kernel cases.
        read: read the kernel cases.
        limit_s: seconds after which no case is started.
        fresh: check even if a verdict is known.

    Raises:
        FolderError: the kernel cases or the shipped verdicts cannot be read.
    """
    key = identify(index, digest_of(cases))
    known, is_equal = known_verdict(key, folder=folder, measured=measured)
    if known is not None and is_equal and not fresh:
        return known
    with _one_process(key, folder):
        cached = None if fresh else read_verdict(key, folder)  # by the process that was waited for
        if cached is not None:
            return cached
        case_set, open_kernel = read(cases), open_kernel or kernel_opener("cuda", index)
        _load_libraries(case_set, open_kernel)
        found, _ = judge(case_set, open_kernel, key, full=False, limit_s=limit_s)
        verdict = keep_known_faults(found, known)
        if verdict.cacheable:
            write_verdict(verdict, folder)
        return verdict


@contextmanager
def _one_process(key: Key, folder: Path | None) -> Iterator[None]:
    """Hold the lock of a machine's verdict. Where there are no locks, or after a minute, go on without."""
    with ExitStack() as stack:
        # OSError includes TimeoutError; Path.expanduser raises RuntimeError where there is no home.
        with suppress(OSError, RuntimeError):
            path = verdict_path(key, folder).with_suffix(".lock")
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(path, wait_s=_MAX_WAIT_S))
        yield


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
            f"{fix}, or see sdonnx doctor"
        )
    if not verdict.cacheable:
        lost = [f"; {result.operator} did not run ({result.failure})" for result in verdict.unavailable[:1]]
        return (
            f"the kernels of {gpu} were not all checked in {verdict.seconds:.0f} s{''.join(lost)}; "
            "expected a check of all; run sdonnx doctor once"
        )
    return ""
