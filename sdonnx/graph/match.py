"""The two kinds of rewrite rules, and the predicates that rules share.

A `Rule` matches a pattern; a `WalkRule` starts at one operator and follows its inputs and users. This is the only
module that imports onnxscript's rewriter.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern as onnxscript_pattern

from sdonnx.graph.edit import Dim, derived_initializer, dims, insert, is_weight, static_dim
from sdonnx.graph.modules import module_path
from sdonnx.graph.tensors import read

__all__ = [
    "NOT_A_CANDIDATE",
    "REWRITTEN",
    "MatchFailure",
    "PassOutcome",
    "Refused",
    "Rule",
    "Sum",
    "WalkResult",
    "WalkRule",
    "ancestors",
    "apply_rules",
    "apply_walk_rules",
    "biased",
    "filling",
    "has_one_reader",
    "is_bias",
    "is_matrix",
    "is_number",
    "is_row",
    "match_failure",
    "producer_of",
    "same_dims",
    "same_shape",
    "scalar",
    "skip_float_casts",
    "sole_user",
    "sum_of",
    "total_bias",
]


# The relative error of a rounded constant: fp16 holds sqrt(2) to 4e-4.
_ROUNDING = {ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}


@dataclass(frozen=True)
class MatchFailure:
    """A candidate that a rule did not rewrite.

    Attributes:
        rule: the rule's name.
        node: the candidate's name.
        module: the torch module that it belongs to, "" where it is not known.
        reason: why it was not rewritten.
    """

    rule: str
    node: str
    module: str
    reason: str


@dataclass(frozen=True)
class PassOutcome:
    """The result of a fusion pass.

    Attributes:
        fired: how often it rewrote, by name of the rewrite.
        failures: the candidates that it did not rewrite.
    """

    fired: dict[str, int]
    failures: tuple[MatchFailure, ...] = ()


def match_failure(rule: str, node: ir.Node, reason: str) -> MatchFailure:
    """Return the failure of a rule at a node."""
    return MatchFailure(rule, node.name or node.op_type, module_path(node), reason)


class Rule:
    """A rewrite rule with a pattern.

    `pattern(op, ...)` is the source and `rewrite(op, **bindings)` returns the target, as in onnxscript.
    `is_candidate(**bindings)` tells whether a match is worth a report where the pattern cannot decide it.
    `check(**bindings)` returns the reason why a candidate must not be rewritten, None if it may be.

    Attributes:
        keeps_nodes: values inside the match may have other users. The matched nodes then stay in place, and those
            without users are removed after the stage.
    """

    keeps_nodes = False

    def pattern(self, op: Any, *args: Any, **bindings: Any) -> Any:
        """Return the pattern to match."""
        raise NotImplementedError

    def is_candidate(self, *args: Any, **bindings: Any) -> bool:
        """Return whether a match is a candidate. A match that is not is never reported."""
        return True

    def check(self, *args: Any, **bindings: Any) -> str | None:
        """Return the reason why a candidate must not be rewritten, None if it may be."""
        return None

    def rewrite(self, op: Any, *args: Any, **bindings: Any) -> Any:
        """Return the replacement of the match."""
        raise NotImplementedError


def apply_rules(model: ir.Model, rules: Sequence[type[Rule]], commute: bool = False) -> tuple[int, list[MatchFailure]]:
    """Apply the rules once to every node; return how often they fired, and the failures.

    Args:
        model: the graph, changed in place.
        rules: the rules.
        commute: also match commutative operators with their operands swapped.
    """
    failures: list[MatchFailure] = []
    made = [_compiled(rule(), model.graph, failures) for rule in rules]
    rule_set = onnxscript_pattern.RewriteRuleSet(made, commute=commute)
    fired: int = rule_set.apply_to_model(model)
    return fired, list(dict.fromkeys(failures))


def _compiled(rule: Rule, graph: ir.Graph, failures: list[MatchFailure]) -> onnxscript_pattern.RewriteRule:
    """Return onnxscript's form of a rule. Failures are appended to the list."""
    name = type(rule).__name__

    def condition(match: Any, **bindings: Any) -> onnxscript_pattern.MatchResult:
        result = onnxscript_pattern.MatchResult()
        if not rule.is_candidate(**bindings):
            return result.fail("not a candidate")
        node = match.root
        reason = rule.check(**bindings) if node.graph is graph else "it is inside a subgraph or a function"
        if reason is None:
            return result
        failures.append(match_failure(name, node, reason))
        return result.fail(reason)

    return onnxscript_pattern.RewriteRule(
        rule.pattern, rule.rewrite, condition, name=name, remove_nodes=not rule.keeps_nodes
    )


