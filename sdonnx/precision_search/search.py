"""Find the smallest set of operators and modules of a component that must stay out of fp16."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.errors import PrecisionError
from sdonnx.graph.modules import module_paths
from sdonnx.precision.policy import matches
from sdonnx.precision_search.component_trials import Component, Error, Range

__all__ = ["Kept", "Reason", "Search", "search"]

# Twice the unit roundoff of fp16, 2**-11. The rounding error of normal numbers never exceeds it.
_MAX_LOST = 2.0**-10

# Maximum error of a component, as a multiple of the error due to the precision of fp16 (`Component.ideal_error`).
# `verify` also accepts twice the error of torch's fp16. Kernels sum in another order; if that order by itself exceeds
# the first limit, the limit is 1.25 times the error with all overflowing values in float32.
_MAX_ERROR = 2.0
_MAX_KERNEL_ERROR = 4.0
_MAX_INCREASE = 1.25

# bfloat16 has 8 bits where fp16 has 11.
_BFLOAT16_ERROR = 2.0**3

# Trials of a component; each runs it on all recorded inputs.
_MAX_TRIALS = 48


@dataclass(frozen=True)
class Reason:
    """Reason to keep nodes out of fp16.

    Attributes:
        kind: "overflow", "underflow", or "error" if all values are in range and the outputs are wrong nevertheless.
        value: name of the worst value or weight; "" for an error.
        most: its maximum magnitude; None for an error.
    """

    kind: str
    value: str
    most: float | None


@dataclass(frozen=True)
class Kept:
    """A pattern of nodes that stay out of fp16.

    Attributes:
        pattern: pattern as for --force_fp32_ops.
        nodes: number of nodes that it matches.
        reason: reason to keep them.
    """

    pattern: str
    nodes: int
    reason: Reason


@dataclass(frozen=True)
class Search:
    """Result of a search.

    Attributes:
        kept: the set of patterns found.
        plain: error with only the requested patterns.
        ideal: error due to the precision of fp16, without its limited range.
        error: error with the set.
        trials: number of sets that were tried.
        smallest: whether every pattern of the set is known to be necessary. False if the trials were used up before.
        nodes: number of nodes that the set matches, and of all nodes.
        milliseconds: latency of a call with the set and without it; None if fp16 is emulated or the set is empty.
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
    """Find the patterns that a component must keep out of fp16 in addition to the given ones.

    Args:
        component: the component with its recorded inputs.
        given: patterns that are kept in any case.

    Raises:
        PrecisionError: the component returns NaN or infinity in float32, or its error is too large even with all
            operators in float32.
    """
    name, given = component.spec.name, tuple(given)
    ranges = component.ranges(given)
    ideal = component.ideal_error(given)
    if not ideal.finite:
        raise PrecisionError(
            f"{name} returns NaN or infinity in float32 as well",
            "a pipeline that generates images in float32",
            "generate an image with the exported folder in float32 to see it, and leave out --force_fp32_ops auto",
        )
    graph = component.graph()
    groups = _groups(graph, _reasons(ranges))
    plain = component.error(given)
    if _within(plain, ideal, _MAX_ERROR if groups else _MAX_KERNEL_ERROR):
        return Search((), plain, ideal, plain, component.trials, True, (0, len(graph)))
    max_kernel_error = _MAX_KERNEL_ERROR * (_BFLOAT16_ERROR if component.fallback is ir.DataType.BFLOAT16 else 1)
    error = component.error((*given, *groups)) if groups else plain
    if not _within(error, ideal, max_kernel_error):
        # The cause is a kernel or many small errors. Start with all operators and remove those that are not needed.
        kinds = sorted({node.op_type for node in graph if node.op_type not in _NOT_KEPT} - set(given))
        groups |= {kind: {kind: Reason("error", "", None)} for kind in kinds}
        error = component.error((*given, *groups))
    if not _within(error, ideal, max_kernel_error):
        raise PrecisionError(
            f"{name} is wrong by {error.relative:.2g} with all operators out of fp16",
            f"at most {max_kernel_error * ideal.relative:.2g}",
            "report it with the folder's sdonnx.json",
        )
    limit = max(_MAX_ERROR * ideal.relative, _MAX_INCREASE * error.relative)
    # Overflowing values are tried last, since they are rarely unnecessary; patterns of many nodes are tried first.
    kept = dict(groups)
    waiting = sorted(kept, key=lambda each: (_overflows(kept[each]), -_count(graph, each)))
    while waiting and component.trials < _MAX_TRIALS:
        pattern = waiting.pop(0)
        members = kept.pop(pattern)
        without = component.error((*given, *kept))
        if without.finite and without.relative <= limit:
            error = without
        elif len(members) > 1 and not _overflows(members):
            kept |= {each: {each: reason} for each, reason in members.items()}
            waiting += members
        else:
            kept[pattern] = members
    # Join patterns again that were split and turned out to be necessary.
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


# A number that is the whole name of a module: up_blocks.0 and up_blocks.1 form a series, attn1 and attn2 do not.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

# Copies and sizes: their results do not depend on the type.
_NOT_KEPT = frozenset({"Cast", "Constant", "Identity", "Shape"})


def _reasons(ranges: Sequence[Range]) -> dict[str, Reason]:
    """Return the patterns to keep with their reasons: modules of nodes, or operators of nodes without a module."""
    reasons: dict[str, Reason] = {}
    for seen in sorted(ranges, key=lambda each: each.most, reverse=True):
        if seen.lost <= _MAX_LOST:
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
    """Join patterns that differ only in numbers, unless the joint pattern would match other nodes.

    Returns:
        For each resulting pattern, the patterns that it joins with their reasons.
    """
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
