"""Norms spelled out: layer norms as means, group norms as instance norms of gathered channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.graphs import (
    Array,
    assert_same_function,
    assert_walk_rule_fires,
    assert_walk_rule_refuses,
    copied,
    exported,
    feeds_for,
    graph,
    int64,
    node_of,
    normal,
    operators,
    relative_error,
    run,
    torchscript,
    used,
)

from sdonnx.fusions.fuse_group_norm import InstanceNormToGroupNorm
from sdonnx.fusions.fuse_layer_norm import MeansToLayerNorm
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.edit import required
from sdonnx.graph.match import apply_walk_rules
from sdonnx.graph.passes import tidy

# --- layer norm -------------------------------------------------------------------------------------------------------

EPSILON = 0.01
WEIGHTS: dict[str, Array] = {
    "g": normal(8, seed=1),
    "b": normal(8, seed=2),
    "g3": normal(1, 1, 8, seed=3),
    "row": normal(6, 1, seed=4),
    "matrix": normal(6, 8, seed=5),
    "e": np.array(EPSILON, np.float32),
    "e1": np.full(1, EPSILON, np.float32),
    "es": np.full(8, EPSILON, np.float32),
    "two": np.array(2, np.float32),
    "two_": int64(2),
    "three": np.array(3, np.float32),
    "one": np.array(1, np.float32),
    "last": int64([-1]),
    "second": int64([2]),
    "first": int64([1]),
    "both": int64([1, 2]),
}
CENTRED = "m = ReduceMean(x, last) d = Sub(x, m)"
SQUARE = "q = Pow(d, two)"
VARIANCE = "v = ReduceMean(q, last)"
DEVIATION = "w = Add(v, e) s = Sqrt(w)"
QUOTIENT = "n = Div(d, s)"
AFFINE = "a = Mul(n, g) y = Add(a, b)"
SEQUENCE = "float[B,6,8] x"


def spelled(*steps: str, inputs: str = SEQUENCE, outputs: str = "float[B,6,8] y") -> ir.Model:
    """A graph of these steps."""
    body = " ".join(steps)
    return graph(inputs, outputs, body, **used(body, WEIGHTS, inputs))


def norm_of(model: ir.Model) -> ir.Node:
    return node_of(model, "LayerNormalization")


LAYER_NORMS = {
    "as torch writes it": (CENTRED, SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "a positive axis": (CENTRED.replace("last", "second"), SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "whole exponent": (CENTRED, "q = Pow(d, two_)", VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "square as product": (CENTRED, "q = Mul(d, d)", VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "epsilon first": (CENTRED, SQUARE, VARIANCE, "w = Add(e, v) s = Sqrt(w)", QUOTIENT, AFFINE),
    "epsilon of one element": (CENTRED, SQUARE, VARIANCE, "w = Add(v, e1) s = Sqrt(w)", QUOTIENT, AFFINE),
    "reciprocal": (CENTRED, SQUARE, VARIANCE, DEVIATION, "r = Reciprocal(s) n = Mul(d, r)", AFFINE),
    "reciprocal first": (CENTRED, SQUARE, VARIANCE, DEVIATION, "r = Reciprocal(s) n = Mul(r, d)", AFFINE),
    "inverse as quotient": (CENTRED, SQUARE, VARIANCE, DEVIATION, "r = Div(one, s) n = Mul(d, r)", AFFINE),
    "weights first": (CENTRED, SQUARE, VARIANCE, DEVIATION, QUOTIENT, "a = Mul(g, n) y = Add(b, a)"),
    "gamma (1,1,D)": (CENTRED, SQUARE, VARIANCE, DEVIATION, QUOTIENT, "a = Mul(n, g3) y = Add(a, g3)"),
    "difference computed twice": (
        CENTRED, "d2 = Sub(x, m) q = Mul(d2, d2)", VARIANCE, DEVIATION, QUOTIENT, AFFINE,
    ),
    "no beta": (CENTRED, SQUARE, VARIANCE, DEVIATION, QUOTIENT, "y = Mul(n, g)"),
    "no gamma": (CENTRED, SQUARE, VARIANCE, DEVIATION, QUOTIENT, "y = Add(n, b)"),
    "neither": (CENTRED, SQUARE, VARIANCE, DEVIATION, "y = Div(d, s)"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYER_NORMS)
def test_means_to_layer_norm(name: str) -> None:
    model = spelled(*LAYER_NORMS[name])
    if name == "difference computed twice":
        fused = copied(model)  # equal computations are merged before
        fuse(fused, "cpu")
        assert_same_function(fused, model)
    else:
        fused = assert_walk_rule_fires(model, MeansToLayerNorm)
    assert operators(fused) == {"LayerNormalization": 1}
    assert len(norm_of(fused).inputs) == 3  # a shift of zeros where there was none
    assert norm_of(fused).attributes.get_float("epsilon") == pytest.approx(EPSILON)


@pytest.mark.parametrize(("inputs", "outputs"), [("float[B,8] x", "float[B,8] y"), ("float[8] x", "float[8] y")])
def test_layer_norm_of_any_rank(inputs: str, outputs: str) -> None:
    model = spelled(CENTRED, SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE, inputs=inputs, outputs=outputs)
    assert operators(assert_walk_rule_fires(model, MeansToLayerNorm)) == {"LayerNormalization": 1}


# Nodes after the norm that are not its scale and shift: they stay after it.
BEHIND = {
    "shift, then scale": ("a = Add(n, b) y = Mul(a, g)", SEQUENCE, {"Mul": 1, "Add": 0}),
    "residual": ("a = Mul(n, g) y = Add(a, x)", SEQUENCE, {"Mul": 0, "Add": 1}),
    "scale from outside": ("a = Mul(n, h) y = Add(a, b)", f"{SEQUENCE}, float[8] h", {"Mul": 1, "Add": 1}),
    "scale of each image": ("a = Mul(n, h) y = Add(a, b)", f"{SEQUENCE}, float[B,1,8] h", {"Mul": 1, "Add": 1}),
    "scale of each row": ("a = Mul(n, row) y = Add(a, b)", SEQUENCE, {"Mul": 1, "Add": 1}),
    "scale of each element": ("a = Mul(n, matrix) y = Add(a, b)", SEQUENCE, {"Mul": 1, "Add": 1}),
    "a number": ("a = Mul(n, two) y = Add(a, b)", SEQUENCE, {"Mul": 1, "Add": 1}),
    "its square": ("a = Mul(n, n) y = Add(a, b)", SEQUENCE, {"Mul": 1, "Add": 1}),
    "twice itself": ("a = Mul(n, g) y = Add(a, a)", SEQUENCE, {"Mul": 0, "Add": 1}),
}


@pytest.mark.parametrize("name", BEHIND)
def test_other_nodes_stay_after_the_layer_norm(name: str) -> None:
    behind, inputs, left = BEHIND[name]
    model = spelled(CENTRED, SQUARE, VARIANCE, DEVIATION, QUOTIENT, behind, inputs=inputs)
    rewritten = assert_walk_rule_fires(model, MeansToLayerNorm)
    assert operators(rewritten, "LayerNormalization", *left) == {"LayerNormalization": 1, **left}


def test_affine_part_with_a_batch_of_its_own() -> None:
    """A scale (3,1,8) widens the result: it is no scale of the norm."""
    steps = (CENTRED, SQUARE, VARIANCE, DEVIATION, QUOTIENT, "y = Mul(n, wide)")
    model = graph(
        "float[1,6,8] x", "float[3,6,8] y", " ".join(steps), wide=normal(3, 1, 8), **used(" ".join(steps), WEIGHTS)
    )
    rewritten = assert_walk_rule_fires(model, MeansToLayerNorm)
    assert operators(rewritten) == {"LayerNormalization": 1, "Mul": 1}


# name: (other outputs, nodes after the quotient); values with other readers stay next to the norm.
ELSEWHERE = {
    "quotient": (", float[B,6,8] n", AFFINE, 1),
    "quotient, by a node": (", float[B,6,8] z", f"{AFFINE} z = Neg(n)", 1),
    "scaled": (", float[B,6,8] a", AFFINE, 1),
    "mean": (", float[B,6,1] m", AFFINE, 1),
    "difference": (", float[B,6,8] z", f"{AFFINE} z = Neg(d)", 1),
    "variance": (", float[B,6,1] v", AFFINE, 1),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_parts_of_a_layer_norm_used_elsewhere(name: str) -> None:
    others, behind, times = ELSEWHERE[name]
    outputs = f"float[B,6,8] y{others}"
    model = spelled(CENTRED, SQUARE, VARIANCE, DEVIATION, QUOTIENT, behind, outputs=outputs)
    rewritten = assert_walk_rule_fires(model, MeansToLayerNorm, times)
    assert operators(rewritten, "LayerNormalization") == {"LayerNormalization": 1}


NO_LAYER_NORMS = {
    "mean over another axis": (CENTRED.replace("last", "first"), SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "variance over another axis": (CENTRED, SQUARE, "v = ReduceMean(q, first)", DEVIATION, QUOTIENT, AFFINE),
    "mean over two axes": (CENTRED.replace("last", "both"), SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "mean over all": (CENTRED.replace("(x, last)", "(x)"), SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "sum": (CENTRED, SQUARE, "v = ReduceSum(q, last)", DEVIATION, QUOTIENT, AFFINE),
    "maximum in place of mean": (CENTRED.replace("Mean", "Max"), SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "cube": (CENTRED, "q = Pow(d, three)", VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "square of x": (CENTRED, "q = Pow(x, two)", VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "product with x": (CENTRED, "q = Mul(d, x)", VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "exponent and base exchanged": (CENTRED, "q = Pow(two, d)", VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "mean less x": ("m = ReduceMean(x, last) d = Sub(m, x)", SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "x plus mean": ("m = ReduceMean(x, last) d = Add(x, m)", SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE),
    "quotient of x": (CENTRED, SQUARE, VARIANCE, DEVIATION, "n = Div(x, s)", AFFINE),
    "inverted quotient": (CENTRED, SQUARE, VARIANCE, DEVIATION, "n = Div(s, d)", AFFINE),
    "two over the deviation": (CENTRED, SQUARE, VARIANCE, DEVIATION, "r = Div(two, s) n = Mul(d, r)", AFFINE),
    "product with the deviation": (CENTRED, SQUARE, VARIANCE, DEVIATION, "n = Mul(d, s)", AFFINE),
    "no root": (CENTRED, SQUARE, VARIANCE, "s = Add(v, e)", QUOTIENT, AFFINE),
    "epsilon behind the root": (CENTRED, SQUARE, VARIANCE, "w = Sqrt(v) s = Add(w, e)", QUOTIENT, AFFINE),
    "no epsilon": (CENTRED, SQUARE, VARIANCE, "s = Sqrt(v)", QUOTIENT, AFFINE),
    "epsilon subtracted": (CENTRED, SQUARE, VARIANCE, "w = Sub(v, e) s = Sqrt(w)", QUOTIENT, AFFINE),
    "an epsilon for each element": (CENTRED, SQUARE, VARIANCE, "w = Add(v, es) s = Sqrt(w)", QUOTIENT, AFFINE),
    "RMS norm": (SQUARE.replace("d", "x"), VARIANCE, DEVIATION, "n = Div(x, s)", AFFINE),
}


@pytest.mark.parametrize("name", NO_LAYER_NORMS)
def test_near_misses_of_layer_norm_stay(name: str) -> None:
    assert_walk_rule_refuses(spelled(*NO_LAYER_NORMS[name]), MeansToLayerNorm)


def test_epsilon_from_outside_is_left() -> None:
    model = spelled(CENTRED, SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE, inputs=f"{SEQUENCE}, float[1] e")
    assert_walk_rule_refuses(model, MeansToLayerNorm)


def test_mean_of_another_value_is_left() -> None:
    model = spelled(
        "m = ReduceMean(z, last) d = Sub(x, m)", SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE,
        inputs=f"{SEQUENCE}, float[B,6,8] z",
    )  # fmt: skip
    assert_walk_rule_refuses(model, MeansToLayerNorm)


def test_a_mean_that_drops_its_axis_is_left() -> None:
    steps = (CENTRED.replace("ReduceMean(", "ReduceMean<keepdims=0>("), SQUARE, VARIANCE, DEVIATION, QUOTIENT, AFFINE)
    model = spelled(*steps, inputs="float[8,8] x", outputs="float[8,8] y")
    assert_walk_rule_refuses(model, MeansToLayerNorm)


def test_a_last_axis_of_unknown_size_is_refused() -> None:
    model = spelled(
        CENTRED, SQUARE, VARIANCE, DEVIATION, "y = Div(d, s)", inputs="float[B,S,C] x", outputs="float[B,S,C] y"
    )
    assert_walk_rule_refuses(model, MeansToLayerNorm, "the size of the last axis is not known")


def test_an_epsilon_that_adds_dimensions_keeps_the_function() -> None:
    body = " ".join((CENTRED, SQUARE, VARIANCE, "w = Add(v, deep) s = Sqrt(w)", "y = Div(d, s)"))
    deep = np.full((1, 1, 1, 1), EPSILON, np.float32)
    model = graph(SEQUENCE, "float[1,B,6,8] y", body, deep=deep, **used(CENTRED + SQUARE, WEIGHTS))
    fused = copied(model)
    fuse(fused, "cpu")
    assert_same_function(fused, model)


class Net(torch.nn.Module):
    """A net of one module, its parameters drawn, between operators that nothing fuses with it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(torch.tanh(x)) - x
        return result


