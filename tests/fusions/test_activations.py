"""Spelled-out activations, and halves cut by slices: every form, and near misses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from onnx.reference import ReferenceEvaluator
from support.graphs import (
    Array,
    assert_same_function,
    assert_walk_rule_fires,
    assert_walk_rule_refuses,
    copied,
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

from sdonnx.fusions.fuse_gelu import ErfToGelu
from sdonnx.fusions.fuse_silu import ExponentialToSigmoid, QuotientToSilu, SwishToSilu
from sdonnx.fusions.fuse_split import SizesToEqualSplit, SlicesToSplit
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.match import apply_rules

INPUT, OUTPUT = "float[B,S,8] x", "float[B,S,8] y"
CONSTANTS: dict[str, float] = {
    "half": 0.5, "one": 1.0, "two": 2.0, "root": math.sqrt(2), "inverse": math.sqrt(0.5), "zero": 0.0, "three": 3.0,
    "cubic": 0.044715, "tanh": math.sqrt(2 / math.pi), "quick": 1.702, "root3": math.sqrt(3), "near": 0.7,
    "nearly": 0.5003, "almost": 1.0004, "about": 1.4150,
}  # fmt: skip


def spelled(
    body: str, inputs: str = INPUT, outputs: str = OUTPUT, dtype: Any = np.float32, **weights: Array
) -> ir.Model:
    """A graph of this body, with the constants that it reads."""
    constants = {name: np.array(number, dtype) for name, number in CONSTANTS.items()}
    return graph(inputs, outputs, body, **(used(body, constants) | weights))


# --- gelu -------------------------------------------------------------------------------------------------------------

INSIDE = {
    "quotient": "u = Div(x, root) e = Erf(u)",
    "product": "u = Mul(x, inverse) e = Erf(u)",
    "product, number first": "u = Mul(inverse, x) e = Erf(u)",
}
PLUS_ONE = {"sum": "f = Add(e, one)", "sum, number first": "f = Add(one, e)"}
FACTORS = {
    "(x f) half": "a = Mul(x, f) y = Mul(a, half)",
    "half (x f)": "a = Mul(x, f) y = Mul(half, a)",
    "(f x) half": "a = Mul(f, x) y = Mul(a, half)",
    "(x half) f": "a = Mul(x, half) y = Mul(a, f)",
    "f (half x)": "a = Mul(half, x) y = Mul(f, a)",
    "(half f) x": "a = Mul(half, f) y = Mul(a, x)",
    "x (f half)": "a = Mul(f, half) y = Mul(x, a)",
}


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("plus_one", PLUS_ONE)
@pytest.mark.parametrize("inside", INSIDE)
def test_erf_to_gelu(inside: str, plus_one: str, factors: str) -> None:
    rewritten = assert_walk_rule_fires(spelled(f"{INSIDE[inside]} {PLUS_ONE[plus_one]} {FACTORS[factors]}"), ErfToGelu)
    assert operators(rewritten) == {"Gelu": 1}
    assert node_of(rewritten, "Gelu").attributes.get_string("approximate") == "none"


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1)])
def test_constants_of_one_element(shape: tuple[int, ...]) -> None:
    names = ("root", "one", "half")
    weights: dict[str, Any] = {name: np.full(shape, CONSTANTS[name], np.float32) for name in names}
    model = spelled(f"{INSIDE['quotient']} {PLUS_ONE['sum']} {FACTORS['(x f) half']}", **weights)
    assert operators(assert_walk_rule_fires(model, ErfToGelu)) == {"Gelu": 1}


@pytest.mark.parametrize("inside", INSIDE)
def test_gelu_of_16_bits(inside: str) -> None:
    body = f"{INSIDE[inside]} {PLUS_ONE['sum']} {FACTORS['(x f) half']}"
    model = spelled(body, "float16[B,S,8] x", "float16[B,S,8] y", np.float16)
    assert operators(assert_walk_rule_fires(model, ErfToGelu, tolerance=2e-3)) == {"Gelu": 1}


# A gate as a further factor, as in GEGLU.
GATES = {
    "behind": "a = Mul(x, f) b = Mul(a, half) y = Mul(b, z)",
    "first": "a = Mul(z, x) b = Mul(a, half) y = Mul(b, f)",
    "in between": "a = Mul(x, half) b = Mul(z, a) y = Mul(b, f)",
    "two products": "a = Mul(x, z) b = Mul(f, half) y = Mul(a, b)",
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("gate", ["float[B,S,8] z", "float[8] z", "float[B,1,1] z"])
def test_gelu_with_a_gate(name: str, gate: str) -> None:
    body = f"{INSIDE['quotient']} {PLUS_ONE['sum']} {GATES[name]}"
    rewritten = assert_walk_rule_fires(spelled(body, f"{INPUT}, {gate}"), ErfToGelu)
    assert operators(rewritten) == {"Gelu": 1, "Mul": 1}


@pytest.mark.parametrize("times", [2, 3])
def test_gelu_times_its_own_argument(times: int) -> None:
    """x may be a factor more than once: one of them is gelu's."""
    chain = " ".join(f"a{index + 1} = Mul(a{index}, x)" for index in range(times))
    body = f"{INSIDE['quotient']} f = Add(e, one) a0 = Mul(f, half) {chain} y = Identity(a{times})"
    rewritten = assert_walk_rule_fires(spelled(body), ErfToGelu)
    assert operators(rewritten, "Gelu", "Mul") == {"Gelu": 1, "Mul": times - 1}


