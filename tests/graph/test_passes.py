from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import sympy  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from support.graphs import (
    assert_same_function,
    copied,
    feeds_for,
    graph,
    int64,
    interface,
    node_of,
    normal,
    operators,
    run,
    text_of,
)

from sdonnx.graph.edit import add_initializer, constant_value, insert, known_dims, replace, required
from sdonnx.graph.passes import FoldWeightTransposes, SimplifyReshapes, infer_shapes, tidy
from sdonnx.operators.operator_table import LowerContribOperators

PERMUTATIONS = [perm for rank in range(1, 5) for perm in itertools.permutations(range(rank))]


@given(perm=st.sampled_from(PERMUTATIONS), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_transposed_weight_is_folded(perm: tuple[int, ...], seed: int) -> None:
    shape = tuple(np.random.default_rng(seed).integers(1, 5, len(perm)))
    weight = normal(*shape, seed=seed)
    turned = [int(shape[axis]) for axis in perm]
    model = graph(
        f"float{turned} x", f"float{turned} y", f"t = Transpose<perm={list(perm)}>(w) y = Add(x, t)", w=weight
    )
    original = copied(model)
    assert FoldWeightTransposes()(model).modified
    assert operators(model) == {"Add": 1}
    assert len(model.graph.initializers) == 1
    np.testing.assert_array_equal(constant_value(node_of(model, "Add").inputs[1]), weight.transpose(perm))
    assert_same_function(model, original)
    assert not FoldWeightTransposes()(model).modified


def test_a_transpose_without_order_reverses_the_axes() -> None:
    model = graph("float[4,3,2] x", "float[4,3,2] y", "t = Transpose(w) y = Add(x, t)", w=normal(2, 3, 4))
    original = copied(model)
    FoldWeightTransposes()(model)
    assert operators(model) == {"Add": 1}
    assert_same_function(model, original)


def test_equal_transposes_of_one_weight_are_folded_once() -> None:
    body = "t = Transpose<perm=[1,0]>(w) u = Transpose<perm=[1,0]>(w) "
    body += "a = MatMul(x, t) b = MatMul(a, u) y = MatMul(b, w)"
    model = graph("float[B,3] x", "float[B,3] y", body, w=normal(3, 3))
    original = copied(model)
    FoldWeightTransposes()(model)
    assert set(model.graph.initializers) == {"w", "w.T"}
    assert_same_function(model, original)


def test_transposes_of_a_transposed_weight_are_folded_one_by_one() -> None:
    body = "t = Transpose<perm=[1,2,0]>(w) u = Transpose<perm=[1,2,0]>(t) y = Add(x, u)"
    model = graph("float[4,2,3] x", "float[4,2,3] y", body, w=normal(2, 3, 4))
    original = copied(model)
    FoldWeightTransposes()(model)
    assert operators(model) == {"Add": 1}
    assert_same_function(model, original)


@pytest.mark.parametrize(
    ("inputs", "outputs", "body"),
    [
        ("float[3,2] x", "float[2,3] y", "y = Transpose<perm=[1,0]>(x)"),
        ("float[3,2] w", "float[2,3] y", "t = Transpose<perm=[1,0]>(w) y = Relu(t)"),
        ("float[2,3] x", "float[2,3] y, float[2,3] t", "t = Transpose<perm=[1,0]>(w) y = Add(x, t)"),
    ],
    ids=["activation", "default of an input", "output"],
)
def test_other_transposes_stay(inputs: str, outputs: str, body: str) -> None:
    model = graph(inputs, outputs, body, w=normal(3, 2))
    before = text_of(model)
    assert not FoldWeightTransposes()(model).modified
    assert text_of(model) == before


def test_a_transposed_graph_output_stays() -> None:
    model = graph("float[2,3] x", "float[2,3] y, float[3,2] w", "t = Transpose(w) y = Add(x, t)", w=normal(3, 2))
    original = copied(model)
    FoldWeightTransposes()(model)
    assert_same_function(model, original)


def test_folding_reads_no_weight_before_it_is_saved() -> None:
    """A weight can be folded while its file is missing: it is read only with the result."""
    model = graph("float[2,3] x", "float[2,3] y", "t = Transpose(w) y = Add(x, t)", w=normal(3, 2))
    weight = normal(3, 2)
    with tempfile.TemporaryDirectory() as folder:
        tensor = ir.ExternalTensor("late", 0, 24, ir.DataType.FLOAT, shape=ir.Shape([3, 2]), name="w", base_dir=folder)
        model.graph.initializers["w"].const_value = tensor
        FoldWeightTransposes()(model)
        (Path(folder) / "late").write_bytes(weight.tobytes())
        np.testing.assert_array_equal(constant_value(node_of(model, "Add").inputs[1]), weight.T)


SHAPE_OF_X = "b = Shape<start=0,end=1>(x) s = Shape<start=1,end=2>(x) "


@pytest.mark.parametrize(
    ("inputs", "outputs", "body", "target"),
    [
        ("float[B,S,12] x", "float[B,S,3,4] y", SHAPE_OF_X + "t = Concat<axis=0>(b, s, three, four)", [0, 0, 3, 4]),
        ("float[B,S,3,4] x", "float[B,S,12] y", SHAPE_OF_X + "t = Concat<axis=0>(b, s, twelve)", [0, 0, 12]),
        ("float[2,S,12] x", "float[2,P,6] y", "s = Shape<start=1,end=2>(x) p = Add(s, s) "
         "t = Concat<axis=0>(two, p, six)", [2, -1, 6]),
        ("float[B,3,4] x", "float[B,12] y", "b = Shape<start=0,end=1>(x) t = Concat<axis=0>(b, twelve)", [0, 12]),
    ],
)  # fmt: skip
def test_a_computed_shape_becomes_a_constant(inputs: str, outputs: str, body: str, target: list[int]) -> None:
    numbers = {"two": 2, "three": 3, "four": 4, "six": 6, "twelve": 12}
    weights = {name: int64([value]) for name, value in numbers.items() if name in body}
    model = graph(inputs, outputs, f"{body} y = Reshape(x, t)", **weights)
    original = copied(model)
    assert SimplifyReshapes()(model).modified
    tidy(model)
    assert operators(model) == {"Reshape": 1}
    assert required(constant_value(node_of(model, "Reshape").inputs[1])).tolist() == target
    assert_same_function(model, original)
    assert not SimplifyReshapes()(model).modified


def test_two_new_dynamic_sizes_stay_computed() -> None:
    body = "s = Shape(i) y = Reshape(x, s)"
    model = graph("float[B,S] x, float[S,B] i", "float[S,B] y", body)
    assert not SimplifyReshapes()(model).modified


SIZES_AND_NAMES = {"B": 2, "S": 6, "L": 5}


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int | str], list[int | str]]:
    """An input's dimensions, and the same with neighbours merged."""
    dims: list[int | str] = draw(st.lists(st.sampled_from([1, 2, 3, "B", "S", "L"]), min_size=1, max_size=4))
    merged: list[int | str] = []
    for dim in dims:
        joins: bool = bool(merged) and draw(st.booleans())
        if joins:
            last = merged.pop()
            both = isinstance(last, int) and isinstance(dim, int)
            merged.append(int(last) * int(dim) if both else f"({last})*({dim})")
        else:
            merged.append(dim)
    return (dims, merged) if draw(st.booleans()) else (merged, dims)