class SpelledLayerNorm(torch.nn.Module):
    """As people write it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.b = torch.nn.Parameter(torch.randn(8)), torch.nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deviation = x - x.mean(-1, keepdim=True)
        return self.g * (deviation * torch.rsqrt(deviation.pow(2).mean(-1, keepdim=True) + 1e-3)) + self.b


LAYERS: dict[str, Any] = {
    "affine": lambda: torch.nn.LayerNorm(8, eps=1e-3),
    "not affine": lambda: torch.nn.LayerNorm(8, elementwise_affine=False),
    "no bias": lambda: torch.nn.LayerNorm(8, bias=False),
    "by hand": SpelledLayerNorm,
}


@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize("name", LAYERS)
def test_torchscript_gives_one_layer_norm(name: str, opset: int) -> None:
    net, x = Net(LAYERS[name]()), torch.randn(2, 6, 8)
    model = torchscript(net, x, dynamic=({0: "B", 1: "S"},), opset=opset)
    assert_as_torch(model, net, {"Tanh": 1, "LayerNormalization": 1, "Sub": 1})


def assert_as_torch(model: ir.Model, net: torch.nn.Module, left: dict[str, int], tolerance: float = 1e-5) -> ir.Model:
    """Fuse a copy and compare it with torch on other sizes than it was exported with; return the copy."""
    fused = copied(model)
    fuse(fused, "cpu")
    assert operators(fused) == left
    feeds = feeds_for(model)
    (found,) = run(fused, feeds).values()
    with torch.no_grad():
        expected = net(*map(torch.from_numpy, feeds.values()))
    assert relative_error(found, expected.numpy()) < tolerance
    return fused


@pytest.mark.parametrize("name", LAYERS)
def test_a_sum_goes_into_the_norm_at_any_opset(name: str) -> None:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = LAYERS[name]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.module(torch.tanh(x) + x)
            return result

    for opset in (14, 17):
        model = torchscript(Sum(), torch.randn(2, 6, 8), dynamic=({0: "B", 1: "S"},), opset=opset)
        fused = copied(model)
        fuse(fused, "cpu")
        assert operators(fused) == {"Tanh": 1, "SkipLayerNormalization": 1}
        assert_same_function(fused, model)


def test_a_layer_norm_of_16_bits() -> None:
    net, x = Net(torch.nn.LayerNorm(8)).half(), torch.randn(2, 6, 8).half()
    model = torchscript(net, x, dynamic=({0: "B", 1: "S"},), opset=14)
    fused = copied(model)
    fuse(fused, "cpu")
    assert operators(fused) == {"Tanh": 1, "LayerNormalization": 1, "Sub": 1}
    assert_same_function(fused, model, tolerance=5e-3)


# --- group norm -------------------------------------------------------------------------------------------------------

IMAGE, RESULT = "float[B,8,H,W] x", "float[B,8,H,W] y"
GATHERED = "r = Reshape(x, into) i = InstanceNormalization<epsilon=0.01>(r, s, t)"
BACK = "shape = Shape(x) z = Reshape(i, shape)"
SCALED = "a = Mul(z, g) y = Add(a, b)"
PLAIN: dict[str, Array] = {"s": np.ones(4, np.float32), "t": np.zeros(4, np.float32), "into": int64([0, 4, -1])}
CHANNELS: dict[str, Array] = {"g": normal(8, 1, 1, seed=1), "b": normal(8, 1, 1, seed=2)}
GROUP_SIZES = {"B": 2, "H": 4, "W": 7, "P": 28, "C": 8}


def grouped(*steps: str, inputs: str = IMAGE, outputs: str = RESULT, known: str = "", **weights: Array) -> ir.Model:
    """A graph of these steps, with the plain weights but for those given."""
    body = " ".join(steps)
    return graph(inputs, outputs, body, known, **used(body, PLAIN | CHANNELS | weights, inputs))


def assert_group_norm(model: ir.Model, **left: int) -> ir.Model:
    rewritten = assert_walk_rule_fires(model, InstanceNormToGroupNorm, sizes=GROUP_SIZES)
    node = node_of(rewritten, "GroupNormalization")
    assert node.attributes.get_float("epsilon") == pytest.approx(0.01)
    assert operators(rewritten) == {"GroupNormalization": 1, **left}
    return rewritten


AFFINES: dict[str, tuple[str, dict[str, Any]]] = {
    "(C,1,1)": (SCALED, {}),
    "(1,C,1,1)": (SCALED, {"g": normal(1, 8, 1, 1, seed=1), "b": normal(1, 8, 1, 1, seed=2)}),
    "mixed": (SCALED, {"g": normal(1, 8, 1, 1, seed=1)}),
    "weights first": ("a = Mul(g, z) y = Add(b, a)", {}),
    "no beta": ("y = Mul(z, g)", {}),
    "no gamma": ("y = Add(z, b)", {}),
    "neither": ("", {}),
}


@pytest.mark.parametrize("scaled", [False, True], ids=["plain groups", "scaled groups"])
@pytest.mark.parametrize("name", AFFINES)
def test_instance_norm_to_group_norm(name: str, scaled: bool) -> None:
    behind, weights = AFFINES[name]
    groups: dict[str, Any] = {"s": normal(4, seed=3), "t": normal(4, seed=4)} if scaled else {}
    back = BACK if behind else BACK.replace("z =", "y =")
    rewritten = assert_group_norm(grouped(GATHERED, back, behind, **weights, **groups))
    node = node_of(rewritten, "GroupNormalization")
    assert node.attributes.get_int("num_groups") == 4
    assert [required(value).shape for value in node.inputs[1:]] == [ir.Shape([8]), ir.Shape([8])]


# How the shapes are given: (before the norm, behind it).
COMPUTED_SIZES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "constant": ("r = Reshape(x, into)", "z = Reshape(i, back)", {"back": int64([0, 8, 4, 7])}),
    "one size left open": ("r = Reshape(x, into)", "z = Reshape(i, back)", {"back": int64([-1, 8, 4, 7])}),
    "groups computed": (
        "n = Shape<end=1>(x) c = Concat<axis=0>(n, four, rest) r = Reshape(x, c)", "shape = Shape(x) "
        "z = Reshape(i, shape)", {"four": int64([4]), "rest": int64([-1])},
    ),
    "sizes of groups computed": (
        "n = Shape<end=1>(x) h = Shape<start=2,end=3>(x) w = Shape<start=3>(x) p = Mul(h, w) k = Mul(p, two) "
        "c = Concat<axis=0>(n, four, k) r = Reshape(x, c)",
        "j = Concat<axis=0>(n, eight, h, w) z = Reshape(i, j)",
        {"four": int64([4]), "eight": int64([8]), "two": int64([2])},
    ),
    "groups of more dimensions": (
        "n = Shape<end=1>(x) h = Shape<start=2>(x) c = Concat<axis=0>(n, four, two, h) r = Reshape(x, c)",
        "shape = Shape(x) z = Reshape(i, shape)", {"four": int64([4]), "two": int64([2])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTED_SIZES)
def test_shapes_constant_and_computed(name: str) -> None:
    into, back, sizes = COMPUTED_SIZES[name]
    static = "back" in sizes
    inputs, outputs = (text.replace("H,W", "4,7") if static else text for text in (IMAGE, RESULT))
    norm = "i = InstanceNormalization<epsilon=0.01>(r, s, t)"
    assert_group_norm(grouped(into, norm, back, SCALED, inputs=inputs, outputs=outputs, **sizes))


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_any_number_of_groups(groups: int) -> None:
    weights: dict[str, Any] = {"s": normal(groups, seed=3), "t": normal(groups, seed=4), "into": int64([0, groups, -1])}
    rewritten = assert_group_norm(grouped(GATHERED, BACK, SCALED, **weights))
    assert node_of(rewritten, "GroupNormalization").attributes.get_int("num_groups") == groups


FLAT: dict[str, Any] = {"g": normal(8, 1, seed=1), "b": normal(1, 8, 1, seed=2)}


def test_a_flattened_image() -> None:
    """The norm of a sequence of pixels, as diffusers' attention takes it."""
    back = "shape = Shape(x) z = Reshape(i, shape)"
    model = grouped(GATHERED, back, SCALED, inputs="float[B,8,P] x", outputs="float[B,8,P] y", **FLAT)
    assert_group_norm(model)