def test_gelu_of_a_product() -> None:
    """The argument of the erf is not a factor of the product."""
    body = f"x = Mul(p, q) {INSIDE['quotient']} {PLUS_ONE['sum']} {FACTORS['(x f) half']}"
    rewritten = assert_walk_rule_fires(spelled(body, "float[B,S,8] p, float[B,S,8] q"), ErfToGelu)
    assert operators(rewritten) == {"Mul": 1, "Gelu": 1}


def test_two_gelus_multiplied() -> None:
    def one(x: str) -> str:
        return (
            f"u{x} = Div({x}, root) e{x} = Erf(u{x}) f{x} = Add(e{x}, one) a{x} = Mul({x}, f{x}) g{x} = Mul(a{x}, half)"
        )

    body = f"{one('x')} {one('z')} y = Mul(gx, gz)"
    rewritten = assert_walk_rule_fires(spelled(body, f"{INPUT}, float[B,S,8] z"), ErfToGelu, 2)
    assert operators(rewritten) == {"Gelu": 2, "Mul": 1}


# name: (other output, the nodes that compute it, whether gelu is still found)
ELSEWHERE = {
    "erf": (", float[B,S,8] e", "", 1),
    "1 + erf": (", float[B,S,8] z", "z = Neg(f)", 1),
    "x / root": (", float[B,S,8] u", "", 1),
    "product": (", float[B,S,8] a", "", 0),
    "product, by a node": (", float[B,S,8] z", "z = Neg(a)", 0),
    "gelu": (", float[B,S,8] z", "z = Neg(y)", 1),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_parts_of_gelu_used_elsewhere(name: str) -> None:
    other, more, times = ELSEWHERE[name]
    body = f"{INSIDE['quotient']} {PLUS_ONE['sum']} {FACTORS['(x half) f']} {more}"
    model = spelled(body, outputs=f"{OUTPUT}{other}")
    if times:
        assert_walk_rule_fires(model, ErfToGelu)
    else:
        assert_walk_rule_refuses(model, ErfToGelu)


F1 = "f = Add(e, one)"
PRODUCT = "a = Mul(x, f) y = Mul(a, half)"
NO_GELUS = {
    "another half": f"{INSIDE['quotient']} {F1} a = Mul(x, f) y = Mul(a, near)",
    "no half": f"{INSIDE['quotient']} {F1} y = Mul(x, f)",
    "half as quotient of a half": f"{INSIDE['quotient']} {F1} a = Mul(x, f) y = Div(a, half)",
    "another root": f"u = Div(x, root3) e = Erf(u) {F1} {PRODUCT}",
    "root for its inverse": f"u = Mul(x, root) e = Erf(u) {F1} {PRODUCT}",
    "inverse for the root": f"u = Div(x, inverse) e = Erf(u) {F1} {PRODUCT}",
    "quotient turned round": f"u = Div(root, x) e = Erf(u) {F1} {PRODUCT}",
    "erf of x": f"e = Erf(x) {F1} {PRODUCT}",
    "two in place of one": f"{INSIDE['quotient']} f = Add(e, two) {PRODUCT}",
    "less one": f"{INSIDE['quotient']} f = Sub(e, one) {PRODUCT}",
    "one less erf": f"{INSIDE['quotient']} f = Sub(one, e) {PRODUCT}",
    "tanh of the same": f"u = Div(x, root) e = Tanh(u) {F1} {PRODUCT}",
    "sum of factors": f"{INSIDE['quotient']} {F1} a = Add(x, f) y = Mul(a, half)",
    "only erf": f"{INSIDE['quotient']} a = Mul(x, e) y = Mul(a, half)",
    "Swish with gelu's constant": "u = Mul(x, quick) s = Sigmoid(u) y = Mul(x, s)",
    "tanh approximation": (
        "c = Mul(x, x) d = Mul(c, x) k = Mul(d, cubic) l = Add(x, k) m = Mul(l, tanh) e = Tanh(m) "
        f"{F1} {PRODUCT}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_GELUS)
def test_near_misses_of_gelu_stay(name: str) -> None:
    assert_walk_rule_refuses(spelled(NO_GELUS[name]), ErfToGelu)


def test_gelu_of_another_value_is_left() -> None:
    body = f"u = Div(z, root) e = Erf(u) {F1} {PRODUCT}"
    assert_walk_rule_refuses(spelled(body, f"{INPUT}, float[B,S,8] z"), ErfToGelu)


@pytest.mark.parametrize(
    "body",
    [
        f"{INSIDE['quotient']} {F1} a = Mul(x, f) y = Mul(a, nearly)",
        f"{INSIDE['quotient']} f = Add(e, almost) {PRODUCT}",
        f"u = Div(x, about) e = Erf(u) {F1} {PRODUCT}",
    ],
    ids=["half", "one", "root"],
)
def test_constants_that_are_nearly_those_of_gelu_keep_the_function(body: str) -> None:
    model = spelled(body)
    fused = copied(model)
    fuse(fused, "cpu")
    assert_same_function(fused, model, tolerance=1e-4)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (f"{INSIDE['quotient']} {F1} {PRODUCT}", "half"),
        ("n = Neg(x) e = Exp(n) f = Add(one, e) y = Reciprocal(f)", "one"),
        ("n = Neg(x) e = Exp(n) f = Add(one, e) y = Div(x, f)", "one"),
    ],
    ids=["gelu", "sigmoid", "silu"],
)
def test_constants_that_add_dimensions_keep_the_function(body: str, name: str) -> None:
    deep: dict[str, Any] = {name: np.full((1, 1, 1, 1), CONSTANTS[name], np.float32)}
    model = spelled(body, outputs="float[1,B,S,8] y", **deep)
    fused = copied(model)
    fuse(fused, "cpu")
    assert_same_function(fused, model)


# --- sigmoid and SiLU -------------------------------------------------------------------------------------------------

EXPONENTIAL = "n = Neg(x) e = Exp(n) "
SIGMOIDS = {
    "quotient": "f = Add(one, e) y = Div(one, f)",
    "quotient, one last": "f = Add(e, one) y = Div(one, f)",
    "reciprocal": "f = Add(one, e) y = Reciprocal(f)",
    "reciprocal, one last": "f = Add(e, one) y = Reciprocal(f)",
}


@pytest.mark.parametrize("name", SIGMOIDS)
def test_exponential_to_sigmoid(name: str) -> None:
    model = spelled(EXPONENTIAL + SIGMOIDS[name])
    rewritten = assert_walk_rule_fires(model, ExponentialToSigmoid)
    assert operators(rewritten) == {"Sigmoid": 1}
    feeds = feeds_for(model)
    (found,) = run(rewritten, feeds).values()
    assert relative_error(found, torch.from_numpy(feeds["x"]).sigmoid().numpy()) < 1e-6


@pytest.mark.parametrize("name", SIGMOIDS)
def test_parts_of_a_sigmoid_used_elsewhere(name: str) -> None:
    model = spelled(EXPONENTIAL + SIGMOIDS[name], outputs=f"{OUTPUT}, float[B,S,8] e, float[B,S,8] f")
    rewritten = assert_walk_rule_fires(model, ExponentialToSigmoid)
    assert operators(rewritten, "Sigmoid", "Exp") == {"Sigmoid": 1, "Exp": 1}


NO_SIGMOIDS = {
    "two over": f"{EXPONENTIAL} f = Add(one, e) y = Div(two, f)",
    "two in the sum": f"{EXPONENTIAL} f = Add(two, e) y = Div(one, f)",
    "two in the sum, reciprocal": f"{EXPONENTIAL} f = Add(two, e) y = Reciprocal(f)",
    "no sign": "e = Exp(x) f = Add(one, e) y = Div(one, f)",
    "difference": f"{EXPONENTIAL} f = Sub(one, e) y = Div(one, f)",
    "over one": f"{EXPONENTIAL} f = Add(one, e) y = Div(f, one)",
    "no one": f"{EXPONENTIAL} y = Reciprocal(e)",
    "absolute value": "n = Abs(x) e = Exp(n) f = Add(one, e) y = Div(one, f)",
    "almost one": f"{EXPONENTIAL} f = Add(almost, e) y = Reciprocal(f)",
}


@pytest.mark.parametrize("name", NO_SIGMOIDS)
def test_near_misses_of_sigmoid_stay(name: str) -> None:
    assert_walk_rule_refuses(spelled(NO_SIGMOIDS[name]), ExponentialToSigmoid)


@pytest.mark.parametrize("total", ["f = Add(one, e)", "f = Add(e, one)"])
def test_quotient_to_silu(total: str) -> None:
    model = spelled(f"{EXPONENTIAL} {total} y = Div(x, f)")
    rewritten = assert_walk_rule_fires(model, QuotientToSilu)
    assert operators(rewritten) == {"Sigmoid": 1, "Mul": 1}
    feeds = feeds_for(model)
    (found,) = run(rewritten, feeds).values()
    assert relative_error(found, F.silu(torch.from_numpy(feeds["x"])).numpy()) < 1e-6


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        (f"{EXPONENTIAL} f = Add(one, e) y = Div(z, f)", f"{INPUT}, float[B,S,8] z"),
        (f"{EXPONENTIAL} f = Add(one, e) y = Div(f, x)", INPUT),
        (f"{EXPONENTIAL} f = Add(two, e) y = Div(x, f)", INPUT),
        ("e = Exp(x) f = Add(one, e) y = Div(x, f)", INPUT),
    ],
    ids=["another dividend", "turned round", "two", "no sign"],
)
def test_near_misses_of_silu_stay(body: str, inputs: str) -> None:
    assert_walk_rule_refuses(spelled(body, inputs), QuotientToSilu)