def size_of(dim: int | str) -> int:
    return int(sympy.sympify(str(dim), locals={name: sympy.Integer(size) for name, size in SIZES_AND_NAMES.items()}))


@given(shapes=reshapes())
@settings(max_examples=60, deadline=None)
def test_a_simplified_reshape_is_the_same_reshape(shapes: tuple[list[int | str], list[int | str]]) -> None:
    """The result has the same values and shape for any target."""
    source, target = shapes
    model = graph("float[1] x, int64[R] t", "float[1] y", "y = Reshape(x, t)")
    model.graph.inputs[0].shape, model.graph.outputs[0].shape = ir.Shape(source), ir.Shape(target)
    model.graph.inputs[1].shape = ir.Shape([len(target)])
    infer_shapes(model)
    # It must run whether the pass changed it or not.
    SimplifyReshapes()(model)
    x = normal(*(size_of(dim) for dim in source))
    wanted = [size_of(dim) for dim in target]
    # The declared shapes are not tested here.
    for value in (model.graph.inputs[0], model.graph.outputs[0]):
        value.shape = ir.Shape([None] * len(known_dims(value)))
    found = run(model, {"x": x, "t": int64(wanted)})["y"]
    np.testing.assert_array_equal(found, x.reshape(wanted))


def test_shapes_are_inferred_in_one_form() -> None:
    model = graph("float[B,S] x, float[B,S] z", "float[B,S] y", "a = Relu(x) b = Relu(z) y = Add(a, b)")
    first, second = model.graph.inputs
    first.shape, second.shape = ir.Shape(["B", "S + S + 1"]), ir.Shape(["B", "1 + 2*S"])
    a, b, y = (node.outputs[0] for node in model.graph)
    for value in (a, b):
        value.shape, value.type = None, None
    infer_shapes(model)
    assert a.shape == b.shape == first.shape == second.shape
    assert a.dtype == b.dtype == y.dtype == ir.DataType.FLOAT


