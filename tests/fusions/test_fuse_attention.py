"""Attention spelled out as matmuls: every form that exporters write, and near misses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
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

from sdonnx.fusions.fuse_attention import EinsumToMatMul, SoftmaxToAttention
from sdonnx.fusions.fusion_table import PROVIDERS, fuse
from sdonnx.graph.edit import input_of, known_dims, required

FACTOR, DIVISOR = np.float32(0.3), np.float32(2.5)
CONSTANTS: dict[str, Array] = {
    "c": np.array(FACTOR),
    "d": np.array(DIVISOR),
    "r": np.full((1, 1), FACTOR),
    "zero": np.array(0, np.float32),
    "one": np.array(1, np.float32),
    "heads": int64([0, 0, 2, 8]),
    "first": int64([-1]),
    "last": int64([-1]),
    "end": int64([2**63 - 1]),
}
ATTENTION = {"MatMul": 0, "Softmax": 0, "Attention": 1}


THREE = ("(B*N,S,H)", "(B,S,H)")  # layouts of three dimensions
AFTER = "p = Softmax<axis=-1>(s) y = MatMul(p, @)"


def four(batch: str, length: str, size: int = 8) -> str:
    return f"float[{batch},2,{length},{size}]"


FOUR = f"{four('B', 'S')} q, {four('B', 'L')} k, {four('B', 'L')} v"


# Layouts of heads: the operands, the result and the nodes that split an operand into heads.
LAYOUTS = {
    "(B,N,S,H)": (FOUR, "float[B,2,S,8] y", ""),
    "(B,S,N*H)": (
        "float[B,S,16] q, float[B,L,16] k, float[B,L,16] v", "float[B,2,S,8] y",
        "*_ = Reshape(@, heads) * = Transpose<perm=[0,2,1,3]>(*_)",
    ),
    "(B*N,S,H)": (
        FOUR, "float[P,S,8] y",
        "*_s = Shape<start=2>(@) *_f = Concat<axis=0>(first, *_s) * = Reshape(@, *_f)",
    ),
    "(B,S,H)": ("float[B,S,8] q, float[B,L,8] k, float[B,L,8] v", "float[B,S,8] y", ""),
}  # fmt: skip

# Places of the scale: nodes on q and k before and after the split, on k transposed, and on the scores.
SCALES: dict[str, tuple[dict[str, str], float]] = {
    "nowhere": ({}, 1.0),
    "on the scores": ({"s": "Mul(@, c)"}, 0.3),
    "on the scores, number first": ({"s": "Mul(c, @)"}, 0.3),
    "on the scores as quotient": ({"s": "Div(@, d)"}, 0.4),
    "as a tensor of one element": ({"s": "Mul(@, r)"}, 0.3),
    "on q behind the split": ({"q1": "Mul(@, c)"}, 0.3),
    "on q before the split": ({"q0": "Mul(@, c)"}, 0.3),
    "on q as quotient": ({"q0": "Div(@, d)"}, 0.4),
    "on k before the split": ({"k0": "Mul(c, @)"}, 0.3),
    "on k behind the split": ({"k1": "Div(@, d)"}, 0.4),
    "on k transposed": ({"k2": "Mul(@, c)"}, 0.3),
    "on both": ({"q1": "Mul(@, c)", "k2": "Mul(@, c)"}, 0.09),
    "on both before the split": ({"q0": "Mul(@, c)", "k0": "Mul(@, c)"}, 0.09),
    "everywhere": ({"q0": "Mul(@, c)", "q1": "Div(@, d)", "k0": "Mul(c, @)", "k2": "Mul(@, d)", "s": "Div(@, d)"},
                   0.09 / 2.5),
}  # fmt: skip


def spelled(layout: str, after: str, made: Mapping[str, str]) -> str:
    """Return the attention as text; `made` holds the nodes inserted at each place, where @ is the value there.

    The scores are called s; in the nodes `after` the softmax, @ is v.
    """
    steps = []

    def step(place: str, source: str) -> str:
        if place not in made:
            return source
        steps.append(f"{place} = {made[place].replace('@', source)}")
        return place

    def split(operand: str) -> str:
        source = step(f"{operand}0", operand)
        if not LAYOUTS[layout][2]:
            return source
        steps.append(LAYOUTS[layout][2].replace("@", source).replace("*", f"{operand}_h"))
        return f"{operand}_h"

    q, k, v = (step(f"{operand}1", split(operand)) for operand in "qkv")
    perm = "[0,2,1]" if layout in THREE else "[0,1,3,2]"
    steps.append(f"kt = Transpose<perm={perm}>({k})")
    steps.append(f"{'s_' if 's' in made else 's'} = MatMul({q}, {step('k2', 'kt')})")
    step("s", "s_")
    return " ".join([*steps, after.replace("@", v)])


def attention(
    layout: str = "(B,N,S,H)", inputs: str = "", outputs: str = "", after: str = AFTER, **made: str
) -> ir.Model:
    """An attention in this layout, with more inputs and outputs if given."""
    own, result, _ = LAYOUTS[layout]
    text = spelled(layout, after, made)
    return graph(f"{own}{inputs}", f"{result}{outputs}", text, **used(text, CONSTANTS))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_with_every_scale(layout: str, scale: str) -> None:
    made, expected = SCALES[scale]
    rewritten = assert_walk_rule_fires(attention(layout, **made), SoftmaxToAttention)
    assert operators(rewritten, *ATTENTION) == ATTENTION
    assert operators(rewritten, "Mul", "Div") == {"Mul": 0, "Div": 0}
    node = node_of(rewritten, "Attention")
    assert node.attributes.get_float("scale") == pytest.approx(expected, rel=1e-6)
    assert [len(known_dims(required(value))) for value in node.inputs] == [4, 4, 4]


# The scale as graphs compute it: from the last size of q.
SIZE_OF_HEADS = {
    "Gather": "sh = Shape(q) n = Gather(sh, last) f = Cast<to=1>(n) g = Sqrt(f)",
    "Slice": "sh = Shape(q) n = Slice(sh, last, end) f = Cast<to=1>(n) g = Sqrt(f)",
    "opset 15": "n = Shape<start=3>(q) f = Cast<to=1>(n) g = Sqrt(f)",
}
COMPUTED = {
    "quotient of scores": ("", "MatMul(q, kt)", "Div(s_, g)"),
    "scores times inverse": ("h = Div(one, g)", "MatMul(q, kt)", "Mul(s_, h)"),
    "scores times reciprocal": ("h = Reciprocal(g)", "MatMul(q, kt)", "Mul(h, s_)"),
    "q": ("qs = Div(q, g)", "MatMul(qs, kt)", "Identity(s_)"),
    "root of it twice": (
        "h = Div(one, g) r1 = Sqrt(h) qs = Mul(q, r1) r2 = Sqrt(h) ks = Mul(kt, r2)", "MatMul(qs, ks)", "Identity(s_)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZE_OF_HEADS)
@pytest.mark.parametrize("name", COMPUTED)
def test_the_scale_computed_from_a_shape(name: str, size: str) -> None:
    before, product, scores = COMPUTED[name]
    body = (
        f"{SIZE_OF_HEADS[size]} kt = Transpose<perm=[0,1,3,2]>(k) {before} s_ = {product} s = {scores} p = Softmax(s) "
        "y = MatMul(p, v)"
    )
    model = graph(FOUR, "float[B,2,S,8] y", body, **used(body, CONSTANTS))
    fused = copied(model)
    fuse(fused, "cpu")
    assert operators(fused) == {"Attention": 1}
    assert node_of(fused, "Attention").attributes.get_float("scale") == pytest.approx(8**-0.5)
    assert_same_function(fused, model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_softmax_over_a_positive_axis(layout: str) -> None:
    axis = 2 if layout in THREE else 3
    after = f"p = Softmax<axis={axis}>(s) y = MatMul(p, @)"
    assert_walk_rule_fires(attention(layout, after=after), SoftmaxToAttention)


@pytest.mark.parametrize(
    ("inputs", "perm"),
    [
        ("float[B,L,2,8] k", "[0,2,3,1]"),  # split and transposed at once
        ("float[B,2,L,8] k", "[0,1,3,2]"),
        ("float[B,L,8,2] k", "[0,3,2,1]"),
        ("float[8,L,2,B] k", "[3,2,0,1]"),
    ],
)
def test_k_transposed_at_once(inputs: str, perm: str) -> None:
    body = f"kt = Transpose<perm={perm}>(k) s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, v)"
    model = graph(f"{four('B', 'S')} q, {inputs}, {four('B', 'L')} v", "float[B,2,S,8] y", body)
    rewritten = assert_walk_rule_fires(model, SoftmaxToAttention)
    found = operators(rewritten, "Attention", "Transpose")
    assert found == {"Attention": 1, "Transpose": 0 if perm == "[0,1,3,2]" else 1}


def test_k_that_comes_transposed() -> None:
    body = "s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, v)"
    model = graph("float[B,2,S,8] q, float[B,2,8,L] kt, float[B,2,L,8] v", "float[B,2,S,8] y", body)
    rewritten = assert_walk_rule_fires(model, SoftmaxToAttention)
    assert operators(rewritten) == {"Transpose": 1, "Attention": 1}


def test_heads_of_v_may_have_another_size() -> None:
    body = "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, v)"
    model = graph(f"{four('B', 'S')} q, {four('B', 'L')} k, {four('B', 'L', 5)} v", "float[B,2,S,5] y", body)
    assert_walk_rule_fires(model, SoftmaxToAttention)


def test_one_value_as_q_k_and_v() -> None:
    body = "t = Transpose<perm=[0,1,3,2]>(x) s = MatMul(x, t) p = Softmax(s) y = MatMul(p, x)"
    assert_walk_rule_fires(graph("float[B,2,S,8] x", "float[B,2,S,8] y", body), SoftmaxToAttention)


# --- masks ------------------------------------------------------------------------------------------------------------

# name: (layout, inputs, nodes on the scores)
MASKS = {
    "(S,L)": ("(B,N,S,H)", ", float[S,L] m", "Add(@, m)"),
    "(1,S,L)": ("(B,N,S,H)", ", float[1,S,L] m", "Add(@, m)"),
    "(1,1,S,L)": ("(B,N,S,H)", ", float[1,1,S,L] m", "Add(@, m)"),
    "(B,1,S,L)": ("(B,N,S,H)", ", float[B,1,S,L] m", "Add(m, @)"),
    "(1,N,S,L), as T5's": ("(B,N,S,H)", ", float[1,2,S,L] m", "Add(@, m)"),
    "(B,N,S,L)": ("(B,N,S,H)", ", float[B,2,S,L] m", "Add(@, m)"),
    "scaled first": ("(B,N,S,H)", ", float[B,1,S,L] m", "Mul(@, c) s1 = Add(s, m)"),
    "folded, (S,L)": ("(B*N,S,H)", ", float[S,L] m", "Add(@, m)"),
    "folded, (1,S,L)": ("(B*N,S,H)", ", float[1,S,L] m", "Add(@, m)"),
    "one head, (S,L)": ("(B,S,H)", ", float[S,L] m", "Add(m, @)"),
    "two": ("(B,N,S,H)", ", float[1,2,S,L] m, float[B,1,1,L] n", "Add(@, m) s1 = Add(s, n)"),
    "two, the larger last": ("(B,N,S,H)", ", float[B,1,S,L] m, float[B,2,S,L] n", "Add(m, @) s1 = Add(n, s)"),
    "three": (
        "(B,N,S,H)", ", float[S,L] m, float[B,1,1,L] n, float[1,2,S,L] o",
        "Mul(@, c) s0 = Add(s, m) s00 = Add(n, s0) s1 = Add(s00, o)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_added_masks(name: str) -> None:
    layout, inputs, made = MASKS[name]
    after = f"p = Softmax({'s1' if 's1' in made else 's'}) y = MatMul(p, @)"
    model = attention(layout, inputs, s=made, after=after)
    rewritten = assert_walk_rule_fires(model, SoftmaxToAttention)
    assert operators(rewritten, *ATTENTION) == ATTENTION
    assert len(node_of(rewritten, "Attention").inputs) == 4
    assert operators(rewritten, "Add") == {"Add": inputs.count("float") - 1}


PADDING = {
    "(1,L)": ("(B,N,S,H)", ", float[1,L] m", "Add(@, m)"),
    "(1,1,L)": ("(B,N,S,H)", ", float[1,1,L] m", "Add(@, m)"),
    "(B,1,1,L)": ("(B,N,S,H)", ", float[B,1,1,L] m", "Add(@, m)"),
    "(B,N,1,L)": ("(B,N,S,H)", ", float[B,2,1,L] m", "Add(@, m)"),
    "folded, (1,L)": ("(B*N,S,H)", ", float[1,L] m", "Add(@, m)"),
    "folded, (1,1,L)": ("(B*N,S,H)", ", float[1,1,L] m", "Add(@, m)"),
    "one head, (1,L)": ("(B,S,H)", ", float[1,L] m", "Add(@, m)"),
}


@pytest.mark.parametrize("name", PADDING)
def test_masks_for_all_positions(name: str) -> None:
    """As they come from a tokenizer's attention mask."""
    layout, inputs, made = PADDING[name]
    rewritten = assert_walk_rule_fires(attention(layout, inputs, s=made), SoftmaxToAttention)
    assert operators(rewritten, *ATTENTION) == ATTENTION