@pytest.mark.parametrize(
    ("attributes", "alpha", "left"),
    [
        ("", 1.0, {"Sigmoid": 1, "Mul": 1}),
        ("<alpha=1.0>", 1.0, {"Sigmoid": 1, "Mul": 1}),
        ("<alpha=1.702>", 1.702, {"Constant": 1, "Mul": 2, "Sigmoid": 1}),
    ],
)
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_swish_to_silu(attributes: str, alpha: float, left: dict[str, int], dtype: str) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["" : 24]> '
        f"g ({dtype}[B,8] x) => ({dtype}[B,8] y) {{ y = Swish{attributes}(x) }}"
    )
    rewritten = ir.from_proto(proto)
    fired, failures = apply_rules(rewritten, [SwishToSilu])
    assert (fired, failures) == (1, [])
    assert operators(rewritten) == left
    x = normal(3, 8).astype(np.float32 if dtype == "float" else np.float16)
    onnx.checker.check_model(ir.to_proto(rewritten))
    found: Any
    (found,) = ReferenceEvaluator(ir.to_proto(rewritten)).run(None, {"x": x})
    wide = torch.from_numpy(x).double()
    assert found.dtype == x.dtype
    assert relative_error(found, (wide * (alpha * wide).sigmoid()).numpy()) < (1e-6 if dtype == "float" else 4e-3)
    assert apply_rules(rewritten, [SwishToSilu])[0] == 0


