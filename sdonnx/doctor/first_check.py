"""Check kernels before the first image of a GPU, once: the results of kernel cases are kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from sdonnx.doctor.check_kernels import (
    KERNEL_CASES_FILE,
    OWN_KERNEL_CASES_FILE,
    CaseResult,
    compare,
    kernel_opener,
    read_kernel_cases,
)
from sdonnx.doctor.gpu import cuda_driver_version, cuda_libraries, driver_version, gpus
from sdonnx.doctor.kernel_library import KernelLibrary
from sdonnx.errors import OptionError
from sdonnx.folder.folder_cache import cache_folder

__all__ = [
    "EIGHT_BIT_OPERATORS",
    "LIMIT_S",
    "OFF",
    "ON",
    "SELF_CHECK",
    "STRICT",
    "KernelWarning",
    "formats_of_types",
    "kernel_faults",
    "machine_of",
    "self_check",
    "store_results",
]

_LOGGER = logging.getLogger(__name__)

SELF_CHECK = "SDONNX_SELF_CHECK"
"""The environment variable that says which kernels are checked before the first image."""

OFF, ON, STRICT = "0", "1", "strict"
"""None, and known faults of ONNX Runtime are ignored; our own on a GPU that is not trusted (the default); our own and
ONNX Runtime's on every GPU, where a fault is an error."""

LIMIT_S = 3.0
"""Seconds after which no further case is started; libraries are loaded before."""

EIGHT_BIT_OPERATORS = frozenset({"QuantizeRows", "LayerNormRows", "SplitGeluRows", "SumRows", "ScaledMatMul"})
"""Our operators that only quantized folders use. The names of their kernel cases contain the format of activations."""


class KernelWarning(UserWarning):
    """Kernels compute wrong numbers on this GPU, or could not be checked."""


def self_check() -> str:
    """Return the value of `SELF_CHECK`, one of `OFF`, `ON` and `STRICT`.

    Raises:
        OptionError: the environment variable has another value.
    """
    value = os.environ.get(SELF_CHECK) or ON
    if value not in (OFF, ON, STRICT):
        raise OptionError(f"{SELF_CHECK} is {value!r}", f"one of {OFF}, {ON}, {STRICT}")
    return value


def formats_of_types(types: Iterable[str]) -> frozenset[str]:
    """Return the formats of activations that quantization types multiply; none for weight-only types.

    GPUs before sm_89 have int8 matmuls, and none of fp8.

    Args:
        types: names of types (`sdonnx.quantization.quantization_types.TYPES`).
    """
    rounding = [name for name in types if "weightonly" not in name]
    return frozenset(each for name in rounding for each in (("int8",) if name.startswith("int8") else ("e4m3", "e5m2")))


def machine_of(index: int, library: KernelLibrary | None) -> dict[str, str]:
    """Return all that results depend on: the GPU, its driver and libraries, and the build of our own kernels."""
    import onnxruntime

    gpu = gpus()[index]
    machine = {
        "gpu": gpu.name,
        "compute_capability": ".".join(map(str, gpu.compute_capability)),
        "driver": driver_version() or ".".join(map(str, cuda_driver_version() or ())),
        **cuda_libraries(),
        "onnxruntime": str(onnxruntime.__version__),
    }
    if library is not None:
        code = "-".join(library.architectures_for(gpu.compute_capability))
        machine |= {"kernel_sources": library.sources, "kernel_compiler": library.compiler, "kernel_code": code}
    return machine


def kernel_faults(
    index: int,
    library: KernelLibrary | None,
    operators: Collection[str] | None,
    formats: Collection[str] = (),
    *,
    sdpa_kernel: int = 0,
    limit_s: float = LIMIT_S,
) -> list[str]:
    """Return why kernels cannot be used, in a clause for each operator and reason; nothing if all are correct.

    The cases of a first use run in fp16, unless an earlier check on this machine did so. After the time limit no
    further case is started; each that is left is a reason, and the next check goes on with it.

    Args:
        index: the number of the GPU.
        library: the library of our own kernels; None for ONNX Runtime's.
        operators: the operators to check; None for all.
        formats: the formats of activations in 8 bits to check.
        sdpa_kernel: the attention backends that ONNX Runtime may use, 0 for its choice.
        limit_s: seconds after which no case is started.

    Raises:
        FolderError: the kernel cases cannot be read.
    """
    cases = read_kernel_cases(KERNEL_CASES_FILE if library is None else OWN_KERNEL_CASES_FILE)
    needed = [
        check
        for check in cases.checks
        if check.first_use
        and (operators is None or check.case.op_type in operators)
        and (check.case.op_type not in EIGHT_BIT_OPERATORS or any(each in check.case.name for each in formats))
    ]
    machine = machine_of(index, library)
    known = _read_results(machine)
    missing = [check for check in needed if check.name not in known]
    if missing:
        owner = "ONNX Runtime's" if library is None else "our own"
        _LOGGER.info("checking %s kernels on %s once: %d cases", owner, machine["gpu"], len(missing))
        opener = kernel_opener("cuda", index, None if library is None else library.path)
        with suppress(Exception):  # opening a graph loads libraries; the check itself reports a failure
            opener(cases.graphs[missing[0].kernels["float16"]], {}, sdpa_kernel)
        deadline, options = time.monotonic() + limit_s, {"": sdpa_kernel}
        results = compare(
            cases, missing, opener, dtypes=["float16"], backends=options, is_late=lambda: time.monotonic() >= deadline
        )
        known = store_results(machine, results)
    late = f"not checked within {limit_s:.0f} s"
    found = {(check.case.op_type, known.get(check.name, late)) for check in needed}
    wrong_first = sorted(found, key=lambda each: (each[1] == late, each))
    return [f"{operator} is {reason}" for operator, reason in wrong_first if reason]


def store_results(machine: Mapping[str, str], results: Iterable[CaseResult]) -> dict[str, str]:
    """Add results in fp16 to the cached results of a machine, and return all: "" for a correct case, or a reason.

    A case that lacked memory is not stored, since it may run later.
    """
    known, passing = _read_results(machine), dict[str, str]()
    for result in results:
        if result.dtype == "float16" and not result.backend:
            reason = {"correct": "", "wrong": "wrong"}.get(result.state, f"not available ({result.failure})")
            lacks_memory = "memory" in reason.lower() or "alloc" in reason.lower()
            (passing if lacks_memory else known)[f"{result.operator} {result.case}"] = reason
    with suppress(OSError, RuntimeError):  # Path.expanduser raises RuntimeError where there is no home
        path = _path(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"machine": dict(machine), "results": known}, indent=1), encoding="utf-8")
        partial.replace(path)  # processes may write it at the same time
    return known | passing


def _read_results(machine: Mapping[str, str]) -> dict[str, str]:
    with suppress(OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError):
        document = json.loads(_path(machine).read_text(encoding="utf-8"))
        if document["machine"] == machine:
            return {str(name): str(reason) for name, reason in document["results"].items()}
    return {}


def _path(machine: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"kernels-{digest}.json"