def test_a_mask_that_is_itself_a_product() -> None:
    """T5 looks its bias up; a product is no less a mask."""
    made = "Add(@, m)"
    model = attention(inputs=", float[S,3] a, float[3,L] b", s=made, q0="Identity(@) m = MatMul(a, b)")
    rewritten = assert_walk_rule_fires(model, SoftmaxToAttention)
    assert operators(rewritten, "Attention", "MatMul") == {"Attention": 1, "MatMul": 1}


UNFOLDED = (
    "fs = Shape(s) u4 = Constant<value_ints=[-1,2]>() us = Shape<start=1>(s) ut = Concat<axis=0>(u4, us) "
    "u = Reshape(s, ut) a = Add(u, m) g = Reshape(a, fs) p = Softmax(g) y = MatMul(p, @)"
)


@pytest.mark.parametrize("scale", [{}, {"s": "Mul(@, c)"}, {"q0": "Mul(@, c)"}])
@pytest.mark.parametrize("mask", ["B,1,S,L", "1,1,S,L", "1,2,S,L", "B,2,S,L"])
def test_scores_unfolded_for_the_mask_and_folded_again(mask: str, scale: dict[str, str]) -> None:
    """As transformers' CLIP did."""
    model = attention("(B*N,S,H)", f", float[{mask}] m", after=UNFOLDED, **scale)
    rewritten = assert_walk_rule_fires(model, SoftmaxToAttention)
    assert operators(rewritten, *ATTENTION) == ATTENTION
    assert input_of(node_of(rewritten, "Attention"), 3).name == "m"


