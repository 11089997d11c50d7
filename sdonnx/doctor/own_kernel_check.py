"""Check our own kernels on a GPU, like ONNX Runtime's: the first time, and in full by `sdonnx doctor`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from sdonnx.doctor.cache import write_verdict
from sdonnx.doctor.check_kernels import OWN_KERNEL_CASES_FILE, digest_of, read_kernel_cases
from sdonnx.doctor.first_use import LIMIT_S, first_use
from sdonnx.doctor.gpu import identity
from sdonnx.doctor.sessions import OpenKernel, kernel_opener
from sdonnx.doctor.verdict import Verdict, judge

__all__ = ["own_identity", "own_verdict"]

Identify = Callable[[int, str], Mapping[str, str]]


def own_identity(library: Path, identify: Identify = identity) -> Identify:
    """Return a function like `sdonnx.doctor.gpu.identity` whose result also names the library, by its content."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest()[:16]

    def identify_with_library(index: int, cases: str) -> Mapping[str, str]:
        return {**identify(index, cases), "kernel_library": digest}

    return identify_with_library


def own_verdict(
    index: int,
    library: Path,
    *,
    full: bool = False,
    fresh: bool = False,
    folder: Path | None = None,
    open_kernel: OpenKernel | None = None,
    identify: Identify = identity,
    limit_s: float = LIMIT_S,
) -> Verdict:
    """Return the verdict on our own kernels on a GPU, a cached one or that of a check, which is then cached.

    Args:
        index: the number of the GPU.
        library: the library of the kernels.
        full: check all cases, whatever is cached. Otherwise check those of a first use, if nothing is cached.
        fresh: check although there is a cached verdict.
        folder: the folder of verdicts, by default the user's cache.
        open_kernel: opens graphs on the GPU.
        identify: return the machine's key from the GPU's number and the digest of the kernel cases.
        limit_s: seconds after which a check at a first use starts no further case.

    Raises:
        FolderError: the kernel cases cannot be read.
    """
    opener = open_kernel or kernel_opener("cuda", index, library)
    named = own_identity(library, identify)
    if not full:
        cases = OWN_KERNEL_CASES_FILE
        return first_use(
            index, folder=folder, cases=cases, open_kernel=opener, identify=named, limit_s=limit_s, fresh=fresh
        )
    key = named(index, digest_of(OWN_KERNEL_CASES_FILE))
    verdict, _ = judge(read_kernel_cases(OWN_KERNEL_CASES_FILE), opener, key, full=True)
    if verdict.cacheable:
        write_verdict(verdict, folder)
    return verdict
