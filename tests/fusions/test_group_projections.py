from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.graphs import (
    Array,
    assert_same_function,
    copied,
    exported,
    feeds_for,
    graph,
    node_of,
    normal,
    operators,
    relative_error,
    run,
    text_of,
)

from sdonnx.fusions.group_projections import group_projections
from sdonnx.graph.modules import MODULE_KEY, MODULE_SEPARATOR, module_path
from sdonnx.graph.passes import infer_shapes, tidy


def grouped(model: ir.Model, times: int) -> ir.Model:
    """Apply the pass; check how many projections it groups, that the function stays, and that it is done."""
    rewritten = copied(model)
    assert group_projections(rewritten).fired == {"GroupProjections": times}
    tidy(rewritten)
    infer_shapes(rewritten)
    assert_same_function(rewritten, model)
    again = copied(rewritten)
    assert group_projections(again).fired == {"GroupProjections": 0}
    assert text_of(again) == text_of(copied(rewritten))
    return rewritten


def weights(count: int, rows: int = 8, columns: int = 6) -> dict[str, Array]:
    return {f"w{index}": normal(rows, columns, seed=index) for index in range(count)}


def products(count: int, call: str = "MatMul(x, w{0})") -> str:
    """Products of x, each negated: y0, y1, ..."""
    return " ".join(f"p{index} = {call.format(index)} y{index} = Neg(p{index})" for index in range(count))


def outputs(count: int, dims: str) -> str:
    return ", ".join(f"float[{dims}] y{index}" for index in range(count))


def test_projections_of_one_value() -> None:
    model = graph("float[B,S,8] x", outputs(5, "B,S,6"), products(5), **weights(5))
    rewritten = grouped(model, 5)
    assert operators(rewritten) == {"MatMul": 1, "Split": 1, "Neg": 5}
    (weight,) = rewritten.graph.initializers.values()
    assert weight.shape == ir.Shape([8, 30])
    assert node_of(rewritten, "Split").outputs[0].shape == ir.Shape(["B", "S", 6])


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_projections_with_bias(transposed: int, has_bias: bool) -> None:
    call = f"Gemm<transB={transposed}>(x, w{{0}}{', b{0}' if has_bias else ''})"
    rows, columns = (6, 8) if transposed else (8, 6)
    biases = {f"b{index}": normal(6, seed=20 + index) for index in range(4)} if has_bias else {}
    model = graph("float[B,8] x", outputs(4, "B,6"), products(4, call), **weights(4, rows, columns), **biases)
    assert operators(grouped(model, 4)) == {"Gemm": 1, "Split": 1, "Neg": 4}


def test_projections_given_out() -> None:
    body = " ".join(f"y{index} = MatMul(x, w{index})" for index in range(4))
    grouped(graph("float[B,S,8] x", outputs(4, "B,S,6"), body, **weights(4)), 4)


def test_projections_of_another_width_are_grouped_apart() -> None:
    model = graph(
        "float[B,S,8] x", f"{outputs(4, 'B,S,6')}, {outputs(9, 'B,S,3').split(', ', 4)[-1]}", products(9),
        **weights(4), **{f"w{index}": normal(8, 3, seed=index) for index in range(4, 9)},
    )  # fmt: skip
    assert operators(grouped(model, 9), "MatMul", "Split") == {"MatMul": 2, "Split": 2}


@pytest.mark.parametrize(("count", "groups"), [(32, 1), (40, 2), (64, 2)])
def test_no_split_has_more_outputs_than_kernel_arguments(count: int, groups: int) -> None:
    model = graph("float[B,S,8] x", outputs(count, "B,S,6"), products(count), **weights(count))
    rewritten = grouped(model, count)
    splits = [node for node in rewritten.graph if node.op_type == "Split"]
    assert len(splits) == groups
    assert all(len(node.outputs) <= 32 for node in splits)


def test_groups_that_begin_with_one_weight_keep_their_own() -> None:
    """Exporters make one initializer of equal weights: its name does not identify the owner."""
    calls = [f"p{index} = MatMul(x, w{index})" for index in range(4)]
    calls += [f"p{4 + index} = MatMul(z, w{index or 0}{'' if index == 0 else 'o'})" for index in range(4)]
    negated = [f"y{index} = Neg(p{index})" for index in range(8)]
    others = {f"w{index}o": normal(8, 6, seed=30 + index) for index in range(1, 4)}
    model = graph(
        "float[B,S,8] x, float[B,S,8] z", outputs(8, "B,S,6"), " ".join(calls + negated), **weights(4), **others
    )
    grouped(model, 8)


def test_a_group_belongs_to_all_its_modules() -> None:
    model = graph("float[B,S,8] x", outputs(4, "B,S,6"), products(4), **weights(4))
    products_ = [node for node in model.graph if node.op_type == "MatMul"]
    for node, path in zip(products_, ["a.to_k", "a.to_v", "b.to_k", "a.to_k"], strict=True):
        node.metadata_props[MODULE_KEY] = path
    rewritten = grouped(model, 4)
    expected = MODULE_SEPARATOR.join(["a.to_k", "a.to_v", "b.to_k"])
    assert module_path(node_of(rewritten, "MatMul")) == expected
    assert module_path(node_of(rewritten, "Split")) == expected


LEFT = {
    "three": (3, "MatMul(x, w{0})", (8, 6)),
    "right operand": (4, "MatMul(w{0}, x)", (8, 8)),
    "scaled": (4, "Gemm<alpha=2.0>(x, w{0})", (8, 6)),
    "scaled bias": (4, "Gemm<beta=2.0>(x, w{0}, b)", (8, 6)),
    "transposed input": (4, "Gemm<transA=1>(x, w{0})", (8, 6)),
    "one number as bias": (4, "Gemm(x, w{0}, n)", (8, 6)),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_products_stay(name: str) -> None:
    count, call, shape = LEFT[name]
    others = {key: value for key, value in {"b": normal(6), "n": normal(1)}.items() if f" {key})" in call}
    used = weights(count, *shape) | others
    grouped(graph("float[8,8] x", outputs(count, f"8,{shape[1]}"), products(count, call), **used), 0)


def test_products_of_activations_are_left() -> None:
    inputs = ", ".join(f"float[8,6] w{index}" for index in range(4))
    grouped(graph(f"float[B,S,8] x, {inputs}", outputs(4, "B,S,6"), products(4)), 0)


def test_projections_of_other_values_are_left() -> None:
    body = " ".join(f"x{index} = Relu(x) z{index} = Mul(x{index}, n{index}) y{index} = MatMul(z{index}, w{index})"
                    for index in range(4))  # fmt: skip
    numbers = {f"n{index}": np.array(index + 1, np.float32) for index in range(4)}
    grouped(graph("float[B,S,8] x", outputs(4, "B,S,6"), body, **weights(4), **numbers), 0)


class TimeProjections(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 6) for _ in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.silu(x)
        return torch.stack([layer(x) for layer in self.layers])


def test_groups_the_export_of_torch() -> None:
    net = TimeProjections()
    model = exported(net, torch.randn(3, 8), dynamic=({0: "B"},))
    rewritten = grouped(model, 5)
    assert operators(rewritten, "Gemm", "MatMul", "Split") == {"Gemm": 1, "MatMul": 0, "Split": 1}
    feeds = feeds_for(model)
    (found,) = run(rewritten, feeds).values()
    assert relative_error(found, net(torch.from_numpy(feeds["x"])).detach().numpy()) < 1e-5
