"""Kernels held against their reference bodies, corner by corner.

The graphs of both lie in `corners.json` (`sdonnx.graph.corner_graphs`); the reference runs in float32 on the CPU, on
the values that the kernel gets.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from sdonnx.doctor.corner import TOLERANCE, Array, Corner, rounded
from sdonnx.doctor.sessions import Kernel, Open, open_on
from sdonnx.errors import FolderError
from sdonnx.parity import relative_error

__all__ = [
    "ATTENTION",
    "BACKENDS",
    "CORNERS_FILE",
    "DEFAULT",
    "Check",
    "CornerSet",
    "Row",
    "compare",
    "digest_of",
    "read_corners",
]

CORNERS_FILE = Path(__file__).with_name("corners.json")

ATTENTION = "MultiHeadAttention"

BACKENDS: Mapping[str, int] = {"flash": 1, "memory-efficient": 2, "cuDNN": 8, "math": 16}
"""Bits of the CUDA provider's option sdpa_kernel (onnxruntime/contrib_ops/cpu/bert/attention_common.h). Where the ones
that are set cannot take a size, or a mask, ONNX Runtime takes math, set or not."""

DEFAULT: Mapping[str, int] = {"": 0}
"""ONNX Runtime's own choice."""


@dataclass(frozen=True)
class Check:
    """A corner and its graphs.

    Attributes:
        corner: the corner, without its attributes, which the graphs hold.
        float32_inputs: inputs that are float32 in every type.
        first: whether it belongs to the check at a machine's first use.
        cpu: whether the CPU provider has this kernel.
        reference: the name of the body's graph, in float32.
        kernels: the name of the operator's graph, by type.
    """

    corner: Corner
    float32_inputs: tuple[int, ...]
    first: bool
    cpu: bool
    reference: str
    kernels: Mapping[str, str]


@dataclass(frozen=True)
class CornerSet:
    """All corners, the graphs by name, and the digest of the file that they come from."""

    checks: tuple[Check, ...]
    graphs: Mapping[str, bytes]
    digest: str


@dataclass(frozen=True)
class Row:
    """What a kernel gave at a corner.

    Attributes:
        operator: the operator.
        corner: the corner's name.
        dtype: "float16", "float32" or "bfloat16".
        backend: the one of BACKENDS that alone was allowed, "" for ONNX Runtime's own choice.
        error: relative error to the reference, infinite for NaN; None where the kernel did not run.
        failure: why it did not run.
    """

    operator: str
    corner: str
    dtype: str
    backend: str = ""
    error: float | None = None
    failure: str = ""

    @property
    def state(self) -> str:
        """What came out: "right", "wrong", or "not available" where the kernel did not run."""
        if self.error is None:
            return "not available"
        return "right" if self.error < TOLERANCE[self.dtype] else "wrong"

    @property
    def wrong(self) -> bool:
        """Whether the kernel ran and gave wrong numbers."""
        return self.state == "wrong"