def test_nan_guard_without_mask() -> None:
    """torch's exporter guards the softmax wherever it may."""
    model = attention(after="p = Softmax(s) n = IsNaN(p) w = Where(n, zero, p) y = MatMul(w, @)")
    rewritten = assert_walk_rule_fires(model, SoftmaxToAttention)
    assert operators(rewritten, "Attention", "IsNaN", "Where") == {"Attention": 1, "IsNaN": 0, "Where": 0}


GUARDED = "p = Softmax(s) n = IsNaN(p) w = Where(n, zero, p) y = MatMul(w, v)"
SQUARE = "float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, int64[B,S] ids"


def guarded(mask: str, *, after: str = GUARDED, more: str = "") -> ir.Model:
    body = (
        "i = Shape<start=1,end=2>(ids) ii = Concat<axis=0>(i, i) kt = Transpose<perm=[0,1,3,2]>(k) "
        f"low = ConstantOfShape<value=float[1]{{-inf}}>(ii) ones = ConstantOfShape<value=float[1]{{1}}>(ii) {mask} "
        f"s_ = MatMul(q, kt) s = Add(s_, m) {after}"
    )
    numbers = {"one": int64(1), "zero": np.array(0, np.float32), "half": np.array(0.5, np.float32)}
    return graph(f"{SQUARE}{more}", "float[B,2,S,8] y", body, **used(body, numbers))


def test_nan_guard_with_a_causal_mask() -> None:
    """Each position sees itself, so no row is masked altogether."""
    rewritten = assert_walk_rule_fires(guarded("m = Trilu<upper=1>(low, one)"), SoftmaxToAttention)
    assert operators(rewritten, "Attention", "IsNaN", "Where") == {"Attention": 1, "IsNaN": 0, "Where": 0}


ALTOGETHER = "rows without any key give zeros"


@pytest.mark.parametrize("mask", ["m = Identity(low)", "m = Trilu<upper=1>(low)", "m = Trilu<upper=0>(low)"])
def test_nan_guard_with_a_mask_that_may_hide_a_whole_row(mask: str) -> None:
    assert_walk_rule_refuses(guarded(mask), SoftmaxToAttention, ALTOGETHER)


def test_nan_guard_with_a_mask_from_outside() -> None:
    assert_walk_rule_refuses(guarded("", more=", float[B,1,S,S] m"), SoftmaxToAttention, ALTOGETHER)


def test_nan_guard_with_a_causal_mask_and_another() -> None:
    model = guarded("t = Trilu<upper=1>(low, one) m = Add(t, e)", more=", float[B,1,1,S] e")
    assert_walk_rule_refuses(model, SoftmaxToAttention, ALTOGETHER)