# --- halves -----------------------------------------------------------------------------------------------------------

WIDE = "float[B,S,16] x"
HALVES = "float[B,S,8] y, float[B,S,8] z"
LAST = 2**63 - 1
# (start, end, axis) of either half.
BOUNDS = {
    "constant": ((0, 8, 2), (8, 16, 2)),
    "up to the end": ((0, 8, 2), (8, LAST, 2)),
    "up to the end of 32 bits": ((0, 8, 2), (8, 2**31 - 1, 2)),
    "a negative axis": ((0, 8, -1), (8, LAST, -1)),
    "axes written in both ways": ((0, 8, 2), (8, 16, -1)),
    "from behind": ((0, -8, 2), (-8, LAST, 2)),
    "from the very beginning": ((-16, 8, 2), (8, 16, 2)),
    "from before the beginning": ((-1000, 8, 2), (8, 1000, 2)),
}


def cut(
    first: tuple[int, ...], second: tuple[int, ...], inputs: str = WIDE, outputs: str = HALVES, body: str | None = None
) -> ir.Model:
    """Two slices of x: start, end, axis and, if given, step."""
    weights: dict[str, Array] = {}
    text: list[str] = []
    for name, bounds in (("y", first), ("z", second)):
        arguments = [f"{name}{index}" for index in range(len(bounds))]
        weights |= {argument: int64([bound]) for argument, bound in zip(arguments, bounds, strict=True)}
        text.append(f"{name} = Slice(x, {', '.join(arguments)})")
    return graph(inputs, outputs, body.format(*text) if body else " ".join(text), **weights)


