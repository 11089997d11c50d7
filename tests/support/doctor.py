"""Kernels of a GPU: ONNX Runtime's replaced by reference bodies, and our own emulated, both on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdonnx.doctor import first_check, gpu
from sdonnx.doctor.check_kernels import (
    ATTENTION,
    OWN_KERNEL_CASES_FILE,
    Check,
    Kernel,
    KernelCaseSet,
    OpenKernel,
    kernel_opener,
    read_kernel_cases,
)
from sdonnx.doctor.environment import Facts
from sdonnx.doctor.kernel_library import KernelLibrary, open_kernel_library
from sdonnx.operators.kernel_case import Array
from support.kernel_library import emulated_library

CASE_SET = read_kernel_cases()
OWN_CASE_SET = read_kernel_cases(OWN_KERNEL_CASES_FILE)
H200 = gpu.Gpu("NVIDIA H200", (9, 0))
MACHINE = {
    "gpu": "NVIDIA H200",
    "compute_capability": "9.0",
    "driver": "580.82.07",
    "cudnn": "92000",
    "onnxruntime": "1.31.1",
}
FAULT_ERROR = 0.1
KEY_COUNT_CASES = "lengths H=64 "
ErrorOf = Callable[[bytes, int], float]


def reference_of(check: Check) -> bytes:
    return CASE_SET.graphs[check.reference]


def machine(
    error_of: ErrorOf = lambda content, mask: 0.0, failure_of: Callable[[bytes, int], str] = lambda content, mask: ""
) -> Any:
    """Return an `OpenKernel` that runs the reference bodies on the CPU instead of a GPU's kernels.

    Args:
        error_of: return the relative error to add, from the graph and sdpa_kernel.
        failure_of: return the reason why the graph cannot be opened, "" where it can.
    """
    bodies = {
        CASE_SET.graphs[kernel]: reference_of(check) for check in CASE_SET.checks for kernel in check.kernels.values()
    }

    def opened(content: bytes, weights: Mapping[str, Array], sdpa_kernel: int) -> Kernel:
        if reason := failure_of(content, sdpa_kernel):
            raise RuntimeError(reason)
        wide = {name: array.astype(np.float32) for name, array in weights.items()}
        body = kernel_opener("cpu")(bodies[content], wide, 0)

        def run(feeds: Mapping[str, Array]) -> list[Array]:
            floats = {name: array.astype(np.float32) for name, array in feeds.items() if array.dtype.kind == "f"}
            results = body({**feeds, **floats})
            return [result * np.float32(1 + error_of(content, sdpa_kernel)) for result in results]

        return run

    return opened


def graphs_of(op_type: str) -> set[bytes]:
    return {
        CASE_SET.graphs[kernel]
        for check in CASE_SET.checks
        if check.case.op_type == op_type
        for kernel in check.kernels.values()
    }


def faulty(op_type: str, masks: Callable[[int], bool] = lambda mask: True) -> ErrorOf:
    graphs = graphs_of(op_type)
    return lambda content, mask: FAULT_ERROR if content in graphs and masks(mask) else 0.0


def small_set() -> KernelCaseSet:
    """Return two cases of attention and one of another operator, for which a full check is quick."""
    attention = [c for c in CASE_SET.checks if c.first_use and c.case.op_type == ATTENTION][:2]
    others = [c for c in CASE_SET.checks if c.first_use and c.case.op_type == "BiasAdd"]
    return replace(CASE_SET, checks=(*attention, *others))


GOOD = Facts(
    {"onnxruntime-gpu": "1.31.1"},
    "",
    ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "13.0",
    "580.82.07",
    (13, 0),
    (H200,),
)


class EmulatedGpu:
    """A GPU for the check before a first image, which is not trusted and on which our own kernels are emulated.

    Attributes:
        library: the library of our own kernels, as one for this GPU.
        machine: all that results depend on, except the library.
        factors: by operator, a factor by which its kernels are wrong.
        failures: by operator, the reason why its kernels do not run.
        ran: the operators of the cases that ran, in order.
        masks: the attention backends that were allowed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.library = replace(open_kernel_library(emulated_library()), architectures=("80", "86", "90a"))
        self.machine = MACHINE | {"gpu": "NVIDIA A10", "compute_capability": "8.6"}
        self.factors: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.ran: list[str] = []
        self.masks: set[int] = set()
        monkeypatch.setenv("SDONNX_CACHE", str(cache))
        monkeypatch.setattr(first_check, "machine_of", self._machine_of)
        monkeypatch.setattr(first_check, "kernel_opener", self.opener)

    def _machine_of(self, index: int, library: KernelLibrary | None) -> dict[str, str]:
        return self.machine | ({} if library is None else {"kernel_sources": library.sources})

    def opener(self, provider: str, index: int, library: Path | None) -> OpenKernel:
        assert provider == "cuda"
        cases = CASE_SET if library is None else OWN_CASE_SET
        names = {cases.graphs[name]: each.case.op_type for each in cases.checks for name in each.kernels.values()}
        inner = machine() if library is None else kernel_opener("cpu", library=library)

        def opened(content: bytes, weights: Mapping[str, Array], sdpa_kernel: int) -> Kernel:
            name = names[content]
            kernel = inner(content, weights, sdpa_kernel)
            self.masks.add(sdpa_kernel)

            def run(feeds: Mapping[str, Array]) -> list[Array]:
                self.ran.append(name)
                if name in self.failures:
                    raise RuntimeError(self.failures[name])
                return [(array * self.factors.get(name, 1)).astype(array.dtype) for array in kernel(feeds)]

            return run

        return opened