@pytest.mark.parametrize(
    "guard",
    [
        "n = IsNaN(p) w = Where(n, half, p)",
        "n = IsNaN(s) w = Where(n, zero, p)",
        "n = IsInf(p) w = Where(n, zero, p)",
        "n = IsNaN(p) w = Where(n, p, zero)",
    ],
)
def test_other_guards_stay(guard: str) -> None:
    after = f"p = Softmax(s) {guard} y = MatMul(w, v)"
    assert_walk_rule_refuses(guarded("m = Trilu<upper=1>(low, one)", after=after), SoftmaxToAttention)


# --- types ------------------------------------------------------------------------------------------------------------

HALVES = "float16[B,2,S,8] q, float16[B,2,L,8] k, float16[B,2,L,8] v"
CASTS = {
    "around the softmax": "s = Mul(s_, c) f = Cast<to=1>(s) p_ = Softmax(f) p = Cast<to=10>(p_) y = MatMul(p, v)",
    "before the scale": "s = Cast<to=1>(s_) f = Mul(s, w) p_ = Softmax(f) p = Cast<to=10>(p_) y = MatMul(p, v)",
    "back before the softmax": (
        "s = Cast<to=1>(s_) f = Mul(s, w) g = Cast<to=10>(f) p = Softmax(g) y = MatMul(p, v)"
    ),
    "with a mask of 16 bits": (
        "s = Mul(s_, c) a = Add(s, m) f = Cast<to=1>(a) p_ = Softmax(f) p = Cast<to=10>(p_) y = MatMul(p, v)"
    ),
    "with a mask of 32 bits": (
        "s = Cast<to=1>(s_) a = Add(s, n) p_ = Softmax(a) p = Cast<to=10>(p_) y = MatMul(p, v)"
    ),
}  # fmt: skip


def halves(after: str, before: str = "kt = Transpose<perm=[0,1,3,2]>(k) s_ = MatMul(q, kt)") -> ir.Model:
    body = f"{before} {after}"
    numbers: dict[str, Array] = {"c": np.array(0.25, np.float16), "w": np.array(0.25, np.float32)}
    masks = {"m": ", float16[B,1,S,L] m", "n": ", float[1,2,S,L] n"}
    given = "".join(masks[name] for name in masks if re.search(rf"\b{name}\b", body))
    return graph(HALVES + given, "float16[B,2,S,8] y", body, **used(body, numbers))


@pytest.mark.parametrize("name", CASTS)
def test_casts_around_the_softmax(name: str) -> None:
    """The kernels compute the softmax in 32 bits whatever the type."""
    rewritten = assert_walk_rule_fires(halves(CASTS[name]), SoftmaxToAttention, tolerance=4e-3)
    assert operators(rewritten, *ATTENTION) == ATTENTION


def test_masks_of_both_types() -> None:
    after = "t = Add(s_, m) s = Cast<to=1>(t) a = Add(s, n) p_ = Softmax(a) p = Cast<to=10>(p_) y = MatMul(p, v)"
    model = halves(after)
    fused = copied(model)
    fuse(fused, "cpu")
    assert_same_function(fused, model, tolerance=4e-3)


def test_the_product_with_v_in_32_bits() -> None:
    model = halves("f = Cast<to=1>(s_) p = Softmax(f) v_ = Cast<to=1>(v) y_ = MatMul(p, v_) y = Cast<to=10>(y_)")
    fused = copied(model)
    fuse(fused, "cpu")
    assert_same_function(fused, model, tolerance=4e-3)


def test_scores_computed_in_32_bits() -> None:
    """upcast_attention, as SD2.1 has it: q and k in 32 bits, the probabilities cast back for v."""
    before = "qw = Cast<to=1>(q) kw = Cast<to=1>(k) kt = Transpose<perm=[0,1,3,2]>(kw) s_ = MatMul(qw, kt)"
    model = halves("s = Mul(s_, w) p_ = Softmax(s) p = Cast<to=10>(p_) y = MatMul(p, v)", before)
    fused = copied(model)
    fuse(fused, "cpu")
    assert_same_function(fused, model, tolerance=4e-3)
    assert operators(fused, "Softmax", "Attention") == {"Softmax": 0, "Attention": 1}


# --- used elsewhere ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["s", "p"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_probabilities_used_elsewhere(layout: str, value: str) -> None:
    shape = {"(B*N,S,H)": "P,S,L", "(B,S,H)": "B,S,L"}.get(layout, "B,2,S,L")
    model = attention(layout, outputs=f", float[{shape}] z", s="Mul(@, c)", after=f"{AFTER} z = Neg({value})")
    before = copied(model)
    rewritten = copied(model)
    fuse(rewritten, "cpu")
    assert_same_function(rewritten, before)
    assert operators(rewritten, "Softmax")["Softmax"] == (1 if value == "p" else 0)


@pytest.mark.parametrize("value", ["s", "p"])
def test_scores_and_probabilities_as_outputs(value: str) -> None:
    model = attention(outputs=f", float[B,2,S,L] {value}", s="Mul(@, c)")
    once = copied(model)
    fuse(once, "cpu")
    assert_same_function(once, model)


def test_scaled_operands_used_elsewhere() -> None:
    outputs = ", float[B,2,S,8] q1, float[B,2,8,L] k2"
    model = attention(outputs=outputs, q1="Mul(@, c)", k2="Mul(@, c)")
    rewritten = assert_walk_rule_fires(model, SoftmaxToAttention)
    assert operators(rewritten, "Mul", "Attention") == {"Mul": 2, "Attention": 1}


# --- near misses ------------------------------------------------------------------------------------------------------

SAME = "float[2,2,6,6] q, float[2,2,6,6] k, float[2,2,6,6] v"
TWO_AXES = "kt = Transpose<perm=[1,0]>(k) s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, v)"
KT = "kt = Transpose<perm=[0,1,3,2]>(k) "
S = f"{KT} s = MatMul(q, kt) "
END = " p = Softmax(s1) y = MatMul(p, v)"
NO_PRODUCT = "the scores are not a matmul"
LAST_AXIS = "the softmax is not known to be over the last axis"