@pytest.mark.parametrize("name", BOUNDS)
def test_slices_to_split(name: str) -> None:
    rewritten = assert_walk_rule_fires(cut(*BOUNDS[name]), SlicesToSplit)
    assert operators(rewritten) == {"Split": 1}
    node = node_of(rewritten, "Split")
    assert (node.attributes.get_int("axis"), node.attributes.get_int("num_outputs")) == (2, 2)


def test_slices_of_one_step() -> None:
    assert_walk_rule_fires(cut((0, 8, 2, 1), (8, LAST, 2, 1)), SlicesToSplit)


def test_slices_without_axes() -> None:
    model = cut((0, 8), (8, 16), "float[16] x", "float[8] y, float[8] z")
    assert_walk_rule_fires(model, SlicesToSplit)


@pytest.mark.parametrize("axis", [1, -2])
def test_slices_along_another_axis(axis: int) -> None:
    outputs = "float[B,4,3] y, float[B,4,3] z"
    rewritten = assert_walk_rule_fires(cut((0, 4, axis), (4, 8, axis), "float[B,8,3] x", outputs), SlicesToSplit)
    assert node_of(rewritten, "Split").attributes.get_int("axis") == 1


@pytest.mark.parametrize("body", ["{1} {0}", "{1} w = Neg(z) {0}"])
def test_the_second_half_may_come_first(body: str) -> None:
    outputs = f"{HALVES}, float[B,S,8] w" if "w" in body else HALVES
    assert_walk_rule_fires(cut((0, 8, 2), (8, 16, 2), outputs=outputs, body=body), SlicesToSplit)


def test_whole_value_may_have_other_readers() -> None:
    outputs = f"{HALVES}, float[B,S,16] w"
    rewritten = assert_walk_rule_fires(
        cut((0, 8, 2), (8, 16, 2), outputs=outputs, body="{0} {1} w = Neg(x)"), SlicesToSplit
    )
    assert operators(rewritten) == {"Split": 1, "Neg": 1}


def test_a_half_that_is_cut_twice() -> None:
    outputs = f"{HALVES}, float[B,S,8] w"
    model = cut((0, 8, 2), (8, 16, 2), outputs=outputs, body="{0} {1} w = Slice(x, z0, z1, z2)")
    assert operators(assert_walk_rule_fires(model, SlicesToSplit), "Split", "Slice") == {"Split": 1, "Slice": 0}


NOT_HALVES = {
    "overlap": ((0, 9, 2), (7, 16, 2)),
    "gap": ((0, 7, 2), (9, 16, 2)),
    "unequal": ((0, 6, 2), (6, 16, 2)),
    "the first half twice": ((0, 8, 2), (-16, 8, 2)),
    "second half cut short": ((0, 8, 2), (8, 15, 2)),
    "second half cut short from behind": ((0, 8, 2), (8, -1, 2)),
    "different axes": ((0, 8, 2), (3, 6, 1)),
    "a step": ((0, 8, 2, 2), (8, 16, 2, 2)),
    "backwards": ((7, -1000, 2, -1), (15, 7, 2, -1)),
    "a third": ((0, 5, 2), (5, 10, 2)),
    "all": ((0, 16, 2), (16, 32, 2)),
}


