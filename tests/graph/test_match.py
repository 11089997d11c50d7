from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import assert_fires, assert_refuses, copied, graph, node_of, normal, operators, text_of

from sdonnx.graph.edit import constant_value, input_of, known_dims, required
from sdonnx.graph.match import (
    MatchFailure,
    Rule,
    Sum,
    apply_rules,
    is_bias,
    same_dims,
    same_shape,
    sum_of,
    total_bias,
)
from sdonnx.graph.modules import MODULE_KEY, module_path


class ReluOfSum(Rule):
    """Relu(a + b) -> Max(a + b, 0), refused where b is no weight."""

    def pattern(self, op: Any, a: Any, b: Any, zero: Any) -> Any:
        return op.Max(op.Add(a, b), zero, _outputs=["clipped"])

    def check(self, b: ir.Value, **_: Any) -> str | None:
        return None if b.is_initializer() else "b is no weight"

    def rewrite(self, op: Any, a: ir.Value, b: ir.Value, **_: Any) -> Any:
        return op.Relu(op.Add(a, b))


class KeepingReluOfSum(ReluOfSum):
    """The same, whoever else uses the sum."""

    keeps_nodes = True


ZERO: dict[str, Any] = {"w": normal(4), "zero": np.float32(0)}
PLAIN = ("float[B,4] x", "float[B,4] y", "a = Add(x, w) y = Max(a, zero)")
SHARED = ("float[B,4] x", "float[B,4] y, float[B,4] z", "a = Add(x, w) y = Max(a, zero) z = Neg(a)")


def test_a_rule_rewrites() -> None:
    assert operators(assert_fires(graph(*PLAIN, **ZERO), ReluOfSum, 1)) == {"Add": 1, "Relu": 1}


def test_operands_are_taken_as_they_stand_or_either_way() -> None:
    model = graph("float[B,4] x", "float[B,4] y", "a = Add(w, x) y = Max(a, zero)", **ZERO)
    assert_refuses(copied(model), ReluOfSum, "b is no weight")
    assert_fires(model, ReluOfSum, 1, commute=True)


def test_other_readers_block_a_rule_that_removes_nodes() -> None:
    assert_refuses(graph(*SHARED, **ZERO), ReluOfSum, None)


def test_rule_may_keep_nodes_with_other_readers() -> None:
    rewritten = assert_fires(graph(*SHARED, **ZERO), KeepingReluOfSum, 1)
    assert operators(rewritten) == {"Add": 1, "Relu": 1, "Neg": 1}


@pytest.mark.parametrize("commute", [False, True])
def test_a_refusal_names_rule_node_module_and_reason_once(commute: bool) -> None:
    model = graph(
        "float[B,4] x, float[B,4] b", "float[B,4] y", "a = Add(x, b) y = Max(a, zero)", zero=np.array(0, np.float32)
    )
    root = node_of(model, "Max")
    root.metadata_props[MODULE_KEY] = "mid_block.act"
    fired, failures = apply_rules(model, [ReluOfSum], commute)
    assert fired == 0
    assert failures == [MatchFailure("ReluOfSum", "Max_1", "mid_block.act", "b is no weight")]


def test_a_refusal_names_the_operator_of_a_nameless_node() -> None:
    model = graph(
        "float[B,4] x, float[B,4] b", "float[B,4] y", "a = Add(x, b) y = Max(a, zero)", zero=np.array(0, np.float32)
    )
    node_of(model, "Max").name = None
    assert apply_rules(model, [ReluOfSum])[1] == [MatchFailure("ReluOfSum", "Max", "", "b is no weight")]


def test_the_new_node_belongs_to_the_module_of_the_old_one() -> None:
    model = graph(*PLAIN, **ZERO)
    for node in model.graph:
        node.metadata_props[MODULE_KEY] = "mid_block.act"
    apply_rules(model, [ReluOfSum])
    assert module_path(node_of(model, "Relu")) == "mid_block.act"


def value_of(shape: list[int | str | None] | None) -> ir.Value:
    return ir.Value(name="v", shape=None if shape is None else ir.Shape(shape))


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ([2, 3], [2, 3], True),
        (["B", 3], ["B", 3], True),
        ([], [], True),
        (["B", 3], ["C", 3], False),
        (["B", 3], [2, 3], False),
        ([2, 3], [2, 3, 1], False),
        ([None, 3], [None, 3], False),
        (None, None, False),
        ([2], None, False),
    ],
)
def test_same_shape_of_known_sizes(left: Any, right: Any, same: bool) -> None:
    assert same_shape(value_of(left), value_of(right)) is same
    if left is not None and right is not None:
        assert same_dims(known_dims(value_of(left)), known_dims(value_of(right))) is same


