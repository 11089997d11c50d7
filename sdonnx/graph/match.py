"""What rules are written with: the rule itself, sums, and equality of shapes.

This module alone knows onnxscript's rewriter; rules see `Rule` and `apply_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRuleClassBase, RewriteRuleSet

from sdonnx.graph.edit import Dim, derived_initializer, dims, insert, is_weight, static_dim
from sdonnx.graph.modules import module_path
from sdonnx.graph.tensors import read

__all__ = [
    "Idiom",
    "Refusal",
    "Rule",
    "Sum",
    "apply_idioms",
    "apply_rules",
    "biased",
    "filling",
    "is_bias",
    "is_matrix",
    "is_row",
    "producer_of",
    "same_dims",
    "same_shape",
    "scalar",
    "sole_user",
    "sum_of",
    "total_bias",
]


@dataclass(frozen=True)
class Refusal:
    """A candidate that a rule did not rewrite.

    Attributes:
        rule: the rule's name.
        node: the candidate's name.
        module: the torch module that it belongs to, "" where nothing tells.
        reason: why not.
    """

    rule: str
    node: str
    module: str
    reason: str


class Rule(RewriteRuleClassBase):
    """A rewrite rule: `pattern`, `concerns`, `refuse` and `rewrite`.

    `pattern(op, ...)` is the source. `concerns(**bindings)` tells whether what the pattern bound is a
    candidate at all, where the pattern alone cannot. `refuse(**bindings)` returns why a candidate must
    not be rewritten, or None. `rewrite(op, **bindings)` returns the target.
    With `keeps_nodes`, values inside the match may be used elsewhere: the match is then left in
    place, and what became unused is removed after the stage.
    """

    keeps_nodes = False

    def __init__(self, graph: ir.Graph, refusals: list[Refusal]) -> None:
        super().__init__(name=type(self).__name__, remove_nodes=not self.keeps_nodes)
        self._graph = graph
        self._refusals = refusals

    def concerns(self, *args: Any, **bindings: Any) -> bool:
        """Tell whether this match is a candidate; what is none is not reported."""
        return True

    def refuse(self, *args: Any, **bindings: Any) -> str | None:
        """Return why this match must not be rewritten, None if it may be."""
        return None

    def check(self, op: Any, *args: Any, **bindings: Any) -> MatchResult:
        """Ask `refuse`, and keep its answer for the report; onnxscript passes the match as `op`."""
        result = MatchResult()
        if not self.concerns(**bindings):
            return result.fail("no candidate")
        node = op.root
        reason = self.refuse(**bindings) if node.graph is self._graph else "it stands in a subgraph or a function"
        if reason is None:
            return result
        name = str(self.name)
        self._refusals.append(Refusal(name, node.name or node.op_type, module_path(node), reason))
        return result.fail(reason)


def apply_rules(model: ir.Model, rules: Sequence[type[Rule]], commute: bool = False) -> tuple[int, list[Refusal]]:
    """Apply the rules to every node once and return how often they fired, and the refusals.

    A pattern with commutative operators is tried with its operands in either order if `commute`.
    """
    refusals: list[Refusal] = []
    made = [rule.rule(model.graph, refusals) for rule in rules]  # type: ignore[no-untyped-call]
    rule_set = RewriteRuleSet(made, commute=commute)
    fired: int = rule_set.apply_to_model(model)
    return fired, list(dict.fromkeys(refusals))


class Idiom:
    """A rewrite that is found by walking from one operator, where a pattern would need many forms.

    Attributes:
        roots: the operators that it starts at.
    """

    roots: frozenset[str] = frozenset()

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite around `node` and return None; or return why not, "" where it is no candidate."""
        raise NotImplementedError