class _Outcome(enum.Enum):
    NOT_A_CANDIDATE = enum.auto()
    REWRITTEN = enum.auto()


NOT_A_CANDIDATE: Final = _Outcome.NOT_A_CANDIDATE
"""The result of a walk rule at a node that does not look like its source. It is never reported."""

REWRITTEN: Final = _Outcome.REWRITTEN
"""The result of a walk rule that rewrote the graph."""


@dataclass(frozen=True)
class Refused:
    """The result of a walk rule at a candidate that must not be rewritten.

    Attributes:
        reason: why not.
    """

    reason: str


WalkResult = _Outcome | Refused


class WalkRule:
    """A rewrite rule that walks from one operator, where a pattern would need many variants.

    Attributes:
        roots: the operators to start at.
    """

    roots: frozenset[str] = frozenset()

    def rewrite(self, node: ir.Node) -> WalkResult:
        """Rewrite the graph around `node`: NOT_A_CANDIDATE, Refused(reason) or REWRITTEN."""
        raise NotImplementedError


def apply_walk_rules(model: ir.Model, rules: Sequence[type[WalkRule]]) -> tuple[dict[str, int], list[MatchFailure]]:
    """Try the rules once at every node, in topological order; return how often each fired, and the failures."""
    fired = {rule.__name__: 0 for rule in rules}
    failures: list[MatchFailure] = []
    made = [rule() for rule in rules]
    for node in list(model.graph):
        for rule in made:
            if node.op_type not in rule.roots or node.domain or node.graph is None:
                continue
            if not any(output.uses() or output.is_graph_output() for output in node.outputs):
                break  # an earlier rule replaced it
            name = type(rule).__name__
            result = rule.rewrite(node)
            if result is REWRITTEN:
                fired[name] += 1
            elif isinstance(result, Refused):
                failures.append(match_failure(name, node, result.reason))
    return fired, list(dict.fromkeys(failures))


