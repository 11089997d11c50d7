"""Check our own kernels on a GPU, like ONNX Runtime's: the first time, and in full by `sdonnx doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sdonnx.doctor.cache import write_verdict
from sdonnx.doctor.check_kernels import OWN_KERNEL_CASES_FILE, digest_of, read_kernel_cases
from sdonnx.doctor.first_use import LIMIT_S, first_use, known_verdict
from sdonnx.doctor.gpu import cublas_version, identity
from sdonnx.doctor.kernel_library import KernelLibrary
from sdonnx.doctor.measured_verdicts import MEASURED_VERDICTS_FILE
from sdonnx.doctor.sessions import OpenKernel, kernel_opener
from sdonnx.doctor.verdict import Key, Verdict, judge, keep_known_faults

__all__ = ["EIGHT_BIT_OPERATORS", "formats_of_types", "known_own_verdict", "own_identity", "own_verdict"]

EIGHT_BIT_OPERATORS = frozenset({"QuantizeRows", "LayerNormRows", "SplitGeluRows", "SumRows", "ScaledMatMul"})
"""Our operators that only quantized folders use. The names of their kernel cases contain the format of activations."""


def formats_of_types(types: Iterable[str]) -> frozenset[str]:
    """Return the formats of activations that quantization types multiply; none for those of weights only.

    GPUs before sm_89 have products of int8, and none of fp8.

    Args:
        types: names of types (`sdonnx.quantization.quantization_types.TYPES`).
    """
    rounding = [name for name in types if "weightonly" not in name]
    return frozenset(each for name in rounding for each in (("int8",) if name.startswith("int8") else ("e4m3", "e5m2")))


Identify = Callable[[int, str], Mapping[str, str]]


def own_identity(library: KernelLibrary, identify: Identify = identity) -> Identify:
    """Return a function like `sdonnx.doctor.gpu.identity`, whose result names everything that our kernels depend on.

    Next to the machine these are the library's sources, compiler, and code for the GPU, but not its file: a library
    that was compiled elsewhere, or for more architectures, has the same verdict. Our kernels call cuBLASLt and cuDNN.
    """

    def identify_with_library(index: int, cases: str) -> Mapping[str, str]:
        machine = identify(index, cases)
        major, minor = map(int, machine["compute_capability"].split("."))
        return {
            **machine,
            "cublas": cublas_version(),
            "kernel_sources": library.sources,
            "kernel_compiler": library.compiler,
            "kernel_code": "-".join(library.architectures_for((major, minor))),
        }

    return identify_with_library


def known_own_verdict(
    index: int,
    library: KernelLibrary,
    *,
    folder: Path | None = None,
    measured: Path = MEASURED_VERDICTS_FILE,
    identify: Identify = identity,
) -> tuple[Key, Verdict | None]:
    """Return what a verdict on our own kernels depends on here, and the verdict if it is cached or ships.

    The verdict may be of other versions of NVIDIA's driver and libraries; compare its key.

    Args:
        index: the number of the GPU.
        library: the library of the kernels.
        folder: the folder of verdicts, by default the user's cache.
        measured: the file of verdicts that ships with the package.
        identify: return the machine's key from the GPU's number and the digest of the kernel cases.

    Raises:
        FolderError: the kernel cases or the shipped verdicts cannot be read.
    """
    key = own_identity(library, identify)(index, digest_of(OWN_KERNEL_CASES_FILE))
    return key, known_verdict(key, folder=folder, measured=measured)[0]


def own_verdict(
    index: int,
    library: KernelLibrary,
    *,
    full: bool = False,
    fresh: bool = False,
    folder: Path | None = None,
    measured: Path = MEASURED_VERDICTS_FILE,
    open_kernel: OpenKernel | None = None,
    identify: Identify = identity,
    limit_s: float = LIMIT_S,
) -> Verdict:
    """Return the verdict on our own kernels on a GPU, a known one or that of a check, which is then cached.

    Known faults that a check does not refute are kept.

    Args:
        index: the number of the GPU.
        library: the library of the kernels.
        full: check all cases, whatever is known. Otherwise check those of a first use, if nothing is known.
        fresh: check although a verdict is known.
        folder: the folder of verdicts, by default the user's cache.
        measured: the file of verdicts that ships with the package.
        open_kernel: opens graphs on the GPU.
        identify: return the machine's key from the GPU's number and the digest of the kernel cases.
        limit_s: seconds after which a check at a first use starts no further case.

    Raises:
        FolderError: the kernel cases or the shipped verdicts cannot be read.
    """
    opener = open_kernel or kernel_opener("cuda", index, library.path)
    named, cases = own_identity(library, identify), OWN_KERNEL_CASES_FILE
    if not full:
        return first_use(
            index,
            folder=folder,
            cases=cases,
            measured=measured,
            open_kernel=opener,
            identify=named,
            limit_s=limit_s,
            fresh=fresh,
        )
    key = named(index, digest_of(cases))
    found, _ = judge(read_kernel_cases(cases), opener, key, full=True)
    verdict = keep_known_faults(found, known_verdict(key, folder=folder, measured=measured)[0])
    if verdict.cacheable:
        write_verdict(verdict, folder)
    return verdict