def read_corners(path: Path = CORNERS_FILE) -> CornerSet:
    """Return the corners of a file.

    Raises:
        FolderError: it cannot be read.
    """
    try:
        document = json.loads(path.read_bytes())
        checks = tuple(map(_check, document["corners"]))
        graphs = {name: base64.b64decode(text) for name, text in document["graphs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from error
    return CornerSet(checks, graphs, digest_of(path))


def digest_of(path: Path = CORNERS_FILE) -> str:
    """Return what tells one file of corners from another.

    Raises:
        FolderError: it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> FolderError:
    return FolderError(f"{path} cannot be read ({error})", "the file of this version", "install sdonnx again")


def _check(row: Mapping[str, Any]) -> Check:
    shapes = tuple(None if shape is None else tuple(map(int, shape)) for shape in row["shapes"])
    corner = Corner(row["op_type"], row["name"], shapes, weights=tuple(row["weights"]))
    return Check(corner, tuple(row["float32_inputs"]), row["first"], row["cpu"], row["reference"], dict(row["kernels"]))


def compare(
    corners: CornerSet,
    checks: Sequence[Check],
    open_kernel: Open,
    *,
    dtypes: Sequence[str] = tuple(TOLERANCE),
    backends: Mapping[str, int] = DEFAULT,
    until: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Row]:
    """Run corners and yield a row for each, in each type, with each back end.

    Args:
        corners: where the graphs are.
        checks: what to run.
        open_kernel: what opens the operators' graphs; the references' are opened on the CPU.
        dtypes: the types to run, where the operator has them.
        backends: values of sdpa_kernel by name; operators but attention heed none.
        until: time on `clock` from which on nothing more is begun.
        clock: seconds.
    """
    open_reference = open_on("cpu")
    for dtype in dtypes:
        group_of = partial(_group, dtype)
        for _, group in groupby(sorted((check for check in checks if dtype in check.kernels), key=group_of), group_of):
            same = list(group)
            weights = _weights(same[0], dtype)
            kernels = {name: _opened(open_kernel, corners.graphs[same[0].kernels[dtype]], weights, mask)
                       for name, mask in backends.items()}  # fmt: skip
            reference = _opened(
                open_reference, corners.graphs[same[0].reference], _weights(same[0], dtype, "float32"), 0
            )
            for check in same:
                if clock() >= until:
                    return
                yield from _rows(check, dtype, kernels, reference)


def _group(dtype: str, check: Check) -> tuple[str, str, str]:
    """Return what corners share that one session can run: both graphs, and where they have weights, these."""
    return check.kernels[dtype], check.reference, str(check.corner) if check.corner.weights else ""


def _opened(open_kernel: Open, content: bytes, weights: Mapping[str, Array], mask: int) -> Kernel | str:
    """Return the kernel, or why it cannot be opened."""
    try:
        return open_kernel(content, weights, mask)
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        return _line(error)


def _rows(check: Check, dtype: str, kernels: Mapping[str, Kernel | str], reference: Kernel | str) -> Iterator[Row]:
    corner = check.corner
    values = rounded(corner.draw(), dtype, check.float32_inputs)
    expected = _results(reference, _named(values, check, "float32", weights=False))
    feeds = _named(values, check, dtype, weights=False)
    for backend, kernel in kernels.items():
        row = (corner.op_type, corner.name, dtype, backend)
        if isinstance(expected, str):
            yield Row(*row, failure=f"its reference: {expected}")
            continue
        found = _results(kernel, feeds)
        if isinstance(found, str):
            yield Row(*row, failure=found)
            continue
        yield Row(*row, error=_error(found, expected))


def _error(found: list[Array], expected: list[Array]) -> float:
    """Return the largest relative error of the outputs; infinity where a shape is another."""
    if [array.shape for array in found] != [array.shape for array in expected]:
        return math.inf
    with np.errstate(all="ignore"):
        pairs = zip(found, expected, strict=True)
        return max(relative_error(mine.astype(np.float32), theirs) for mine, theirs in pairs)


def _results(kernel: Kernel | str, feeds: Mapping[str, Array]) -> list[Array] | str:
    """Return what a kernel gives, or why it does not."""
    if isinstance(kernel, str):
        return kernel
    try:
        return kernel(feeds)
    except Exception as error:  # as above
        return _line(error)


def _weights(check: Check, dtype: str, given_as: str | None = None) -> dict[str, Array]:
    if not check.corner.weights:
        return {}
    values = rounded(check.corner.draw(), dtype, check.float32_inputs)
    return _named(values, check, given_as or dtype, weights=True)


def _named(values: Sequence[Array | None], check: Check, dtype: str, weights: bool) -> dict[str, Array]:
    """Return the inputs, or the weights, under their names and in the type in which a graph takes them."""
    feeds = {}
    same = {*check.float32_inputs, *check.corner.integers}
    for index, array in enumerate(values):
        if array is not None and (index in check.corner.weights) == weights:
            half = dtype == "float16" and index not in same
            feeds[f"x{index}"] = array.astype(np.float16) if half else array
    return feeds


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    with suppress(ValueError):
        text = text[text.index(" : ") + 3 :] if text.startswith("[ONNXRuntimeError]") else text
    return text[:200]