@pytest.mark.parametrize("name", NOT_HALVES)
def test_slices_that_are_no_halves_stay(name: str) -> None:
    first, second = NOT_HALVES[name]
    sizes = [len(range(16)[slice(start, end, *step)]) for start, end, _, *step in (first, second)]
    outputs = f"float[B,6,{sizes[0]}] y, float[B,6,{sizes[1]}] z"
    if name == "different axes":
        outputs = "float[B,6,8] y, float[B,3,16] z"
    assert_walk_rule_refuses(cut(first, second, "float[B,6,16] x", outputs), SlicesToSplit)


def test_halves_of_an_odd_size_stay() -> None:
    outputs = "float[B,S,8] y, float[B,S,9] z"
    assert_walk_rule_refuses(cut((0, 8, 2), (8, 17, 2), "float[B,S,17] x", outputs), SlicesToSplit)


def test_single_half_stays() -> None:
    model = graph(WIDE, "float[B,S,8] y", "y = Slice(x, a, b, c)", a=int64([0]), b=int64([8]), c=int64([2]))
    assert_walk_rule_refuses(model, SlicesToSplit)


def test_halves_of_two_values_stay() -> None:
    body = "y = Slice(x, a, b, c) z = Slice(w, b, d, c)"
    bounds = {"a": int64([0]), "b": int64([8]), "c": int64([2]), "d": int64([16])}
    assert_walk_rule_refuses(graph(f"{WIDE}, float[B,S,16] w", HALVES, body, **bounds), SlicesToSplit)


def test_slices_of_several_axes_stay() -> None:
    body = "y = Slice(x, a, b, c) z = Slice(x, d, e, c)"
    bounds = {"a": int64([0, 0]), "b": int64([6, 8]), "c": int64([1, 2]), "d": int64([0, 8]), "e": int64([6, 16])}
    model = graph("float[B,6,16] x", "float[B,6,8] y, float[B,6,8] z", body, **bounds)
    assert_walk_rule_refuses(model, SlicesToSplit)


def test_slices_along_an_axis_of_unknown_size_stay() -> None:
    model = cut((0, 3, 1), (3, LAST, 1), outputs="float[B,3,16] y, float[B,T,16] z")
    assert_walk_rule_refuses(model, SlicesToSplit)


def test_bounds_from_outside_stay() -> None:
    body = "y = Slice(x, a, b, c) z = Slice(x, b, d, c)"
    bounds = {"a": int64([0]), "c": int64([2]), "d": int64([16])}
    model = graph(f"{WIDE}, int64[1] b", "float[B,S,P] y, float[B,S,Q] z", body, **bounds)
    assert_walk_rule_refuses(model, SlicesToSplit)


@pytest.mark.parametrize(
    ("sizes", "outputs"),
    [
        ([8, 8], HALVES),
        ([4, 4, 4, 4], "float[B,S,4] y, float[B,S,4] z, float[B,S,4] v, float[B,S,4] w"),
        ([16], "float[B,S,16] y"),
    ],
)
@pytest.mark.parametrize("axis", [2, -1])
def test_sizes_to_equal_split(sizes: list[int], outputs: str, axis: int) -> None:
    names = ", ".join(word.split()[-1] for word in outputs.split(", "))
    model = graph(WIDE, outputs, f"{names} = Split<axis={axis}>(x, sizes)", sizes=int64(sizes))
    rewritten = assert_walk_rule_fires(model, SizesToEqualSplit)
    node = node_of(rewritten, "Split")
    assert node.attributes.get_int("num_outputs") == len(sizes)
    assert len(node.inputs) == 1


