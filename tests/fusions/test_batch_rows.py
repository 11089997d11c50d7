"""Operations on each of many rows are computed for all rows at once."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from support.graphs import (
    Array,
    assert_pass_fires,
    graph,
    int64,
    node_of,
    normal,
    operators,
)

from sdonnx.fusions.batch_rows import compute_rows_together
from sdonnx.graph.passes import infer_shapes

SHAPE = {"eight": int64([8])}


def split(body: str, outputs: str, count: int = 4, given: str = "", /, **weights: Array) -> ir.Model:
    """A Split of (N,1,8) into rows s0, s1, ..., each reshaped to a vector r0, r1, ..., and operations on those."""
    parts = ", ".join(f"s{index}" for index in range(count))
    text = f"{parts} = Split<axis=0, num_outputs={count}>(x) "
    text += " ".join(f"r{index} = Reshape(s{index}, eight)" for index in range(count))
    return graph(f"float[{count},1,8] x{given}", outputs, f"{text} {body}", **SHAPE, **weights)


def together(model: ir.Model, **fired: int) -> ir.Model:
    """Apply the pass; check its counts, that the function stays, and that a second run changes nothing."""
    infer_shapes(model)
    return assert_pass_fires(model, compute_rows_together, fired, {})


def vectors(count: int) -> dict[str, Array]:
    return {f"c{index}": normal(8, seed=index) for index in range(count)}


def outputs(count: int, dims: str = "8") -> str:
    return ", ".join(f"float[{dims}] y{index}" for index in range(count))


def each(call: str, count: int) -> str:
    """That call for each row, and a negation, for graph outputs stay where they are."""
    return " ".join(f"p{index} = {call.format(index)} y{index} = Neg(p{index})" for index in range(count))


@pytest.mark.parametrize("call", ["Mul(r{0}, c{0})", "Mul(c{0}, r{0})", "Add(r{0}, c{0})", "Add(c{0}, r{0})"])
def test_each_row_with_a_vector(call: str) -> None:
    rewritten = together(split(each(call, 4), outputs(4), **vectors(4)), **{call[:3]: 4})
    assert operators(rewritten, "Mul", "Add", "Gather", "Split")[call[:3]] == 1
    assert operators(rewritten, "Gather") == {"Gather": 0}
    (stacked,) = [value for value in rewritten.graph.initializers.values() if value.shape == ir.Shape([4, 1, 8])]
    assert stacked.dtype == ir.DataType.FLOAT


def test_some_of_the_rows() -> None:
    """In any order, and one twice."""
    body = "a = Mul(r3, c0) y0 = Neg(a) b = Mul(r1, c1) y1 = Neg(b) c = Mul(r3, c2) y2 = Neg(c)"
    rewritten = together(split(body, outputs(3), **vectors(3)), Mul=3)
    assert operators(rewritten, "Mul", "Gather") == {"Mul": 1, "Gather": 1}


def test_each_row_with_a_matrix() -> None:
    matrices = {f"w{index}": normal(8, 6, seed=index) for index in range(4)}
    rewritten = together(split(each("MatMul(r{0}, w{0})", 4), outputs(4, "6"), **matrices), MatMul=4)
    assert operators(rewritten, "MatMul") == {"MatMul": 1}
    assert node_of(rewritten, "MatMul").outputs[0].shape == ir.Shape([4, 1, 6])


def test_matrices_of_one_size_go_together() -> None:
    matrices = {f"w{index}": normal(8, 6 if index < 2 else 5, seed=index) for index in range(4)}
    results = ", ".join(f"float[{6 if index < 2 else 5}] y{index}" for index in range(4))
    rewritten = together(split(each("MatMul(r{0}, w{0})", 4), results, **matrices), MatMul=4)
    assert operators(rewritten, "MatMul") == {"MatMul": 2}


def test_one_after_another() -> None:
    """Products of products, and sums of those: three operators instead of twelve."""
    body = " ".join(f"a{i} = Mul(r{i}, c{i}) b{i} = MatMul(a{i}, w{i}) d{i} = Add(c{i}, b{i}) y{i} = Neg(d{i})"
                    for i in range(4))  # fmt: skip
    matrices = {f"w{index}": normal(8, 8, seed=10 + index) for index in range(4)}
    rewritten = together(split(body, outputs(4), **vectors(4), **matrices), Mul=4, MatMul=4, Add=4)
    assert operators(rewritten, "Mul", "MatMul", "Add") == {"Mul": 1, "MatMul": 1, "Add": 1}


@pytest.mark.parametrize(
    ("body", "results", "given"),
    [
        ("a = Mul(r0, c0) y0 = Neg(a)", outputs(1), ""),  # a single one
        ("a = Mul(r0, z) y0 = Neg(a) b = Mul(r1, z) y1 = Neg(b)", outputs(2), ", float[8] z"),  # no constant
        ("y0 = Mul(r0, c0) y1 = Mul(r1, c1)", outputs(2), ""),  # outputs of the graph
        ("a = Mul(s0, c0) y0 = Neg(a) b = Mul(s1, c1) y1 = Neg(b)", outputs(2, "1,1,8"), ""),  # no vectors
        ("a = MatMul(w0, r0) y0 = Neg(a) b = MatMul(w1, r1) y1 = Neg(b)", outputs(2), ""),  # from the other side
        ("a = Sub(r0, c0) y0 = Neg(a) b = Sub(r1, c1) y1 = Neg(b)", outputs(2), ""),
    ],
)
def test_other_rows_stay(body: str, results: str, given: str) -> None:
    known = {**vectors(2), "w0": normal(8, 8), "w1": normal(8, 8, seed=1)}
    together(split(body, results, 4, given, **{name: each for name, each in known.items() if name in body}))


@pytest.mark.parametrize("others", ["", "a = Mul(r2, c0) b = Mul(r3, c1) y1 = Add(a, b)"], ids=["no others", "others"])
def test_nodes_of_a_branch_stay(others: str) -> None:
    """They are computed only where a condition holds."""
    branch = "y0 = If(z) <then_branch = then () => (t) { d = Mul(r0, c0) e = Mul(r1, c1) t = Add(d, e) }, "
    branch += "else_branch = other () => (f) { f = Neg(r0) }>"
    body = f"{others} {branch}"
    results = outputs(2 if others else 1)
    model = split(body, results, 4, ", bool z", **vectors(2))
    assert compute_rows_together(model).fired == ({"Mul": 2} if others else {})


def test_rows_of_several_numbers_are_left() -> None:
    text = "s0, s1 = Split<axis=0, num_outputs=2>(x) r0 = Reshape(s0, sixteen) r1 = Reshape(s1, sixteen) "
    text += each("Mul(r{0}, c{0})", 2)
    weights = {"sixteen": int64([16]), "c0": normal(16), "c1": normal(16, seed=1)}
    together(graph("float[2,2,8] x", outputs(2, "16"), text, **weights))