def producer_of(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the standard operator that computes `value`, if it is one of these."""
    node = None if value is None else value.producer()
    return node if node is not None and not node.domain and node.op_type in op_types else None


def skip_float_casts(value: ir.Value | None) -> ir.Value | None:
    """Return the value before casts between floating-point types."""
    while (cast := producer_of(value, "Cast")) is not None:
        source = cast.inputs[0]
        if source is None or source.dtype is None or not source.dtype.is_floating_point():
            break
        value = source
    return value


def sole_user(value: ir.Value, *op_types: str) -> ir.Node | None:
    """Return the only node that reads `value`, if it is one of these standard operators."""
    users = {use.node for use in value.uses()}
    if len(users) != 1 or value.is_graph_output():
        return None
    (node,) = users
    return node if not node.domain and node.op_type in op_types else None


def ancestors(value: ir.Value | None) -> set[ir.Node]:
    """Return the nodes that a value depends on."""
    found, waiting = set[ir.Node](), [value]
    while waiting:
        each = waiting.pop()
        node = None if each is None else each.producer()
        if node is not None and node not in found:
            found.add(node)
            waiting += node.inputs
    return found


def has_one_reader(value: ir.Value | None) -> bool:
    """Return whether one input of one node reads a value."""
    return value is not None and len(value.uses()) == 1 and not value.is_graph_output()


def scalar(value: ir.Value | None) -> float | None:
    """Return the number held by a constant of one element, None for anything else.

    The constant may have several dimensions, and so raise the rank of a result: compare shapes where that matters.
    """
    if value is None or not is_weight(value) or value.const_value is None or value.const_value.size != 1:
        return None
    return float(read(value.const_value).item())


def is_number(value: ir.Value | None, number: float) -> bool:
    """Return whether a value is a constant of one element that holds `number`, up to the rounding of its type."""
    found = scalar(value)
    if value is None or found is None or value.dtype is None:
        return False
    return math.isclose(found, number, rel_tol=_ROUNDING.get(value.dtype, 1e-5))


def filling(value: ir.Value) -> float | None:
    """Return the number that fills a value, None where it is not known or not a single one."""
    if (known := scalar(value)) is not None:
        return known
    if (node := producer_of(value, "ConstantOfShape")) is not None:
        return float(node.attributes["value"].as_tensor().numpy().item()) if "value" in node.attributes else 0.0
    if (node := producer_of(value, "Expand", "Cast", "Unsqueeze")) is not None and node.inputs[0] is not None:
        return filling(node.inputs[0])
    if (node := producer_of(value, "Mul")) is not None:
        first, second = (None if operand is None else filling(operand) for operand in node.inputs)
        return None if first is None or second is None else first * second
    return None


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Return whether two values are known to have the same shape."""
    left, right = dims(a), dims(b)
    return left is not None and right is not None and same_dims(left, right)


def same_dims(left: Sequence[Dim], right: Sequence[Dim]) -> bool:
    """Return whether two lists of dimensions are known to be equal."""
    # An unnamed dimension is equal to none, not even to itself.
    return len(left) == len(right) and all(
        x == y and (isinstance(x, int) or x.value is not None) for x, y in zip(left, right, strict=True)
    )


def is_bias(value: ir.Value, channels: int | None) -> bool:
    """Return whether the value is a constant vector (C,) with C = `channels`.

    A vector of one element does not count: ONNX would broadcast it, a kernel reads past its end.
    """
    vector = is_weight(value) and value.shape is not None and value.shape.rank() == 1
    return vector and channels is not None and static_dim(value, 0) == channels


def is_matrix(value: ir.Value | None) -> bool:
    """Return whether the value is a constant matrix (K,D), or one that is restored from 8 bits."""
    if value is None or len(dims(value) or ()) != 2:
        return False
    turned = producer_of(value, "Transpose")
    restored = producer_of(value if turned is None else turned.inputs[0], "DequantizeLinear")
    return is_weight(value) if restored is None else all(each is None or is_weight(each) for each in restored.inputs)


def biased(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Return (x, bias) where value = x + bias, x has the shape of the sum, and bias is a constant vector (C,)."""
    addition = producer_of(value, "Add")
    if value is None or addition is None:
        return None
    for x, bias in (addition.inputs, reversed(addition.inputs)):
        if x is not None and bias is not None and is_bias(bias, static_dim(value, -1)) and same_shape(x, value):
            return x, bias
    return None


def is_row(value: ir.Value, channels: int | None) -> bool:
    """Return whether the value is a vector (C,) with C = `channels`, constant or computed."""
    return channels is not None and dims(value) == (channels,)


@dataclass(frozen=True)
class Sum:
    """A tree of additions, flattened: its value is sum(terms) + sum(biases).

    Attributes:
        terms: the activations.
        biases: the vectors (C,) added along the last axis, constant or computed.
    """

    terms: tuple[ir.Value, ...]
    biases: tuple[ir.Value, ...]


def sum_of(value: ir.Value) -> Sum:
    """Return the additions that compute `value`, flattened.

    Inner sums with other users are not flattened. A value that is not a sum is its own only term.
    """
    node = value.producer()
    if node is None or node.op_type != "Add" or node.domain:
        return Sum((value,), ())
    terms: list[ir.Value] = []
    biases: list[ir.Value] = []
    for operand in node.inputs:
        assert operand is not None
        if is_row(operand, static_dim(value, -1)) and len(dims(value) or ()) > 1:
            biases.append(operand)
        elif len(operand.uses()) == 1 and not operand.is_graph_output():
            inner = sum_of(operand)
            terms.extend(inner.terms)
            biases.extend(inner.biases)
        else:
            terms.append(operand)
    return Sum(tuple(terms), tuple(biases))


def total_bias(anchor: ir.Node, biases: Sequence[ir.Value]) -> ir.Value | None:
    """Return the sum of `biases`, None if there are none.

    Constants are added at conversion time, computed biases by nodes inserted before `anchor`.
    """
    if not biases:
        return None
    computed = [bias for bias in biases if not is_weight(bias)]
    total = _constant_bias(anchor, [bias for bias in biases if is_weight(bias)])
    for bias in computed:
        total = bias if total is None else insert(anchor, "Add", [bias, total], shape=bias.shape)
    return total


def _constant_bias(anchor: ir.Node, biases: Sequence[ir.Value]) -> ir.Value | None:
    if len(biases) < 2:
        return biases[0] if biases else None
    graph = anchor.graph
    assert isinstance(graph, ir.Graph)
    tensors = [bias.const_value for bias in biases]
    first = tensors[0]
    assert first is not None
    return derived_initializer(
        graph,
        "+".join(bias.name or "" for bias in biases),
        lambda: np.sum([read(tensor) for tensor in tensors if tensor is not None], axis=0, dtype=first.dtype.numpy()),
        first.dtype,
        tuple(first.shape.numpy()),
    )