def test_a_bias_has_an_element_for_every_channel() -> None:
    weights: dict[str, Any] = {"w": normal(4), "one": normal(1), "row": normal(1, 4), "number": np.float32(1)}
    body = "a = Add(x, w) b = Add(a, one) c = Add(b, row) d = Add(c, number) y = Add(d, v)"
    model = graph("float[B,4] x, float[4] v", "float[B,4] y", body, **weights)
    operands = [input_of(node, 1) for node in model.graph]
    assert [is_bias(value, 4) for value in operands] == [True, False, False, False, False]
    assert not is_bias(operands[0], 5)
    assert not is_bias(operands[0], None)


def named(found: Sum) -> tuple[list[str | None], list[str | None]]:
    return [value.name for value in found.terms], [value.name for value in found.biases]


@pytest.mark.parametrize(
    ("body", "terms", "biases"),
    [
        ("y = Relu(a)", ["y"], []),
        ("y = Add(a, b)", ["a", "b"], []),
        ("y = Add(a, w)", ["a"], ["w"]),
        ("y = Add(w, a)", ["a"], ["w"]),
        ("t = Add(a, w) y = Add(t, b)", ["a", "b"], ["w"]),
        ("t = Add(a, w) y = Add(b, t)", ["b", "a"], ["w"]),
        ("t = Add(a, w) u = Add(b, v) y = Add(t, u)", ["a", "b"], ["w", "v"]),
        ("t = Add(a, w) u = Add(t, v) y = Add(u, b)", ["a", "b"], ["w", "v"]),
        ("t = Add(a, b) u = Add(t, c) y = Add(u, a)", ["a", "b", "c", "a"], []),
        ("t = Add(a, b) y = Add(t, t)", ["t", "t"], []),
        ("y = Add(a, a)", ["a", "a"], []),
        ("y = Add(a, one)", ["a", "one"], []),
        ("y = Add(a, row)", ["a", "row"], []),
        ("y = Sub(a, b)", ["y"], []),
        ("y = com.microsoft.Add(a, b)", ["y"], []),
    ],
)
def test_sum_of(body: str, terms: list[str], biases: list[str]) -> None:
    weights = {"w": normal(4), "v": normal(4), "one": normal(1), "row": normal(1, 4)}
    model = graph("float[B,4] a, float[B,4] b, float[B,4] c", "float[B,4] y", body, **weights)
    assert named(sum_of(model.graph.outputs[0])) == (terms, biases)


def test_a_sum_used_elsewhere_stays_closed() -> None:
    inputs, body = "float[B,4] a, float[B,4] b", "t = Add(a, w) y = Add(t, b) z = Neg(t)"
    model = graph(inputs, "float[B,4] y, float[B,4] z", body, w=normal(4))
    assert named(sum_of(model.graph.outputs[0])) == (["t", "b"], [])
    given_out = graph(inputs, "float[B,4] y, float[B,4] t", "t = Add(a, w) y = Add(t, b)", w=normal(4))
    assert named(sum_of(given_out.graph.outputs[0])) == (["t", "b"], [])


def test_total_bias() -> None:
    weights = {name: normal(4, seed=seed) for seed, name in enumerate("uvw")}
    model = graph("float[B,4] x", "float[B,4] y", "a = Add(x, u) b = Add(a, v) y = Add(b, w)", **weights)
    biases = sum_of(model.graph.outputs[0]).biases
    anchor = node_of_output(model)
    assert len(biases) == 3
    before = text_of(model)
    assert total_bias(anchor, []) is None
    assert total_bias(anchor, biases[:1]) is biases[0]
    assert text_of(model) == before
    total = required(total_bias(anchor, biases))
    np.testing.assert_allclose(required(constant_value(total)), sum(weights.values()), rtol=1e-6)
    assert total.dtype == ir.DataType.FLOAT
    assert total_bias(anchor, biases) is total
    assert total_bias(anchor, biases[:2]) is not total


def test_total_of_constant_and_computed_biases() -> None:
    body = "r = Neg(w) a = Add(x, u) b = Add(a, r) c = Add(b, v) y = Add(c, w)"
    weights = {name: normal(4, seed=seed) for seed, name in enumerate("uv")}
    model = graph("float[B,4] x, float[4] w", "float[B,4] y", body, **weights)
    parts = sum_of(model.graph.outputs[0])
    assert named(parts) == (["x"], ["u", "r", "v", "w"])
    total = total_bias(node_of_output(model), parts.biases)
    assert total is not None
    assert total.shape == ir.Shape([4])
    assert [node.op_type for node in model.graph][-3:] == ["Add", "Add", "Add"]


def node_of_output(model: ir.Model) -> ir.Node:
    node = model.graph.outputs[0].producer()
    assert node is not None
    return node
