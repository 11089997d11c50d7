"""Compare kernels with their reference bodies, one kernel case after another.

`sdonnx.operators.kernel_case_graphs` writes the graphs of both to `kernel_cases.json`. The reference runs in float32 on
the CPU, on the same values as the kernel.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sdonnx.errors import FolderError
from sdonnx.metrics import output_error
from sdonnx.operators.kernel_case import TOLERANCE, Array, KernelCase, rounded

__all__ = [
    "ATTENTION",
    "BACKENDS",
    "DEFAULT_BACKEND",
    "KERNEL_CASES_FILE",
    "OWN_KERNEL_CASES_FILE",
    "CaseResult",
    "Check",
    "Kernel",
    "KernelCaseSet",
    "OpenKernel",
    "compare",
    "kernel_opener",
    "read_kernel_cases",
]

Result = TypeVar("Result")

Kernel = Callable[[Mapping[str, Array]], list[Array]]
"""Run a graph: inputs by name -> outputs, in order."""

OpenKernel = Callable[[bytes, Mapping[str, Array], int], Kernel]
"""Open a graph: (serialized model, weights by name, sdpa_kernel) -> kernel."""

KERNEL_CASES_FILE = Path(__file__).with_name("kernel_cases.json")
OWN_KERNEL_CASES_FILE = Path(__file__).with_name("own_kernel_cases.json")
"""The cases of our own operators, which need `libsdonnx_kernels.so` (`sdonnx.doctor.kernel_library`)."""

ATTENTION = "MultiHeadAttention"

BACKENDS: Mapping[str, int] = {"flash": 1, "memory-efficient": 2, "cuDNN": 8, "math": 16}
"""Bits of the CUDA provider's option sdpa_kernel (onnxruntime/contrib_ops/cpu/bert/attention_common.h).