def test_an_image_that_is_flattened_on_the_way() -> None:
    model = grouped(GATHERED, "z = Reshape(i, flat)", SCALED, outputs="float[B,8,P] y", flat=int64([0, 8, -1]), **FLAT)
    rewritten = assert_group_norm(model, Reshape=1)
    assert [node.op_type for node in rewritten.graph] == ["GroupNormalization", "Reshape"]


@pytest.mark.parametrize("back", [[0, 0, -1], [0, 0, 0], [2, 8, 28]])
def test_as_many_groups_as_channels_flattened(back: list[int]) -> None:
    """A 0 stands for a size of the norm's result, not of the image."""
    weights: dict[str, Any] = {
        "s": normal(8, seed=3),
        "t": normal(8, seed=4),
        "into": int64([0, 8, -1]),
        "flat": int64(back),
    }
    model = grouped(
        GATHERED, "z = Reshape(i, flat)", SCALED, inputs="float[2,8,4,7] x", outputs="float[2,8,28] y",
        **(FLAT | weights),
    )  # fmt: skip
    assert_walk_rule_fires(model, InstanceNormToGroupNorm)


# Nodes after the norm that are not its scale and shift.
GROUP_BEHIND: dict[str, tuple[str, str, dict[str, Any], dict[str, int]]] = {
    "scale from outside": ("a = Mul(z, o) y = Add(a, b)", ", float[8,1,1] o", {}, {"Mul": 1, "Add": 1}),
    "scale of each image": ("a = Mul(z, o) y = Add(a, b)", ", float[B,8,1,1] o", {}, {"Mul": 1, "Add": 1}),
    "scale of each row": (SCALED, "", {"g": normal(4, 1)}, {"Mul": 1, "Add": 1}),
    "a number": (SCALED, "", {"g": normal()}, {"Mul": 1, "Add": 1}),
    "shift, then scale": ("a = Add(z, b) y = Mul(a, g)", "", {}, {"Mul": 1, "Add": 0}),
    "residual": ("a = Mul(z, g) y = Add(a, x)", "", {}, {"Mul": 0, "Add": 1}),
    "its square": ("a = Mul(z, z) y = Add(a, b)", "", {}, {"Mul": 1, "Add": 1}),
}


