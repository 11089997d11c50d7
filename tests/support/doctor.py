"""Kernels of a GPU, replaced by reference bodies on the CPU, and verdicts on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sdonnx.doctor import gpu
from sdonnx.doctor.background_check import BackgroundCheck
from sdonnx.doctor.check_kernels import ATTENTION, CaseResult, Check, KernelCaseSet, read_kernel_cases
from sdonnx.doctor.environment import Facts
from sdonnx.doctor.sessions import Kernel, kernel_opener
from sdonnx.doctor.verdict import SummaryLine, Verdict
from sdonnx.operators.case import Array

CASE_SET = read_kernel_cases()
H200 = gpu.Gpu("NVIDIA H200", (9, 0))
KEY = {"gpu": "NVIDIA H200", "driver": "580.82.07", "onnxruntime": "1.31.1", "kernel_cases": "c0ffee"}
FAULT_ERROR = 0.1
KEY_COUNT_CASES = "lengths H=64 "
ErrorOf = Callable[[bytes, int], float]


class AwaitedCheck(BackgroundCheck):
    """A check in the background that runs no process, and ends when a test says so."""

    def __init__(self) -> None:
        super().__init__(0, lambda index: pytest.fail("a process"))
        self.starts = 0

    def start(self) -> None:
        self.starts += 1

    def end(self, verdict: Verdict, own: Verdict | None) -> None:
        self._own_verdict, self._verdict = own, verdict


def reference_of(check: Check) -> bytes:
    return CASE_SET.graphs[check.reference]


def machine(
    error_of: ErrorOf = lambda content, mask: 0.0, failure_of: Callable[[bytes, int], str] = lambda content, mask: ""
) -> Any:
    """Return an `OpenKernel` that runs the reference bodies on the CPU in place of a GPU's kernels.

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


FAULT = CaseResult("BiasAdd", "C=320 3x7", "float16", "", float("inf"))
FOUND = Verdict(
    KEY, 26, ("flash",), (FAULT,), (), 27, True, False, 1.5, (SummaryLine("BiasAdd", "float16", 0, 1, 0, 0.5),)
)


def refuse_to_open(content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel:
    raise AssertionError("there is a cached verdict")


GOOD = Facts(
    {"onnxruntime-gpu": "1.31.1"},
    "",
    ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "13.0",
    "580.82.07",
    (13, 0),
    (H200,),
)
