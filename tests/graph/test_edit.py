from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from support.graphs import assert_same_function, feeds_for, graph, interface, node_of, normal, run

from sdonnx.graph.edit import (
    add_initializer,
    constant,
    constant_value,
    derived_initializer,
    dims,
    dtype_of,
    input_of,
    insert,
    insert_multi,
    is_weight,
    known_dims,
    known_size,
    producer_node,
    replace,
    required,
    static_dim,
    tensor_of,
)
from sdonnx.graph.modules import MODULE_KEY, module_path
from sdonnx.graph.passes import tidy


def two_steps() -> ir.Model:
    return graph("float[B,4] x", "float[B,4] y", "a = Relu(x) y = Neg(a)")


def test_insert_defaults_to_the_type_and_module_of_its_surroundings() -> None:
    model = two_steps()
    anchor = node_of(model, "Neg")
    anchor.metadata_props[MODULE_KEY] = "mid_block.resnets.0"
    added = insert(anchor, "Exp", [anchor.inputs[0]], shape=["B", 4])
    assert added.dtype == ir.DataType.FLOAT
    assert added.shape == ir.Shape(["B", 4])
    assert module_path(producer_node(added)) == "mid_block.resnets.0"
    assert [node.op_type for node in model.graph] == ["Relu", "Exp", "Neg"]


def test_insert_uses_its_arguments() -> None:
    model = two_steps()
    anchor = node_of(model, "Neg")
    anchor.metadata_props[MODULE_KEY] = "a"
    added = insert(anchor, "Cast", [anchor.inputs[0]], {"to": 7}, dtype=ir.DataType.INT64, module="b")
    assert added.dtype == ir.DataType.INT64
    assert added.shape is None
    assert module_path(producer_node(added)) == "b"
    free = insert(anchor, "Foo", [None, anchor.inputs[0]], {"x": 1.5}, domain="com.microsoft", module="")
    node = free.producer()
    assert node is not None
    assert node.domain == "com.microsoft"
    assert node.attributes.get_float("x") == 1.5
    assert free.dtype == ir.DataType.FLOAT
    assert MODULE_KEY not in node.metadata_props


def test_insert_multi_sets_the_shape_of_each_output() -> None:
    model = two_steps()
    parts = insert_multi(
        node_of(model, "Neg"),
        "Split",
        [model.graph.inputs[0]],
        {"axis": 1, "num_outputs": 2},
        2,
        shapes=[["B", 2]],
    )
    assert [part.shape for part in parts] == [ir.Shape(["B", 2]), None]
    assert all(part.dtype == ir.DataType.FLOAT for part in parts)


def test_replace_keeps_the_name_of_an_output() -> None:
    model = two_steps()
    before = interface(model)
    old = model.graph.outputs[0]
    new = insert(node_of(model, "Neg"), "Abs", [model.graph.inputs[0]])
    replace(old, new)
    assert interface(model) == before
    assert model.graph.outputs[0] is new
    assert not old.is_graph_output()
    model.graph.remove(node_of(model, "Neg"), safe=True)
    feeds = feeds_for(model)
    np.testing.assert_array_equal(run(model, feeds)["y"], np.abs(feeds["x"]))


def test_replace_by_an_input_keeps_both_names() -> None:
    model = graph("float[B,4] x", "float[B,4] y", "a = Neg(x) y = Neg(a)")
    original = graph("float[B,4] x", "float[B,4] y", "y = Identity(x)")
    replace(model.graph.outputs[0], model.graph.inputs[0])
    tidy(model)
    assert_same_function(model, original)


def test_replace_two_outputs_by_one_value_keeps_both_names() -> None:
    model = graph("float[B,4] x", "float[B,4] y, float[B,4] z", "y = Neg(x) z = Neg(x)")
    original = graph("float[B,4] x", "float[B,4] y, float[B,4] z", "y = Abs(x) z = Abs(x)")
    new = insert(model.graph[0], "Abs", [model.graph.inputs[0]])
    for output in list(model.graph.outputs):
        replace(output, new)
    tidy(model)
    assert_same_function(model, original)


def test_replace_replaces_every_use() -> None:
    model = graph("float[B,4] x", "float[B,4] y, float[B,4] z", "a = Relu(x) y = Neg(a) z = Exp(a)")
    original = graph("float[B,4] x", "float[B,4] y, float[B,4] z", "a = Abs(x) y = Neg(a) z = Exp(a)")
    relu = node_of(model, "Relu")
    replace(relu.outputs[0], insert(relu, "Abs", [model.graph.inputs[0]]))
    assert_same_function(model, original)