@pytest.mark.parametrize("name", GROUP_BEHIND)
def test_other_nodes_stay_after_the_group_norm(name: str) -> None:
    behind, more, weights, left = GROUP_BEHIND[name]
    model = grouped(
        GATHERED, "z = Reshape(i, back)", behind, inputs=f"float[B,8,4,7] x{more}", outputs="float[B,8,4,7] y",
        back=int64([0, 8, 4, 7]), **weights,
    )  # fmt: skip
    rewritten = assert_walk_rule_fires(model, InstanceNormToGroupNorm)
    assert operators(rewritten, "GroupNormalization", *left) == {"GroupNormalization": 1, **left}


@pytest.mark.parametrize(
    ("outputs", "behind"),
    [
        (", float[B,8,H,W] z", ""),
        (", float[B,8,H,W] o", "o = Sigmoid(z)"),
        (", float[B,8,H,W] a", ""),
        (", float[B,4,P] r", ""),
    ],
)
def test_parts_of_a_group_norm_used_elsewhere(outputs: str, behind: str) -> None:
    model = grouped(GATHERED, BACK, SCALED, behind, outputs=f"{RESULT}{outputs}")
    rewritten = assert_walk_rule_fires(model, InstanceNormToGroupNorm, sizes=GROUP_SIZES | {"P": 56})
    assert operators(rewritten, "GroupNormalization") == {"GroupNormalization": 1}