# name: (inputs, output, body, reason)
LEFT = {
    "another axis": (FOUR, "float[B,2,S,8] y", f"{S} p = Softmax<axis=2>(s) y = MatMul(p, v)", LAST_AXIS),
    "the axis of heads": (FOUR, "float[B,2,S,8] y", f"{S} p = Softmax<axis=1>(s) y = MatMul(p, v)", LAST_AXIS),
    "no softmax": (FOUR, "float[B,2,S,8] y", f"{S} p = Sigmoid(s) y = MatMul(p, v)", None),
    "logarithm": (FOUR, "float[B,2,S,8] y", f"{S} p = LogSoftmax(s) y = MatMul(p, v)", None),
    "probabilities on the right": (SAME, "float[2,2,6,6] y", f"{S} p = Softmax(s) y = MatMul(v, p)", None),
    "probabilities scaled": (
        FOUR, "float[B,2,S,8] y", f"{S} p = Softmax(s) p1 = Mul(p, c) y = MatMul(p1, v)", None,
    ),
    "matrices without batch": ("float[S,8] q, float[L,8] k, float[L,8] v", "float[S,8] y", TWO_AXES,
                               "do not all have 3 or 4 dimensions"),
    "five dimensions": (
        "float[B,2,3,S,8] q, float[B,2,3,L,8] k, float[B,2,3,L,8] v", "float[B,2,3,S,8] y",
        "kt = Transpose<perm=[0,1,2,4,3]>(k) s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, v)",
        "do not all have 3 or 4 dimensions",
    ),
    "k without heads": (
        "float[B,2,S,8] q, float[L,8] k, float[B,2,L,8] v", "float[B,2,S,8] y",
        "kt = Transpose<perm=[1,0]>(k) s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, v)",
        "do not all have 3 or 4 dimensions",
    ),
    "scores from outside": ("float[B,2,S,L] s, float[B,2,L,8] v", "float[B,2,S,8] y",
                            "p = Softmax(s) y = MatMul(p, v)", NO_PRODUCT),
    "sum scaled": (FOUR + ", float[S,L] m", "float[B,2,S,8] y", f"{S} a = Add(s, m) s1 = Mul(a, c) {END}", NO_PRODUCT),
    "mask subtracted": (FOUR + ", float[S,L] m", "float[B,2,S,8] y", f"{S} s1 = Sub(s, m) {END}", NO_PRODUCT),
    "mask multiplied": (FOUR + ", float[S,L] m", "float[B,2,S,8] y", f"{S} s1 = Mul(s, m) {END}", NO_PRODUCT),
    "number divided by scores": (FOUR, "float[B,2,S,8] y", f"{S} s1 = Div(c, s) {END}", NO_PRODUCT),
    "scores clipped": (FOUR, "float[B,2,S,8] y", f"{S} s1 = Tanh(s) {END}", NO_PRODUCT),
    "scores chosen": (FOUR + ", bool[S,L] m", "float[B,2,S,8] y", f"{S} s1 = Where(m, s, c) {END}", NO_PRODUCT),
    "scale of each head": (FOUR + ", float[2,1,1] m", "float[B,2,S,8] y", f"{S} s1 = Mul(s, m) {END}", NO_PRODUCT),
    "scores multiplied by zero": (FOUR, "float[B,2,S,8] y", f"{S} s1 = Mul(s, zero) {END}", NO_PRODUCT),
    "scores rearranged": (
        "float[2,2,6,8] q, float[2,2,6,8] k, float[2,2,6,8] v", "float[2,2,6,8] y",
        f"{S} s1 = Transpose<perm=[1,0,2,3]>(s) {END}", NO_PRODUCT,
    ),
    "scores reshaped": (
        "float[2,2,6,8] q, float[2,2,6,8] k, float[2,2,3,8] v", "float[2,2,12,8] y",
        f"{S} s1 = Reshape(s, other) {END}", NO_PRODUCT,
    ),
    "mask folded into the batch": (
        "float[P,S,8] q, float[P,L,8] k, float[P,L,8] v, float[P,S,L] m", "float[P,S,8] y",
        f"{S.replace('[0,1,3,2]', '[0,2,1]')} s1 = Add(s, m) {END}", "the mask is folded with the heads into the batch",
    ),
    "mask of five dimensions": (
        FOUR + ", float[1,1,1,S,L] m", "float[1,B,2,S,8] y", f"{S} s1 = Add(s, m) {END}", NO_PRODUCT,
    ),
    "mask that widens the batch": (
        "float[1,2,S,8] q, float[1,2,L,8] k, float[1,2,L,8] v, float[B,1,S,L] m", "float[B,2,S,8] y",
        f"{S} s1 = Add(s, m) {END}", NO_PRODUCT,
    ),
    "mask that adds heads": (
        "float[B,1,S,8] q, float[B,1,L,8] k, float[B,1,L,8] v, float[1,2,S,L] m", "float[B,2,S,8] y",
        f"{S} s1 = Add(s, m) {END}", NO_PRODUCT,
    ),
    "only masks": ("float[B,2,S,L] m, float[B,2,S,L] n, float[B,2,L,8] v", "float[B,2,S,8] y",
                    f"s1 = Add(m, n) {END}", NO_PRODUCT),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_near_misses_of_attention_stay(name: str) -> None:
    inputs, outputs, body, reason = LEFT[name]
    weights = CONSTANTS | {"other": int64([2, 2, 12, 3])}
    model = graph(inputs, outputs, body, **used(body, weights))
    assert_walk_rule_refuses(model, SoftmaxToAttention, reason)


# Operands that MatMul accepts and Attention does not, or handles differently. The graph may stay or change otherwise.
BROADCAST = {
    "k and v for all images": ("B,2,S,8", "1,2,L,8", "1,2,L,8", "B,2,S,8"),
    "q for all images": ("1,2,S,8", "B,2,L,8", "B,2,L,8", "B,2,S,8"),
    "v for all images": ("B,2,S,8", "B,2,L,8", "1,2,L,8", "B,2,S,8"),
    "one k and v for all heads": ("B,2,S,8", "B,1,L,8", "B,1,L,8", "B,2,S,8"),
    "one v for all heads": ("B,2,S,8", "B,2,L,8", "B,1,L,8", "B,2,S,8"),
    "one q for all heads": ("B,1,S,8", "B,2,L,8", "B,2,L,8", "B,2,S,8"),
    "no heads, k and v for all images": ("B,S,8", "1,L,8", "1,L,8", "B,S,8"),
    "no heads, q for all images": ("1,S,8", "B,L,8", "B,L,8", "B,S,8"),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_operands_that_are_broadcast_keep_the_function(name: str) -> None:
    q, k, v, y = BROADCAST[name]
    perm = "[0,1,3,2]" if q.count(",") == 3 else "[0,2,1]"
    body = f"kt = Transpose<perm={perm}>(k) s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, v)"
    model = graph(f"float[{q}] q, float[{k}] k, float[{v}] v", f"float[{y}] y", body)
    fused = copied(model)
    fuse(fused, "cpu")
    assert_same_function(fused, model)


def test_operands_that_fold_different_heads_are_left() -> None:
    """(2,4) heads and (4,2) heads both fold into 8."""
    body = (
        "qf = Reshape(q, fold) kf = Reshape(k, fold) vf = Reshape(v, fold) kt = Transpose<perm=[0,2,1]>(kf) "
        "s = MatMul(qf, kt) p = Softmax(s) y = MatMul(p, vf)"
    )
    inputs = "float[2,4,6,8] q, float[4,2,6,8] k, float[2,4,6,8] v"
    model = graph(inputs, "float[8,6,8] y", body, fold=int64([8, 6, 8]))
    assert_walk_rule_refuses(model, SoftmaxToAttention, "q, k and v do not fold the same heads into the batch")


def test_operands_of_which_one_is_folded_are_left() -> None:
    body = "qf = Reshape(q, fold) kt = Transpose<perm=[0,2,1]>(k) s = MatMul(qf, kt) p = Softmax(s) y = MatMul(p, v)"
    inputs = "float[2,4,6,8] q, float[8,6,8] k, float[8,6,8] v"
    model = graph(inputs, "float[8,6,8] y", body, fold=int64([8, 6, 8]))
    assert_walk_rule_refuses(model, SoftmaxToAttention, "q, k and v do not fold the same heads into the batch")


# Masks and numbers of unusual shapes: whatever becomes of them, the function stays.
UNUSUAL = {
    "mask of one dimension": ("B,2,S,8", "B,2,L,8", ", float[L] m", "Add(s, m)", "B,2,S,8"),
    "number added": ("B,2,S,8", "B,2,L,8", "", "Add(s, c)", "B,2,S,8"),
    "mask for each position": ("B,2,S,8", "B,2,L,8", ", float[B,1,S,1] m", "Add(s, m)", "B,2,S,8"),
    "one element of four dimensions": ("B,S,8", "B,L,8", "", "Mul(s, e)", "1,B,S,8"),
    "mask (1,1,S,L) over (B,S,L)": ("B,S,8", "B,L,8", ", float[1,1,S,L] m", "Add(s, m)", "1,B,S,8"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_masks_and_numbers_of_unusual_shapes(name: str) -> None:
    q, k, inputs, made, y = UNUSUAL[name]
    perm = "[0,1,3,2]" if q.count(",") == 3 else "[0,2,1]"
    body = f"kt = Transpose<perm={perm}>(k) s = MatMul(q, kt) t = {made} p = Softmax(t) y = MatMul(p, v)"
    weights = {"c": CONSTANTS["c"], "e": np.full((1, 1, 1, 1), 0.3, np.float32)}
    model = graph(f"float[{q}] q, float[{k}] k, float[{k}] v{inputs}", f"float[{y}] y", body, **used(body, weights))
    fused = copied(model)
    fuse(fused, "cpu")
    assert_same_function(fused, model)


# --- Einsum -----------------------------------------------------------------------------------------------------------

EINSUMS = {
    "bihd,bjhd->bhij": ("B,S,2,8", "B,L,2,8", "B,2,S,L"),
    "bhij,bjhd->bihd": ("B,2,S,L", "B,L,2,8", "B,S,2,8"),
    "b i d , b j d -> b i j": ("B,S,8", "B,L,8", "B,S,L"),
    "bij,bjd->bid": ("B,S,L", "B,L,8", "B,S,8"),
    "bid,bjd->bji": ("B,S,8", "B,L,8", "B,L,S"),
    "dib,djb->bij": ("8,S,B", "8,L,B", "B,S,L"),
    "bhid,bhjd->bhij": ("B,2,S,8", "B,2,L,8", "B,2,S,L"),
    "id,jd->ij": ("S,8", "L,8", "S,L"),
    "BQd,BKd->BQK": ("B,S,8", "B,L,8", "B,S,L"),
    "ik,kj->ij": ("S,8", "8,L", "S,L"),
}


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation: str) -> None:
    a, b, y = EINSUMS[equation]
    body = f'y = Einsum<equation="{equation}">(a, b)'
    model = graph(f"float[{a}] a, float[{b}] b", f"float[{y}] y", body)
    rewritten = assert_walk_rule_fires(model, EinsumToMatMul)
    assert operators(rewritten, "Einsum", "MatMul") == {"Einsum": 0, "MatMul": 1}
    feeds = feeds_for(model)
    expected = torch.einsum(equation, torch.from_numpy(feeds["a"]), torch.from_numpy(feeds["b"]))
    (found,) = run(rewritten, feeds).values()
    assert relative_error(found, expected.numpy()) < 1e-5


OTHER_EINSUMS = {
    "bii,bij->bij": ("B,6,6", "B,6,L", "B,6,L"),
    "bid,bjd->ij": ("B,S,8", "B,L,8", "S,L"),
    "bidx,bjd->bij": ("B,S,8,3", "B,L,8", "B,S,L"),
    "bid,bid->bi": ("B,S,8", "B,S,8", "B,S"),
    "bi,bj->bij": ("B,S", "B,L", "B,S,L"),
    "bix,bjx->bijx": ("B,S,8", "B,L,8", "B,S,L,8"),
    "bhid,bjd->bhij": ("B,2,S,8", "B,L,8", "B,2,S,L"),
    "...id,...jd->...ij": ("B,S,8", "B,L,8", "B,S,L"),
    "bid,bjd": ("B,S,8", "B,L,8", "S,L"),
}


@pytest.mark.parametrize("equation", OTHER_EINSUMS)
def test_other_einsums_stay(equation: str) -> None:
    a, b, y = OTHER_EINSUMS[equation]
    model = graph(f"float[{a}] a, float[{b}] b", f"float[{y}] y", f'y = Einsum<equation="{equation}">(a, b)')
    wanted = "two operands with named axes" if "." in equation or "->" not in equation else "not a matmul"
    assert_walk_rule_refuses(model, EinsumToMatMul, wanted)


@pytest.mark.parametrize(("equation", "inputs"), [("bij->bji", "a"), ("bij,bjk,bkl->bil", "a, a, a")])
def test_einsums_of_one_or_three_operands_stay(equation: str, inputs: str) -> None:
    model = graph("float[B,6,6] a", "float[B,6,6] y", f'y = Einsum<equation="{equation}">({inputs})')
    assert_walk_rule_refuses(model, EinsumToMatMul, "two operands with named axes")


# --- from torch -------------------------------------------------------------------------------------------------------

HEADS, SIZE = 2, 8
WIDTH = HEADS * SIZE
Tensor = torch.Tensor
Form = Callable[..., Tensor]


def split(x: Tensor) -> Tensor:
    return x.view(x.shape[0], -1, HEADS, SIZE).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], -1, WIDTH)


def folded(x: Tensor) -> Tensor:
    """As diffusers' head_to_batch_dim."""
    batch, length, width = x.shape
    return x.reshape(batch, length, HEADS, width // HEADS).permute(0, 2, 1, 3).reshape(batch * HEADS, length, -1)


def unfolded(x: Tensor) -> Tensor:
    """As diffusers' batch_to_head_dim."""
    batch, length, size = x.shape
    return x.reshape(batch // HEADS, HEADS, length, size).permute(0, 2, 1, 3).reshape(batch // HEADS, length, -1)


def scaled_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = split(q) @ split(k).transpose(-1, -2) / math.sqrt(SIZE)
    return joined(scores.softmax(-1) @ split(v))


def scale_from_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = split(q), split(k), split(v)
    scores = q @ k.transpose(-1, -2) / torch.sqrt(torch.tensor(q.size(-1), dtype=torch.float32))
    return joined(F.softmax(scores, dim=-1) @ v)


def scaled_operands(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the first UNets did, for the sake of fp16."""
    scale = 1 / math.sqrt(math.sqrt(SIZE))
    weights = (split(q) * scale) @ (split(k) * scale).transpose(-1, -2)
    return joined(torch.softmax(weights.float(), dim=-1).type(weights.dtype) @ split(v))


def scaled_before_split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined((split(q * SIZE**-0.5) @ split(k).transpose(2, 3)).softmax(-1) @ split(v))


def baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As diffusers' AttnProcessor."""
    q, k, v = folded(q), folded(k), folded(v)
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=SIZE**-0.5)
    return unfolded(torch.bmm(scores.softmax(dim=-1), v))


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the first VAEs did: scale on both, one head, no split."""
    scale = 1 / math.sqrt(math.sqrt(WIDTH))
    return torch.softmax((q * scale) @ (k * scale).transpose(-1, -2), dim=-1) @ v


def one_head_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=WIDTH**-0.5)
    return torch.bmm(scores.softmax(dim=-1), v)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.view(x.shape[0], -1, HEADS, SIZE) for x in (q, k, v))
    weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * SIZE**-0.5, dim=-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    return out.reshape(out.shape[0], -1, WIDTH)


def folded_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As CompVis' CrossAttention."""
    q, k, v = folded(q), folded(k), folded(v)
    weights = (torch.einsum("bid,bjd->bij", q, k) * SIZE**-0.5).softmax(dim=-1)
    return unfolded(torch.einsum("bij,bjd->bid", weights, v))


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined(F.scaled_dot_product_attention(split(q), split(k), split(v)))


def sdpa_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return joined(F.scaled_dot_product_attention(split(q), split(k), split(v), attn_mask=mask))


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As T5: no scale, a bias (1,N,S,L)."""
    scores = split(q) @ split(k).transpose(3, 2)
    scores += mask
    return joined(F.softmax(scores.float(), dim=-1).type_as(scores) @ split(v))


def unfolded_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As transformers' CLIP did: heads folded, unfolded for the mask."""
    batch, length, _ = q.shape
    q, k, v = (split(x).reshape(batch * HEADS, -1, SIZE) for x in (q * SIZE**-0.5, k, v))
    scores = torch.bmm(q, k.transpose(1, 2))
    scores = scores.view(batch, HEADS, length, k.shape[1]) + mask
    scores = F.softmax(scores.view(batch * HEADS, length, k.shape[1]), dim=-1)
    return joined(torch.bmm(scores, v).view(batch, HEADS, length, SIZE))


FORMS: Mapping[str, Form] = {
    form.__name__: form
    for form in (
        scaled_scores, scale_from_shape, scaled_operands, scaled_before_split, baddbmm, one_head, one_head_baddbmm,
        einsum, folded_einsum, sdpa,
    )
}  # fmt: skip


class Layer(torch.nn.Module):
    """Projections, with biases or none, and an attention."""

    def __init__(self, form: Form, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.q, self.k, self.v, self.out = (torch.nn.Linear(WIDTH, WIDTH, bias) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor, *mask: Tensor) -> Tensor:
        result: Tensor = self.out(self.form(self.q(x), self.k(context), self.v(context), *mask))
        return result


DYNAMIC = ({0: "B", 1: "S"}, {0: "B", 1: "L"})
FUSED = {"MultiHeadAttention": 1, "Attention": 0, "Softmax": 0, "Einsum": 0, "MatMul": 4, "Transpose": 0}


def assert_one_attention(model: ir.Model, net: Layer, inputs: tuple[Tensor, ...], provider: str) -> ir.Model:
    """Fuse a copy: one MultiHeadAttention, and torch's numbers; return the copy."""
    fused = copied(model)
    fuse(fused, provider)
    assert operators(fused, *FUSED) == FUSED
    assert_same_function(fused, model)
    names = [required(value.name) for value in model.graph.inputs]
    (found,) = run(fused, {name: x.numpy() for name, x in zip(names, inputs, strict=True)}).values()
    with torch.no_grad():
        assert relative_error(found, net(*inputs).numpy()) < 1e-5
    return fused


def inputs_for(seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(normal(3, 5, WIDTH, seed=seed)), torch.from_numpy(normal(3, 7, WIDTH, seed=seed + 1))


@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_torchscript_gives_one_attention(name: str, bias: bool, opset: int) -> None:
    net, inputs = Layer(FORMS[name], bias), inputs_for()
    model = torchscript(net, *inputs, dynamic=DYNAMIC, opset=opset)
    fused = assert_one_attention(model, net, inputs, "cpu")
    heads = 1 if "one_head" in name else HEADS
    node = node_of(fused, "MultiHeadAttention")
    assert node.attributes.get_int("num_heads") == heads
    assert node.attributes.get_float("scale", 0.0) == pytest.approx((WIDTH // heads) ** -0.5, rel=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_sizes_fixed_at_export_give_one_attention(name: str) -> None:
    net, inputs = Layer(FORMS[name]), inputs_for()
    assert_one_attention(torchscript(net, *inputs), net, inputs, "cuda")


# Forms with a mask, and the axes of the mask.
MASKED: dict[str, tuple[Form, tuple[int, ...], dict[int, str]]] = {
    "sdpa": (sdpa_masked, (3, 2, 5, 7), {0: "B", 2: "S", 3: "L"}),
    "relative bias": (masked, (1, 2, 5, 7), {2: "S", 3: "L"}),
    "unfolded for all heads": (unfolded_mask, (3, 1, 5, 7), {0: "B", 2: "S", 3: "L"}),
    "unfolded for each head": (unfolded_mask, (3, 2, 5, 7), {0: "B", 2: "S", 3: "L"}),
    "for all images and heads": (masked, (1, 1, 5, 7), {2: "S", 3: "L"}),
}


@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", MASKED)
def test_torchscript_with_a_mask_gives_one_attention(name: str, provider: str, opset: int) -> None:
    form, shape, axes = MASKED[name]
    net, inputs = Layer(form), (*inputs_for(), torch.from_numpy(normal(*shape, seed=5)))
    model = torchscript(net, *inputs, dynamic=(*DYNAMIC, axes), opset=opset)
    fused = assert_one_attention(model, net, inputs, provider)
    assert input_of(node_of(fused, "MultiHeadAttention"), 5).name == "x2"


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("form", [masked, sdpa_masked, unfolded_mask])
def test_a_padding_mask_keeps_the_function(form: Form, provider: str) -> None:
    net, inputs = Layer(form), (*inputs_for(), torch.from_numpy(normal(3, 1, 1, 7, seed=5)))
    model = torchscript(net, *inputs, dynamic=(*DYNAMIC, {0: "B", 3: "L"}))
    fused = copied(model)
    fuse(fused, provider)
    assert_same_function(fused, model)


def expanded_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = split(q), split(k), split(v)
    scores = q @ k.transpose(-1, -2) + mask.expand(q.shape[0], 1, q.shape[2], k.shape[2])
    return joined(scores.softmax(-1) @ v)


def test_a_mask_with_the_sizes_of_q_and_k_gives_one_attention() -> None:
    net, inputs = Layer(expanded_mask), (*inputs_for(), torch.from_numpy(normal(1, 1, 5, 7, seed=5)))
    model = torchscript(net, *inputs, dynamic=(*DYNAMIC, {2: "S", 3: "L"}))
    assert_one_attention(model, net, inputs, "cpu")


class CausalLayer(Layer):
    """Self-attention that torch masks."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # self-attention has no context
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        result: Tensor = self.out(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return result


@pytest.mark.parametrize("opset", [14, 17])
def test_causal_attention_needs_no_mask(opset: int) -> None:
    net, inputs = CausalLayer(sdpa), inputs_for()[:1]
    fused = assert_one_attention(torchscript(net, *inputs, dynamic=DYNAMIC[:1], opset=opset), net, inputs, "cpu")
    node = node_of(fused, "MultiHeadAttention")
    assert node.attributes.get_int("unidirectional") == 1
    assert len(node.inputs) == 3


@pytest.mark.parametrize("name", ["scaled_scores", "baddbmm", "folded_einsum", "scaled_operands"])
def test_half_precision_gives_one_attention(name: str) -> None:
    net, inputs = Layer(FORMS[name]).half(), tuple(x.half() for x in inputs_for())
    model = torchscript(net, *inputs, dynamic=DYNAMIC)
    fused = copied(model)
    fuse(fused, "cuda")
    assert operators(fused, "MultiHeadAttention", "Softmax") == {"MultiHeadAttention": 1, "Softmax": 0}
    assert_same_function(fused, model, tolerance=5e-3)


@pytest.mark.parametrize("name", FORMS)
def test_torch_export_gives_one_attention(name: str) -> None:
    net, inputs = Layer(FORMS[name]), inputs_for()
    model = exported(net, *inputs, dynamic=DYNAMIC)
    assert_one_attention(model, net, inputs, "cpu")