Where no allowed backend supports a size or a mask, ONNX Runtime uses math, whether it is allowed or not.
"""

DEFAULT_BACKEND: Mapping[str, int] = {"": 0}
"""ONNX Runtime chooses the backend."""

_FATAL = 4  # of ONNX Runtime's severities
_MAX_THREADS = 4


@dataclass(frozen=True)
class Check:
    """A kernel case and its graphs.

    Attributes:
        case: the kernel case, without its attributes, which the graphs hold.
        float32_inputs: the inputs that are float32 in every precision.
        first_use: whether the case is checked at the first use of a GPU.
        cpu: whether the CPU provider has this kernel.
        reference: the name of the reference body's graph, in float32.
        kernels: the name of the operator's graph, by data type.
    """

    case: KernelCase
    float32_inputs: tuple[int, ...]
    first_use: bool
    cpu: bool
    reference: str
    kernels: Mapping[str, str]

    @property
    def name(self) -> str:
        """The operator and the name of the case."""
        return f"{self.case.op_type} {self.case.name}"


@dataclass(frozen=True)
class KernelCaseSet:
    """The content of the file of kernel cases.

    Attributes:
        checks: the cases.
        graphs: the serialized graphs, by name.
        flags: the flag of `sdonnx optimize` that leaves an operator out, by operator.
    """

    checks: tuple[Check, ...]
    graphs: Mapping[str, bytes]
    flags: Mapping[str, str]


@dataclass(frozen=True)
class CaseResult:
    """The result of a kernel for one case.

    Attributes:
        operator: the operator.
        case: the name of the case.
        dtype: "float16", "float32" or "bfloat16".
        backend: the only one of BACKENDS that was allowed, "" for ONNX Runtime's choice.
        error: the relative error to the reference, infinite for NaN; None where the kernel did not run.
        failure: the reason why the kernel did not run.
    """

    operator: str
    case: str
    dtype: str
    backend: str = ""
    error: float | None = None
    failure: str = ""

    @property
    def state(self) -> str:
        """One of "correct", "wrong" and "not available"; the last where the kernel did not run."""
        if self.error is None:
            return "not available"
        return "correct" if self.error < TOLERANCE[self.dtype] else "wrong"


def read_kernel_cases(path: Path = KERNEL_CASES_FILE) -> KernelCaseSet:
    """Read a file of kernel cases.

    Raises:
        FolderError: the file cannot be read.
    """
    try:
        document = json.loads(path.read_bytes())
        checks = tuple(map(_check, document["kernel_cases"]))
        graphs = {name: base64.b64decode(text) for name, text in document["graphs"].items()}
        flags = {str(op_type): str(flag) for op_type, flag in document["flags"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FolderError(
            f"{path} cannot be read ({error})", "the file of this version", "install sdonnx again"
        ) from error
    return KernelCaseSet(checks, graphs, flags)


def _check(row: Mapping[str, Any]) -> Check:
    shapes = tuple(None if shape is None else tuple(map(int, shape)) for shape in row["shapes"])
    fills = {int(index): str(fill) for index, fill in row["fills"].items()}
    case = KernelCase(row["op_type"], row["name"], shapes, weights=tuple(row["weights"]), fills=fills)
    float32_inputs, kernels = tuple(row["float32_inputs"]), dict(row["kernels"])
    return Check(case, float32_inputs, row["first_use"], row["cpu"], row["reference"], kernels)


def compare(
    cases: KernelCaseSet,
    checks: Sequence[Check],
    open_kernel: OpenKernel,
    *,
    dtypes: Sequence[str] = tuple(TOLERANCE),
    backends: Mapping[str, int] = DEFAULT_BACKEND,
    is_late: Callable[[], bool] = lambda: False,
) -> Iterator[CaseResult]:
    """Run kernel cases and yield a result for each case, data type and backend.

    Args:
        cases: the set that holds the graphs.
        checks: the cases to run.
        open_kernel: opens the graphs of the operators; the reference bodies are opened on the CPU.
        dtypes: the data types to run, where the operator has them.
        backends: values of sdpa_kernel by name; only attention depends on them.
        is_late: return whether to start no further case.
    """
    open_reference = kernel_opener("cpu")

    def session(check: Check) -> tuple[str, str, str]:
        """Return a key that is equal for cases that share a session: equal graphs and no weights of their own."""
        return check.kernels[dtype], check.reference, str(check.case) if check.case.weights else ""

    for dtype in dtypes:
        for _, group in groupby(sorted((check for check in checks if dtype in check.kernels), key=session), session):
            same = list(group)
            values = rounded(same[0].case.make_inputs(), dtype, same[0].float32_inputs) if same[0].case.weights else ()
            weights = _named(values, same[0], dtype, weights=True)
            kernels = {name: _tried(open_kernel, cases.graphs[same[0].kernels[dtype]], weights, mask)
                       for name, mask in backends.items()}  # fmt: skip
            weights = _named(values, same[0], "float32", weights=True)
            reference = _tried(open_reference, cases.graphs[same[0].reference], weights, 0)
            for check in same:
                if is_late():
                    return
                yield from _results(check, dtype, kernels, reference)


def _tried(function: Callable[..., Result], *arguments: Any) -> Result | str:
    """Return the result of a function, or the reason why it failed."""
    try:
        return function(*arguments)
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        text = " ".join(str(error).split())
        return text[text.find(" : ") + 3 :][:200] if text.startswith("[ONNXRuntimeError] : ") else text[:200]


def _results(
    check: Check, dtype: str, kernels: Mapping[str, Kernel | str], reference: Kernel | str
) -> Iterator[CaseResult]:
    case = check.case
    values = rounded(case.make_inputs(), dtype, check.float32_inputs)
    feeds = _named(values, check, "float32", weights=False)
    expected = reference if isinstance(reference, str) else _tried(reference, feeds)
    feeds = _named(values, check, dtype, weights=False)
    for backend, kernel in kernels.items():
        result = partial(CaseResult, case.op_type, case.name, dtype, backend)
        if isinstance(expected, str):
            yield result(failure=f"its reference: {expected}")
        elif isinstance(found := kernel if isinstance(kernel, str) else _tried(kernel, feeds), str):
            yield result(failure=found)
        elif [array.shape for array in found] != [array.shape for array in expected]:
            yield result(error=math.inf)
        else:
            with np.errstate(all="ignore"):
                yield result(error=max(map(output_error, found, expected)))


def _named(values: Sequence[Array | None], check: Check, dtype: str, weights: bool) -> dict[str, Array]:
    """Return the inputs, or the weights, by their names, stored in the data type of the graph."""
    feeds = {}
    fixed = {*check.float32_inputs, *check.case.integers}
    for index, array in enumerate(values):
        if array is not None and (index in check.case.weights) == weights:
            half = dtype == "float16" and index not in fixed
            feeds[f"x{index}"] = array.astype(np.float16) if half else array
    return feeds


def kernel_opener(provider: str, index: int = 0, library: Path | None = None) -> OpenKernel:
    """Return a function that opens graphs on a provider. Nothing falls back from CUDA to the CPU.

    Args:
        provider: "cuda" or "cpu".
        index: the number of the GPU.
        library: the library of our own operators, if the graphs have any (`sdonnx.doctor.kernel_library`).
    """

    def open_kernel(content: bytes, weights: Mapping[str, Array], sdpa_kernel: int) -> Kernel:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = _FATAL
        if library is not None:
            options.register_custom_ops_library(str(library))
        on_device = {"device_id": str(index), "use_tf32": "0", "sdpa_kernel": str(sdpa_kernel)}
        chosen = ("CUDAExecutionProvider", on_device) if provider == "cuda" else ("CPUExecutionProvider", {})
        if provider == "cuda":
            options.intra_op_num_threads = 1
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        else:
            # ONNX Runtime 1.31 crashes as it fuses an Add into a LayerNormalization without B.
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            # Each session has a thread pool: on a machine with many cores, starting it takes longer than the run.
            options.intra_op_num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        if values:
            options.add_external_initializers(list(weights), values)
        session = onnxruntime.InferenceSession(content, options, providers=[chosen])
        run_options = onnxruntime.RunOptions()
        run_options.log_severity_level = _FATAL

        def run(feeds: Mapping[str, Array], _weights: object = values) -> list[Array]:
            # On the CPU, ONNX Runtime reads the weights in place: they must live as long as the session.
            results: list[Array] = session.run(None, dict(feeds), run_options)
            return results

        return run

    return open_kernel