def test_the_result_of_the_instance_norm_used_elsewhere_blocks() -> None:
    model = grouped(GATHERED, BACK, SCALED, outputs=f"{RESULT}, float[B,4,P] i")
    assert_walk_rule_refuses(model, InstanceNormToGroupNorm)


STATIC: dict[str, Any] = {"inputs": "float[2,8,4,7] x", "outputs": "float[2,8,4,7] y", "back": int64([2, 8, 4, 7])}
NOT_GATHERED = "does not group channels"
NO_GROUP_NORMS: dict[str, tuple[dict[str, Any], tuple[str, ...], str | None]] = {
    "no reshapes": (
        {"s": normal(8), "t": normal(8)},
        ("i = InstanceNormalization(x, s, t) z = Mul(i, g) y = Add(z, b)",), None,
    ),
    "no reshape before": (
        {"s": normal(8), "t": normal(8), "outputs": "float[2,8,28] y", "flat": int64([2, 8, 28])},
        ("i = InstanceNormalization(x, s, t) y = Reshape(i, flat)",), None,
    ),
    "no reshape behind": (
        {"outputs": "float[2,4,56] y"}, ("r = Reshape(x, into) y = InstanceNormalization(r, s, t)",), None,
    ),
    "groups that do not divide the channels": (
        {"inputs": "float[2,6,4,7] x", "outputs": "float[2,6,4,7] y", "back": int64([2, 6, 4, 7])},
        (GATHERED, "y = Reshape(i, back)"), NOT_GATHERED,
    ),
    "more groups than channels": (
        {"s": normal(16), "t": normal(16), "into": int64([2, 16, -1])}, (GATHERED, "y = Reshape(i, back)"),
        NOT_GATHERED,
    ),
    "batch gathered too": (
        {"s": normal(4), "t": normal(4), "into": int64([1, 4, -1])}, (GATHERED, "y = Reshape(i, back)"), NOT_GATHERED,
    ),
    "batch split": ({"into": int64([4, 4, -1])}, (GATHERED, "y = Reshape(i, back)"), NOT_GATHERED),
    "other channels behind": (
        {"outputs": "float[2,4,8,7] y", "back": int64([2, 4, 8, 7])}, (GATHERED, "y = Reshape(i, back)"),
        "the reshape back has the shape",
    ),
    "a matrix behind": (
        {"outputs": "float[2,224] y", "back": int64([2, 224])}, (GATHERED, "y = Reshape(i, back)"),
        "the reshape back has the shape",
    ),
    "scale of groups from outside": (
        {"inputs": "float[2,8,4,7] x, float[4] s"}, (GATHERED, "y = Reshape(i, back)"),
        "scale and shift of the groups are not constant",
    ),
    "shift of groups from outside": (
        {"inputs": "float[2,8,4,7] x, float[4] t"}, (GATHERED, "y = Reshape(i, back)"),
        "scale and shift of the groups are not constant",
    ),
    "a matrix": (
        {"inputs": "float[2,8] x", "outputs": "float[2,8] y", "back": int64([2, 8])},
        (GATHERED, "y = Reshape(i, back)"), "the shape of the input is not known",
    ),
    "channels of unknown number": (
        {"inputs": "float[2,C,4,7] x", "outputs": "float[2,C,4,7] y"},
        (GATHERED, "shape = Shape(x) y = Reshape(i, shape)"), NOT_GATHERED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_GROUP_NORMS)
def test_near_misses_of_group_norm_stay(name: str) -> None:
    changes, steps, reason = NO_GROUP_NORMS[name]
    assert_walk_rule_refuses(grouped(*steps, **(STATIC | changes)), InstanceNormToGroupNorm, reason)


def test_norms_whose_nodes_bear_no_names() -> None:
    """Weights are each norm's own."""
    body = (
        f"{GATHERED} z = Reshape(i, back) a = Mul(z, g) m = Add(a, b) r2 = Reshape(m, into) "
        "i2 = InstanceNormalization<epsilon=0.01>(r2, s, t) z2 = Reshape(i2, back) a2 = Mul(z2, g2) y = Add(a2, b2)"
    )
    more: dict[str, Any] = {"g2": normal(8, 1, 1, seed=5), "b2": normal(8, 1, 1, seed=6), "back": STATIC["back"]}
    model = grouped(body, inputs=STATIC["inputs"], outputs=STATIC["outputs"], **more)
    for node in model.graph:
        node.name = ""
    fused = copied(model)
    fuse(fused, "cpu")
    assert operators(fused) == {"GroupNormalization": 2}
    assert_same_function(fused, model)


def test_a_weight_called_like_that_of_the_norm() -> None:
    model = grouped(GATHERED, BACK, SCALED, "o = Mul(other, other)", outputs=f"{RESULT}, float[8] o", other=normal(8))
    model.graph.initializers["other"].name = "norm.bias"
    (node,) = (node for node in model.graph if node.op_type == "InstanceNormalization")
    node.name = "norm"
    model = copied(model)
    rewritten = copied(model)
    fired, _ = apply_walk_rules(rewritten, [InstanceNormToGroupNorm])
    tidy(rewritten)
    assert fired == {"InstanceNormToGroupNorm": 1}
    assert_same_function(rewritten, model, sizes=GROUP_SIZES)


GROUPED_NETS: dict[str, Any] = {
    "affine": lambda: torch.nn.GroupNorm(4, 8, eps=1e-3),
    "not affine": lambda: torch.nn.GroupNorm(4, 8, affine=False),
    "one group": lambda: torch.nn.GroupNorm(1, 8),
}
SHAPES = {"image": ((2, 8, 4, 7), {0: "B", 2: "S", 3: "W"}), "sequence": ((2, 8, 6), {0: "B", 2: "S"})}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize("name", GROUPED_NETS)
def test_torchscript_gives_one_group_norm(name: str, opset: int, shape: str) -> None:
    size, axes = SHAPES[shape]
    net = Net(GROUPED_NETS[name]())
    model = torchscript(net, torch.randn(size), dynamic=(axes,), opset=opset)
    fused = assert_as_torch(model, net, {"Tanh": 1, "GroupNormalization": 1, "Sub": 1})
    epsilon = 1e-3 if name == "affine" else 1e-5
    assert node_of(fused, "GroupNormalization").attributes.get_float("epsilon") == pytest.approx(epsilon)


def test_a_group_for_each_channel_keeps_the_function() -> None:
    """Of a sequence, torch's reshapes gather nothing: an instance norm is as good."""
    for shape, axes in SHAPES.values():
        model = torchscript(Net(torch.nn.GroupNorm(8, 8)), torch.randn(shape), dynamic=(axes,))
        fused = copied(model)
        fuse(fused, "cpu")
        assert sum(operators(fused, "GroupNormalization", "InstanceNormalization").values()) == 1
        assert_same_function(fused, model)


def test_torch_export_gives_one_group_norm() -> None:
    net = Net(torch.nn.GroupNorm(4, 8))
    model = exported(net, torch.randn(2, 8, 4, 7), dynamic=({0: "B", 2: "S", 3: "W"},))
    assert_as_torch(model, net, {"Tanh": 1, "GroupNormalization": 1, "Sub": 1})


def test_a_group_norm_of_16_bits() -> None:
    net = Net(torch.nn.GroupNorm(4, 8)).half()
    model = torchscript(net, torch.randn(2, 8, 4, 7).half(), dynamic=({0: "B", 2: "S", 3: "W"},))
    fused = copied(model)
    fuse(fused, "cpu")
    assert operators(fused) == {"Tanh": 1, "GroupNormalization": 1, "Sub": 1}
    assert_same_function(fused, model, tolerance=5e-3)