def test_tidy_removes_merges_and_sorts() -> None:
    model = graph("float[B,4] x", "float[B,4] y", "a = Relu(x) b = Relu(x) c = Neg(x) y = Add(a, b)", unused=normal(3))
    original = copied(model)
    add = node_of(model, "Add")
    model.graph.insert_before(model.graph[0], node_of(model, "Neg"))
    first = model.graph[1]
    model.graph.remove(add)
    model.graph.insert_before(first, add)
    model.graph.outputs[0] = add.outputs[0]
    tidy(model)
    assert [node.op_type for node in model.graph] == ["Relu", "Add"]
    assert list(model.graph.initializers) == []
    assert_same_function(model, original)


@pytest.mark.parametrize("taken", ["x", "a", "y"])
def test_tidy_makes_names_unique(taken: str) -> None:
    model = graph("float[B,4] x", "float[B,4] y", "a = Relu(x) b = Exp(a) y = Neg(b)")
    original = graph("float[B,4] x", "float[B,4] y", "a = Relu(x) b = Add(a, w) y = Neg(b)", w=normal(4))
    node = node_of(model, "Exp")
    weight = add_initializer(model.graph, taken, ir.Tensor(normal(4)))
    replace(node.outputs[0], insert(node, "Add", [node.inputs[0], weight], shape=["B", 4]))
    tidy(model)
    assert_same_function(model, original)


def test_tidy_removes_unused_optional_outputs() -> None:
    body = "y, m, v, total = com.microsoft.SkipLayerNormalization(x, s, g) z = Neg(total)"
    inputs = "float[B,S,4] x, float[B,S,4] s"
    used = graph(inputs, "float[B,S,4] y, float[B,S,4] z", body, g=normal(4))
    tidy(used)
    assert [output.name for output in node_of(used, "SkipLayerNormalization").outputs] == [
        "y",
        "",
        "",
        "total",
    ]
    unused = graph(inputs, "float[B,S,4] y", body, g=normal(4))
    tidy(unused)
    assert [output.name for output in node_of(unused, "SkipLayerNormalization").outputs] == ["y", "", "", ""]
    given_out = graph(inputs, "float[B,S,4] y, float[B,S,4] total", body, g=normal(4))
    tidy(given_out)
    assert [output.name for output in node_of(given_out, "SkipLayerNormalization").outputs] == [
        "y",
        "",
        "",
        "total",
    ]


def test_lowering_keeps_the_named_operators() -> None:
    body = "a = com.microsoft.BiasAdd(x, w, x) y = com.microsoft.BiasAdd(a, w, x) z = com.microsoft.Foo(x)"
    model = graph("float[B,S,4] x", "float[B,S,4] y, float[B,S,4] z", body, w=normal(4))
    before = interface(model)
    first, second, _ = model.graph
    assert LowerContribOperators(lambda node: node is second)(model).modified
    assert operators(model) == {"Add": 2, "BiasAdd": 1, "Foo": 1}
    assert first not in list(model.graph)
    assert LowerContribOperators()(model).modified
    assert operators(model) == {"Add": 4, "Foo": 1}
    assert not LowerContribOperators()(model).modified
    assert interface(model) == before


def test_lowering_keeps_shape_and_type_of_outputs() -> None:
    body = "y, total = com.microsoft.SkipGroupNorm<groups=2, epsilon=0.001, channels_last=1>(x, g, b, s)"
    model = graph(
        "float[B,H,W,8] x, float[B,H,W,8] s",
        "float[B,H,W,8] y, float[B,H,W,8] total",
        body,
        g=normal(8),
        b=normal(8),
    )
    before = interface(model)
    feeds = feeds_for(model)
    LowerContribOperators()(model)
    infer_shapes(model)
    assert interface(model) == before
    np.testing.assert_allclose(run(model, feeds)["total"], feeds["x"] + feeds["s"], rtol=1e-6)