@pytest.mark.parametrize("sizes", [[6, 10], [8, 6, 2]])
def test_a_split_into_unequal_parts_stays(sizes: list[int]) -> None:
    outputs = ", ".join(f"float[B,S,{size}] y{index}" for index, size in enumerate(sizes))
    names = ", ".join(f"y{index}" for index in range(len(sizes)))
    model = graph(WIDE, outputs, f"{names} = Split<axis=2>(x, sizes)", sizes=int64(sizes))
    assert_walk_rule_refuses(model, SizesToEqualSplit)


def test_a_split_by_sizes_from_outside_stays() -> None:
    model = graph(f"{WIDE}, int64[2] sizes", "float[B,S,P] y, float[B,S,Q] z", "y, z = Split<axis=2>(x, sizes)")
    assert_walk_rule_refuses(model, SizesToEqualSplit)


def test_a_split_by_number_is_no_candidate() -> None:
    model = graph(WIDE, HALVES, "y, z = Split<axis=2, num_outputs=2>(x)")
    assert_walk_rule_refuses(model, SizesToEqualSplit)


# --- from torch -------------------------------------------------------------------------------------------------------


class Activation(torch.nn.Module):
    """A function between operators that nothing fuses with it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.function(torch.neg(x)))


def geglu(x: torch.Tensor) -> torch.Tensor:
    value, gate = x.chunk(2, dim=-1)
    return value * F.gelu(gate)


def geglu_by_split(x: torch.Tensor) -> torch.Tensor:
    value, gate = x.split(x.shape[-1] // 2, dim=-1)
    result: torch.Tensor = value * F.gelu(gate)
    return result


def geglu_by_slices(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x[..., :half] * F.gelu(x[..., half:])


SPLIT = {"Split": 1, "Gelu": 1, "Mul": 1}
FUNCTIONS: dict[str, tuple[Any, dict[str, int]]] = {
    "gelu": (F.gelu, {"Gelu": 1}),
    "gelu by hand": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), {"Gelu": 1}),
    "silu": (F.silu, {"Sigmoid": 1, "Mul": 1}),
    "silu by hand": (lambda x: x / (1 + torch.exp(-x)), {"Sigmoid": 1, "Mul": 1}),
    "sigmoid by hand": (lambda x: 1 / (1 + torch.exp(-x)), {"Sigmoid": 1}),
    "geglu": (geglu, SPLIT),
    "geglu by split": (geglu_by_split, SPLIT),
    "geglu by slices": (geglu_by_slices, SPLIT),
}


@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torchscript_gives_the_operators(name: str, opset: int) -> None:
    function, left = FUNCTIONS[name]
    net = Activation(function)
    model = torchscript(net, torch.randn(2, 6, 16), dynamic=({0: "B", 1: "S"},), opset=opset)
    fused = copied(model)
    fuse(fused, "cpu")
    assert operators(fused) == {"Neg": 1, "Tanh": 1, **left}
    feeds = feeds_for(model)
    (found,) = run(fused, feeds).values()
    with torch.no_grad():
        assert relative_error(found, net(torch.from_numpy(feeds["x0"])).numpy()) < 1e-5


@pytest.mark.parametrize("name", ["gelu", "gelu by hand", "silu", "geglu", "geglu by split", "geglu by slices"])
@pytest.mark.parametrize("opset", [14, 17])
def test_torchscript_of_16_bits_gives_the_operators(name: str, opset: int) -> None:
    function, left = FUNCTIONS[name]
    example = torch.randn(2, 6, 16).half()
    model = torchscript(Activation(function), example, dynamic=({0: "B", 1: "S"},), opset=opset)
    fused = copied(model)
    fuse(fused, "cpu")
    assert operators(fused) == {"Neg": 1, "Tanh": 1, **left}
    assert_same_function(fused, model, tolerance=5e-3)


@pytest.mark.parametrize("opset", [14, 17])
def test_the_tanh_approximation_is_kept(opset: int) -> None:
    """It is another function, 5e-4 away."""
    net = Activation(lambda x: F.gelu(x, approximate="tanh"))
    model = torchscript(net, torch.randn(2, 6, 16), dynamic=({0: "B", 1: "S"},), opset=opset)
    fused = copied(model)
    fuse(fused, "cpu")
    assert [node.attributes.get_string("approximate") for node in fused.graph if node.op_type == "Gelu"] in (
        [], ["tanh"],
    )  # fmt: skip
    assert_same_function(fused, model, tolerance=1e-6)
