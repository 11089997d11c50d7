"""The verdict on a machine's kernels: how it is reached, and what it makes the run-time avoid."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sdonnx.doctor.kernels import ATTENTION, BACKENDS, DEFAULT, Check, CornerSet, Row, compare
from sdonnx.doctor.sessions import Open

__all__ = ["Key", "Line", "Verdict", "chosen_backends", "judge", "summary"]

_CHOSEN = "what is left"

Key = Mapping[str, str]
"""What a verdict holds for: the GPU, the driver, the libraries, the corners."""


@dataclass(frozen=True)
class Line:
    """The corners of one operator, or of attention with one back end, in one type: how many came out how.

    Attributes:
        name: the operator, or the back end.
        dtype: the type.
        right: corners that are right.
        wrong: corners that are wrong.
        unavailable: corners that did not run.
        largest: the largest relative error, None where none ran.
    """

    name: str
    dtype: str
    right: int
    wrong: int
    unavailable: int
    largest: float | None


def summary(rows: Iterable[Row]) -> tuple[Line, ...]:
    """Return the table of rows, in their order."""
    named: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        named.setdefault((row.backend or row.operator, row.dtype), []).append(row)
    lines = []
    for (name, dtype), of_name in sorted(named.items(), key=lambda item: item[0][0]):
        counts = [sum(row.state == state for row in of_name) for state in ("right", "wrong", "not available")]
        errors = [row.error for row in of_name if row.error is not None]
        lines.append(Line(name, dtype, counts[0], counts[1], counts[2], max(errors, default=None)))
    return tuple(lines)


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        key: the machine that it holds for (`sdonnx.doctor.gpu.identity`).
        sdpa_kernel: the option that keeps attention from back ends that lie, 0 where none needs avoiding.
        lying: the attention back ends that gave wrong numbers when they alone were allowed.
        faults: the corners that are wrong although they are avoided.
        unavailable: the corners that no kernel ran, in types that every machine needs.
        checked: how many corners ran, types counted.
        complete: whether none was left out for want of time.
        full: whether it was the doctor's check, not that of a first use.
        seconds: how long it took.
        table: how the corners came out, by operator and by back end.
    """

    key: Key
    sdpa_kernel: int
    lying: tuple[str, ...]
    faults: tuple[Row, ...]
    unavailable: tuple[Row, ...]
    checked: int
    complete: bool
    full: bool
    seconds: float
    table: tuple[Line, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether every kernel that ONNX Runtime chooses by itself ran and is right."""
        return not self.sdpa_kernel and not self.faults and not self.unavailable

    @property
    def lasting(self) -> bool:
        """Whether it may be kept: nothing was left out, and no kernel wanted memory that may be there another time."""
        return self.complete and not any(_wanted_memory(row) for row in self.unavailable)


def _wanted_memory(row: Row) -> bool:
    text = (row.failure or "").lower()
    return "memory" in text or "alloc" in text


def chosen_backends(rows: Iterable[Row]) -> tuple[tuple[str, ...], int]:
    """Return the back ends that lie, and sdpa_kernel without them; 0 where none is left.

    Where a back end cannot take a corner ONNX Runtime takes math, so that a corner at which math is wrong too
    says nothing of another one: flash takes no mask, memory-efficient no numbers of keys.

    Args:
        rows: of attention, with each back end allowed alone.
    """
    wrong = {name: {(row.corner, row.dtype) for row in rows if row.backend == name and row.wrong} for name in BACKENDS}
    lying = tuple(name for name in BACKENDS if wrong[name] - (wrong["math"] if name != "math" else set()))
    return lying, sum(bit for name, bit in BACKENDS.items() if name not in lying)


def judge(
    corners: CornerSet,
    open_kernel: Open,
    key: Key,
    *,
    full: bool,
    limit_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    told: Callable[[int], None] = lambda _: None,
) -> tuple[Verdict, list[Row]]:
    """Check a GPU's kernels and return the verdict, and every row.

    Args:
        corners: the corners.
        open_kernel: what opens graphs on the GPU.
        key: the machine that the verdict will be for.
        full: every corner in every type, and attention with each back end alone; otherwise those of a first use in
            fp16, and back ends only if ONNX Runtime's choice is wrong.
        limit_s: seconds after which no corner is begun.
        clock: seconds.
        told: called with the number of corners that have run.
    """
    start = clock()
    until = start + limit_s
    checks = [check for check in corners.checks if full or check.first]
    attention = [check for check in checks if check.corner.op_type == ATTENTION]
    others = [check for check in checks if check.corner.op_type != ATTENTION]
    dtypes = ("float16", "float32", "bfloat16") if full else ("float16",)
    rows: list[Row] = []

    def run(chosen: Sequence[Check], backends: Mapping[str, int]) -> list[Row]:
        made = []
        for row in compare(corners, chosen, open_kernel, dtypes=dtypes, backends=backends, until=until, clock=clock):
            made.append(row)
            told(len(rows) + len(made))
        rows.extend(made)
        return made

    seen = run(attention, {**DEFAULT, **BACKENDS} if full else DEFAULT)
    run(others, DEFAULT)
    alone = [row for row in seen if row.backend]
    faults = [row for row in seen if not row.backend and row.wrong]
    if faults and not full:
        alone = run(attention, BACKENDS)

    lying, mask = chosen_backends(alone)
    sdpa_kernel = 0
    if faults and mask:
        # Together they may be chosen otherwise than alone.
        again = run(attention, {_CHOSEN: mask})
        left = [row for row in again if row.wrong]
        if len(left) < len(faults):
            sdpa_kernel, faults = mask, left
    default = [row for row in rows if not row.backend]
    faults += [row for row in default if row.operator != ATTENTION and row.wrong]
    # Not every GPU that draws has bfloat16.
    unavailable = [row for row in default if row.error is None and row.dtype != "bfloat16"]
    verdict = Verdict(
        dict(key),
        sdpa_kernel,
        lying,
        tuple(faults),
        tuple(unavailable),
        len(default),
        clock() < until,
        full,
        round(clock() - start, 3),
        summary(row for row in rows if row.backend != _CHOSEN),
    )
    return verdict, rows