def test_dimensions() -> None:
    value = graph("float[B,4,?] x", "float[B,4,?] y", "y = Relu(x)").graph.inputs[0]
    value.shape = ir.Shape(["B", 4, None])
    assert dims(value) == (ir.SymbolicDim("B"), 4, ir.SymbolicDim(None))
    assert [static_dim(value, axis) for axis in (-4, -3, -2, -1, 0, 1, 2, 3)] == [
        None, None, 4, None, None, 4, None, None,
    ]  # fmt: skip
    unknown = ir.Value(name="v")
    assert dims(unknown) is None
    assert static_dim(unknown, 0) is None


def test_a_weight_is_a_constant_that_no_caller_can_override() -> None:
    weights = {"w": normal(4), "given": normal(4, seed=1)}
    model = graph("float[4] x, float[4] given", "float[4] y", "a = Add(x, w) y = Add(a, given)", **weights)
    first, second = (node for node in model.graph)
    assert is_weight(first.inputs[1])
    np.testing.assert_array_equal(constant_value(first.inputs[1]), weights["w"])
    # An initializer that is also an input is a default that the caller can override.
    assert input_of(second, 1).const_value is not None
    for value in (second.inputs[1], first.inputs[0], first.outputs[0], None):
        assert not is_weight(value)
        assert constant_value(value) is None


def test_names_of_initializers_are_unique() -> None:
    model = two_steps()
    values = [add_initializer(model.graph, "w", ir.Tensor(normal(2, seed=seed))) for seed in range(3)]
    assert [value.name for value in values] == ["w", "w_1", "w_2"]
    for seed, value in enumerate(values):
        np.testing.assert_array_equal(constant_value(value), normal(2, seed=seed))
        assert value.const_value is not None
        assert value.const_value.name == value.name


def test_equal_constants_of_one_name_are_shared() -> None:
    graph_ = two_steps().graph
    first = constant(graph_, [0, -1], np.int64, "shape")
    assert constant(graph_, (0, -1), np.int64, "shape") is first
    others = [constant(graph_, [0, 1], np.int64, "shape"), constant(graph_, [0, -1], np.int32, "shape")]
    assert len({first.name, *(value.name for value in others)}) == 3
    assert required(constant_value(others[0])).tolist() == [0, 1]
    assert constant(graph_, 2, np.int64, "index").shape == ir.Shape([])


def test_derived_initializers_are_computed_when_they_are_read() -> None:
    model = two_steps()
    calls: list[int] = []

    def make() -> np.ndarray:
        calls.append(1)
        return np.arange(6, dtype=np.float32).reshape(2, 3)

    value = derived_initializer(model.graph, "derived", make, ir.DataType.FLOAT, (2, 3))
    assert derived_initializer(model.graph, "derived", make, ir.DataType.FLOAT, (2, 3)) is value
    other = derived_initializer(model.graph, "derived", make, ir.DataType.FLOAT, (3, 2))
    assert other is not value
    assert calls == []
    stored = onnx.numpy_helper.to_array(ir.to_proto(tensor_of(value)))
    np.testing.assert_array_equal(stored, [[0, 1, 2], [3, 4, 5]])
    assert calls


def test_accessors_return_the_parts_of_a_graph() -> None:
    model = graph("float[B,4] x", "float[B,4] y", "a = Relu(x) y = Add(a, w)", w=normal(4))
    add = node_of(model, "Add")
    assert input_of(add, 0) is input_of(add, -2) is add.inputs[0]
    assert producer_node(input_of(add, 0)) is node_of(model, "Relu")
    assert dtype_of(model.graph.inputs[0]) == ir.DataType.FLOAT
    assert known_dims(model.graph.inputs[0]) == (ir.SymbolicDim("B"), 4)
    assert known_size(model.graph.inputs[0], 1) == 4
    assert tensor_of(input_of(add, 1)) is model.graph.initializers["w"].const_value
    assert required(0) == 0


@pytest.mark.parametrize(
    ("read", "missing"),
    [
        (lambda node, _: input_of(node, 1), "input 1 of Clip 'bound'"),
        (lambda node, _: input_of(node, 3), "input 3 of Clip 'bound'"),
        (lambda node, _: input_of(node, -4), "input -4 of Clip 'bound'"),
        (lambda _, x: producer_node(x), "node that computes 'x'"),
        (lambda _, x: tensor_of(x), "constant tensor of 'x'"),
        (lambda _, x: known_size(x, 0), "static size of axis 0 of 'x'"),
        (lambda _, _x: dtype_of(ir.Value(name="v")), "element type of 'v'"),
        (lambda _, _x: known_dims(ir.Value(name="v")), "shape of 'v'"),
        (lambda _, _x: required(None, "mask"), "mask"),
    ],
)
def test_accessors_name_the_missing_part(read: Callable[[ir.Node, ir.Value], Any], missing: str) -> None:
    x = graph("float[B,4] x", "float[B,4] y", "y = Relu(x)").graph.inputs[0]
    node = ir.node("Clip", [x, None, x], name="bound")
    with pytest.raises(ValueError, match=re.escape(f"the {missing} is missing")):
        read(node, x)
