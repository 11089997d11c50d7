"""Finds the smallest set of operators and modules of a component that must stay out of fp16."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.automatic.trial import Component, Error, Range
from sdonnx.errors import PrecisionError
from sdonnx.graph.modules import module_paths
from sdonnx.precision import matches

__all__ = ["Kept", "Reason", "Search", "search"]

# Twice the unit roundoff of fp16, 2**-11: more is lost of no value within its range of normal numbers.
_MOST_LOST = 2.0**-10

# Errors of components in errors of fp16's precision alone. Twice is what `verify` takes of torch's fp16. Kernels add up
# in other orders than that: where they alone bring more than twice, a quarter more than with all that goes beyond the
# range in float32.
_MOST_ERROR = 2.0
_MOST_OF_KERNELS = 4.0
_MOST_MORE = 1.25

# bfloat16 has 8 bits where fp16 has 11.
_BFLOAT16_ERROR = 2.0**3

# Of a component; each runs it on everything that it was given.
_MOST_TRIALS = 48


@dataclass(frozen=True)
class Reason:
    """Why something is kept.

    Attributes:
        kind: "overflow", "underflow", or "error" where no value is beyond the range and yet the outputs are wrong.
        value: the name of the value that is worst, or of the weight; "" for an error.
        most: its largest magnitude; None for an error.
    """

    kind: str
    value: str
    most: float | None


@dataclass(frozen=True)
class Kept:
    """What stays out of fp16.

    Attributes:
        pattern: as for --force_fp32_ops.
        nodes: how many nodes it names.
        reason: why.
    """

    pattern: str
    nodes: int
    reason: Reason


@dataclass(frozen=True)
class Search:
    """What was found for a component.

    Attributes:
        kept: the set.
        plain: the error where nothing is kept but what was asked for.
        ideal: the error of fp16's precision alone.
        error: the error with the set.
        trials: how many sets were tried.
        smallest: whether nothing of the set can be left out; else the trials came to an end before that was known.
        nodes: how many the set names of how many there are.
        milliseconds: how long a call takes with the set and without; None where fp16 is emulated, and of no set.
    """

    kept: tuple[Kept, ...]
    plain: Error
    ideal: Error
    error: Error
    trials: int
    smallest: bool
    nodes: tuple[int, int]
    milliseconds: tuple[float, float] | None = None


def search(component: Component, given: Sequence[str]) -> Search:
    """Find what a component must keep out of fp16 beside what is given.

    Args:
        component: the component and what it was given.
        given: what is kept anyway.

    Raises:
        PrecisionError: it gives NaN or infinity in float32, or even with all of it in float32 too large an error.
    """
    name, given = component.spec.name, tuple(given)
    ranges = component.ranges(given)
    ideal = component.ideal_error(given)
    if not ideal.finite:
        raise PrecisionError(
            f"{name} gives NaN or infinity in float32 too",
            "a pipeline that draws in float32",
            "draw with the exported folder in float32 to see it, and leave out --force_fp32_ops auto",
        )
    graph = component.graph()
    groups = _groups(graph, _reasons(ranges))
    plain = component.error(given)
    if _within(plain, ideal, _MOST_ERROR if groups else _MOST_OF_KERNELS):
        return Search((), plain, ideal, plain, component.trials, True, (0, len(graph)))
    most_of_kernels = _MOST_OF_KERNELS * (_BFLOAT16_ERROR if component.fallback is ir.DataType.BFLOAT16 else 1)
    error = component.error((*given, *groups)) if groups else plain
    if not _within(error, ideal, most_of_kernels):
        # No value tells why: a kernel, or many small losses. All operators, of which those go that are not needed.
        kinds = sorted({node.op_type for node in graph if node.op_type not in _NOT_KEPT} - set(given))
        groups |= {kind: {kind: Reason("error", "", None)} for kind in kinds}
        error = component.error((*given, *groups))
    if not _within(error, ideal, most_of_kernels):
        raise PrecisionError(
            f"{name} is wrong by {error.relative:.2g} with all operators out of fp16",
            f"{most_of_kernels * ideal.relative:.2g} at most",
            "report it with the folder's sdonnx.json",
        )
    most = max(_MOST_ERROR * ideal.relative, _MOST_MORE * error.relative)
    # What overflows is tried last: it is seldom needless. More of it first.
    kept = dict(groups)
    waiting = sorted(kept, key=lambda each: (_overflows(kept[each]), -_count(graph, each)))
    while waiting and component.trials < _MOST_TRIALS:
        pattern = waiting.pop(0)
        members = kept.pop(pattern)
        without = component.error((*given, *kept))
        if without.finite and without.relative <= most:
            error = without
        elif len(members) > 1 and not _overflows(members):
            kept |= {each: {each: reason} for each, reason in members.items()}
            waiting += members
        else:
            kept[pattern] = members
    # What was taken apart and is needed after all is one pattern again.
    again = _groups(graph, {each: reason for members in kept.values() for each, reason in members.items()})
    found = tuple(Kept(each, _count(graph, each), next(iter(again[each].values()))) for each in sorted(again))
    nodes = (len(_named(graph, again)), len(graph))
    with_set = component.milliseconds((*given, *again)) if again else None
    without_set = None if with_set is None else component.milliseconds(given)
    times = None if with_set is None or without_set is None else (with_set, without_set)
    return Search(found, plain, ideal, error, component.trials, not waiting, nodes, times)


def _within(error: Error, ideal: Error, times: float) -> bool:
    return error.finite and error.relative <= times * ideal.relative


def _overflows(members: Mapping[str, Reason]) -> bool:
    return any(reason.kind == "overflow" for reason in members.values())


# A number that is a module's whole name: attn1 and attn2 are no series.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

# Copies and sizes: nothing is computed in them that another type would change.
_NOT_KEPT = frozenset({"Cast", "Constant", "Identity", "Shape"})


def _reasons(ranges: Sequence[Range]) -> dict[str, Reason]:
    """Return what must be kept and why, by the modules of the nodes, or their operators where no module is told."""
    reasons: dict[str, Reason] = {}
    for seen in sorted(ranges, key=lambda each: each.most, reverse=True):
        if seen.lost <= _MOST_LOST:
            continue
        reason = Reason("overflow" if math.isinf(seen.lost) else "underflow", seen.place.name, seen.most)
        maker = () if seen.place.maker is None else (seen.place.maker,)
        for node in (*maker, *seen.place.readers):
            if node.op_type not in _NOT_KEPT:
                reasons.setdefault(_own_pattern(node), reason)
    return reasons


def _own_pattern(node: ir.Node) -> str:
    path = next(iter(module_paths(node)), "")
    return path or node.op_type


def _groups(graph: ir.Graph, reasons: Mapping[str, Reason]) -> dict[str, dict[str, Reason]]:
    """Join patterns that differ in numbers alone, where the joint one names no other node; each with what it joins."""
    families: dict[str, dict[str, Reason]] = {}
    for pattern, reason in reasons.items():
        families.setdefault(_NUMBER.sub("*", pattern), {})[pattern] = reason
    groups: dict[str, dict[str, Reason]] = {}
    for joint, members in families.items():
        if len(members) > 1 and _named(graph, [joint]) == _named(graph, members):
            groups[joint] = members
        else:
            groups |= {pattern: {pattern: reason} for pattern, reason in members.items()}
    return groups


def _named(graph: ir.Graph, patterns: Collection[str]) -> set[ir.Node]:
    return {node for node in graph if any(matches(pattern, node) for pattern in patterns)}


def _count(graph: ir.Graph, pattern: str) -> int:
    return len(_named(graph, [pattern]))