def apply_idioms(model: ir.Model, idioms: Sequence[type[Idiom]]) -> tuple[dict[str, int], list[Refusal]]:
    """Try the idioms at every node once, in topological order; return how often each fired, and the refusals."""
    fired = {idiom.__name__: 0 for idiom in idioms}
    refusals: list[Refusal] = []
    made = [idiom() for idiom in idioms]
    for node in list(model.graph):
        for idiom in made:
            if node.op_type not in idiom.roots or node.domain or node.graph is None:
                continue
            if not any(output.uses() or output.is_graph_output() for output in node.outputs):
                break  # what an earlier one replaced
            name = type(idiom).__name__
            reason = idiom.rewrite(node)
            if reason is None:
                fired[name] += 1
            elif reason:
                refusals.append(Refusal(name, node.name or node.op_type, module_path(node), reason))
    return fired, list(dict.fromkeys(refusals))


def producer_of(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the standard operator that makes `value`, if it is one of these."""
    node = None if value is None else value.producer()
    return node if node is not None and not node.domain and node.op_type in op_types else None


def sole_user(value: ir.Value, *op_types: str) -> ir.Node | None:
    """Return the only node that reads `value`, if it is one of these standard operators."""
    users = {use.node for use in value.uses()}
    if len(users) != 1 or value.is_graph_output():
        return None
    (node,) = users
    return node if not node.domain and node.op_type in op_types else None


def scalar(value: ir.Value | None) -> float | None:
    """Return the number that a constant of one element holds, None for anything else.

    With several dimensions it may give a result its rank: where that matters, compare the shapes.
    """
    if value is None or not is_weight(value) or value.const_value is None or value.const_value.size != 1:
        return None
    return float(read(value.const_value).item())


def filling(value: ir.Value) -> float | None:
    """Return the one number that fills a value, None where there is none or it is not known."""
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
    """Tell whether two values are known to have the same shape."""
    left, right = dims(a), dims(b)
    return left is not None and right is not None and same_dims(left, right)


def same_dims(left: Sequence[Dim], right: Sequence[Dim]) -> bool:
    """Tell whether two lists of dimensions are known to be the same."""
    # An unnamed dimension equals nothing, itself included.
    return len(left) == len(right) and all(
        x == y and (isinstance(x, int) or x.value is not None) for x, y in zip(left, right, strict=True)
    )


def is_bias(value: ir.Value, channels: int | None) -> bool:
    """Tell whether the value is a constant vector (C,) for `channels`.

    A vector of one element is none: ONNX would broadcast it, where a kernel reads past its end.
    """
    vector = is_weight(value) and value.shape is not None and value.shape.rank() == 1
    return vector and channels is not None and static_dim(value, 0) == channels


def is_matrix(value: ir.Value | None) -> bool:
    """Tell whether the value is a constant matrix (K,D)."""
    return value is not None and is_weight(value) and len(dims(value) or ()) == 2


def biased(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Return (x, bias) where value = x + bias, x as large as the sum and the bias a constant vector (C,)."""
    addition = producer_of(value, "Add")
    if value is None or addition is None:
        return None
    for x, bias in (addition.inputs, reversed(addition.inputs)):
        if x is not None and bias is not None and is_bias(bias, static_dim(value, -1)) and same_shape(x, value):
            return x, bias
    return None


def is_row(value: ir.Value, channels: int | None) -> bool:
    """Tell whether the value is a vector (C,) for `channels`, constant or computed."""
    return channels is not None and dims(value) == (channels,)


@dataclass(frozen=True)
class Sum:
    """A tree of additions, flattened: its value is sum(terms) + sum(biases).

    Attributes:
        terms: the activations that are added.
        biases: the vectors (C,) that are added along the last axis, constant or computed.
    """

    terms: tuple[ir.Value, ...]
    biases: tuple[ir.Value, ...]


def sum_of(value: ir.Value) -> Sum:
    """Return the additions that make `value`.

    Inner sums are opened where nothing else uses them. A value that is no sum is its only term.
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
    """Return one bias that is the sum of `biases`, None where there is none.

    What is computed is added up before `anchor`.
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
