"""Operators without effect, chains that are one operator, and padding before convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.graphs import (
    IMAGE_SIZES,
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

from sdonnx.fusions.fusion_table import fuse
from sdonnx.fusions.remove_no_ops import (
    MergeReshapes,
    MergeTransposes,
    MergeUnsqueezes,
    NoOp,
    PadIntoConv,
    TransposeOfFolded,
)
from sdonnx.graph.edit import constant_value, required

INPUT, OUTPUT = "float[B,S,8] x", "float[B,S,8] y"
KNOWN: dict[str, Array] = {
    "one": np.array(1, np.float32),
    "ones": np.ones((1, 1, 1), np.float32),
    "zero": np.array(0, np.float32),
    "minus": np.array(-0.0, np.float32),
    "two": np.array(2, np.float32),
    "ones8": np.ones(8, np.float32),
    "zeros8": np.zeros(8, np.float32),
    "deep": np.ones((1, 1, 1, 1), np.float32),
    "same": int64([0, 0, 8]),
    "rest": int64([0, -1, 8]),
    "unit": int64([1, 1, 1]),
    "unit1": int64([1]),
    "rows": int64([0, -1, 4]),
    "no": np.array(False),
    "yes": np.array(True),
    "ratio": np.array(0.5, np.float32),
    "ints1": int64(1),
    "ints0": int64(0),
}


def between(body: str, inputs: str = INPUT, outputs: str = OUTPUT, **weights: Array) -> ir.Model:
    """A graph of this body, with the known values that it reads."""
    return graph(inputs, outputs, body, **used(body, KNOWN | weights, inputs))


def around(middle: str, **weights: Any) -> ir.Model:
    """A graph of nodes on a, between operators that no rule rewrites."""
    return between(f"a = Neg(x) b = {middle} y = Tanh(b)", **weights)


NO_OPS = {
    "x * 1": "Mul(a, one)",
    "1 * x": "Mul(one, a)",
    "x * [[[1]]]": "Mul(a, ones)",
    "x / 1": "Div(a, one)",
    "x + 0": "Add(a, zero)",
    "0 + x": "Add(zero, a)",
    "x + -0": "Add(a, minus)",
    "x - 0": "Sub(a, zero)",
    "Identity": "Identity(a)",
    "Dropout": "Dropout(a)",
    "Dropout with a ratio": "Dropout(a, ratio)",
    "Dropout, not training": "Dropout(a, ratio, no)",
    "Cast": "Cast<to=1>(a)",
    "Reshape": "Reshape(a, same)",
    "Reshape, one size open": "Reshape(a, rest)",
    "Expand by one": "Expand(a, unit1)",
    "Expand by ones": "Expand(a, unit)",
    "Transpose": "Transpose<perm=[0,1,2]>(a)",
}


@pytest.mark.parametrize("name", NO_OPS)
def test_no_ops_go(name: str) -> None:
    assert operators(assert_walk_rule_fires(around(NO_OPS[name]), NoOp)) == {"Neg": 1, "Tanh": 1}


# Ones and zeros that are computed: of the shape of the input.
COMPUTED = {
    "ones": "s = Shape(x) o = ConstantOfShape<value=float[1]{1.0}>(s) b = Mul(a, o)",
    "zeros": "s = Shape(x) o = ConstantOfShape(s) b = Add(a, o)",
    "zeros, first": "s = Shape(x) o = ConstantOfShape(s) b = Add(o, a)",
    "expanded": "s = Shape(x) o = Expand(one, s) b = Div(a, o)",
    "cast": "s = Shape(x) o = ConstantOfShape<value=int64[1]{0}>(s) c = Cast<to=1>(o) b = Sub(a, c)",
    "0 * empty, as baddbmm": "s = Shape(x) o = ConstantOfShape(s) c = Mul(zero, o) b = Add(c, a)",
    "empty * 0": "s = Shape(x) o = ConstantOfShape<value=float[1]{5.0}>(s) c = Mul(o, zero) b = Add(a, c)",
    "Reshape to its shape": "s = Shape(x) b = Reshape(a, s)",
    "Expand to its shape": "s = Shape(x) b = Expand(a, s)",
    "Where, exporters' way to its shape": (
        "s = Shape(x) o = ConstantOfShape<value=int64[1]{1}>(d) m = Neg(o) e = Equal(s, m) w = Where(e, o, s) "
        "b = Expand(a, w)"
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_no_ops_with_computed_operands_go(name: str) -> None:
    model = between(f"a = Neg(x) {COMPUTED[name]} y = Tanh(b)", d=int64([3]))
    fused = copied(model)
    fuse(fused, "cpu")
    assert operators(fused) == {"Neg": 1, "Tanh": 1}
    assert_same_function(fused, model)


CASTS = {
    "16 bits in 32": ("float16", "Cast<to=1>(a)", 10),
    "16 bits in 64": ("float16", "Cast<to=11>(a)", 10),
    "32 bits in 64": ("float", "Cast<to=11>(a)", 1),
    "whole numbers in 64 bits": ("int32", "Cast<to=7>(a)", 6),
    "truth in whole numbers": ("bool", "Cast<to=7>(a)", 9),
    "truth in numbers": ("bool", "Cast<to=1>(a)", 9),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_there_and_back_go(name: str) -> None:
    dtype, there, back = CASTS[name]
    before, after = ("Not(x)", "Not(b)") if dtype == "bool" else ("Neg(x)", "Abs(b)")
    body = f"a = {before} c = {there} b = Cast<to={back}>(c) y = {after}"
    model = between(body, f"{dtype}[B,S,8] x", f"{dtype}[B,S,8] y")
    assert "Cast" not in operators(assert_walk_rule_fires(model, NoOp))


@pytest.mark.parametrize(
    ("dtype", "narrow", "back"), [("float", 10, 1), ("int64", 6, 7), ("int64", 1, 7), ("float", 7, 1), ("float", 9, 1)]
)
def test_casts_that_lose_something_stay(dtype: str, narrow: int, back: int) -> None:
    body = f"a = Neg(x) c = Cast<to={narrow}>(a) b = Cast<to={back}>(c) y = Abs(b)"
    assert_walk_rule_refuses(between(body, f"{dtype}[B,S,8] x", f"{dtype}[B,S,8] y"), NoOp)


def test_a_cast_to_a_third_type_stays() -> None:
    body = "a = Neg(x) c = Cast<to=11>(a) b = Cast<to=1>(c) y = Abs(b)"
    assert_walk_rule_refuses(between(body, "float16[B,S,8] x"), NoOp)


def test_intermediate_casts_may_have_other_readers() -> None:
    body = "a = Neg(x) c = Cast<to=1>(a) b = Cast<to=10>(c) y = Abs(b) z = Exp(c)"
    model = between(body, "float16[B,S,8] x", "float16[B,S,8] y, float[B,S,8] z")
    assert operators(assert_walk_rule_fires(model, NoOp), "Cast") == {"Cast": 1}


SOMETHING = {
    "x * 2": "Mul(a, two)",
    "x * 0": "Mul(a, zero)",
    "x + 1": "Add(a, one)",
    "x - 1": "Sub(a, one)",
    "1 / x": "Div(one, a)",
    "0 - x": "Sub(zero, a)",
    "x / 0": "Div(a, zero)",
    "x / 2": "Div(a, two)",
    "training": "Dropout(a, ratio, yes)",
    "Transpose": "Transpose<perm=[0,2,1]>(a)",
    "Cast": "Cast<to=10>(a)",
    # Weights may be of such values: whether a graph fuses must not depend on them.
    "a vector of ones": "Mul(a, ones8)",
    "a vector of zeros": "Add(a, zeros8)",
}
TYPED = {"Cast": "float16[B,S,8] y", "Transpose": "float[B,8,S] y"}


@pytest.mark.parametrize("name", SOMETHING)
def test_operators_with_an_effect_stay(name: str) -> None:
    body = f"a = Neg(x) b = {SOMETHING[name]} y = Abs(b)"
    assert_walk_rule_refuses(between(body, outputs=TYPED.get(name, OUTPUT)), NoOp)


RESHAPED = {
    "another shape": ("Reshape(a, rows)", "float[B,P,4] y"),
    "an axis more": ("Mul(a, deep)", "float[1,B,S,8] y"),
    "batch and length exchanged": ("Reshape(a, swapped)", "float[S,B,8] y"),
}


@pytest.mark.parametrize("name", RESHAPED)
def test_another_shape_stays(name: str) -> None:
    made, outputs = RESHAPED[name]
    body = (
        f"n = Shape<start=1,end=2>(x) m = Shape<end=1>(x) swapped = Concat<axis=0>(n, m, eight) a = Neg(x) b = {made}"
    )
    assert_walk_rule_refuses(between(f"{body} y = Tanh(b)", outputs=outputs, eight=int64([8])), NoOp)


def test_sizes_that_are_broadcast_stay() -> None:
    model = between("a = Neg(x) s = Shape(z) b = Expand(a, s) y = Tanh(b)", "float[1,S,8] x, float[B,S,8] z")
    assert_walk_rule_refuses(model, NoOp)
    model = between(
        "a = Neg(x) s = Shape(z) o = ConstantOfShape(s) b = Add(a, o) y = Tanh(b)", "float[1,S,8] x, float[B,S,8] z"
    )
    assert_walk_rule_refuses(model, NoOp)


def test_dropout_whose_mask_is_used_stays() -> None:
    model = between("a = Neg(x) b, m = Dropout(a) y = Tanh(b)", outputs=f"{OUTPUT}, bool[B,S,8] m")
    assert_walk_rule_refuses(model, NoOp)


def test_dropout_in_training_mode_stays() -> None:
    model = between("a = Neg(x) b = Dropout(a, ratio, t) y = Tanh(b)", f"{INPUT}, bool t")
    assert_walk_rule_refuses(model, NoOp)


# Outputs of the graph keep their names, and have a node of their own.
OUTPUTS = {
    "behind a node": ("a = Neg(x) y = Identity(a)", OUTPUT, 1),
    "behind a node that others read": ("a = Neg(x) y = Identity(a) z = Tanh(a)", f"{OUTPUT}, float[B,S,8] z", 1),
    "an input": ("y = Identity(x)", OUTPUT, 0),
    "another output": ("a = Neg(x) y = Mul(a, one)", f"{OUTPUT}, float[B,S,8] a", 0),
    "two behind one node": ("a = Neg(x) y = Identity(a) z = Mul(a, one)", f"{OUTPUT}, float[B,S,8] z", 1),
    "a chain": ("a = Neg(x) b = Mul(a, one) y = Identity(b)", OUTPUT, 2),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_keep_their_names(name: str) -> None:
    body, outputs, times = OUTPUTS[name]
    assert_walk_rule_fires(between(body, outputs=outputs), NoOp, times)


def test_whole_numbers() -> None:
    body = "a = Neg(x) b = Mul(a, ints1) c = Add(b, ints0) d = Div(c, ints1) y = Abs(d)"
    model = between(body, "int64[B,S,8] x", "int64[B,S,8] y")
    assert operators(assert_walk_rule_fires(model, NoOp, 3)) == {"Neg": 1, "Abs": 1}


# --- chains -----------------------------------------------------------------------------------------------------------

PERMS = {
    "there and back": ([1, 2, 0], [2, 0, 1], [0, 1, 2]),
    "twice round": ([1, 2, 0], [1, 2, 0], [2, 0, 1]),
    "different ones": ([2, 0, 1], [0, 2, 1], [2, 1, 0]),
}


@pytest.mark.parametrize("name", PERMS)
def test_transposes_merge(name: str) -> None:
    first, second, merged = PERMS[name]
    shape = ",".join(["B", "S", "8"][axis] for axis in merged)
    body = f"a = Transpose<perm={first}>(x) y = Transpose<perm={second}>(a)"
    rewritten = assert_walk_rule_fires(between(body, outputs=f"float[{shape}] y"), MergeTransposes)
    assert node_of(rewritten, "Transpose").attributes.get_ints("perm") == tuple(merged)


def test_a_transpose_between_that_is_used_elsewhere_stays() -> None:
    body = "a = Transpose<perm=[0,2,1]>(x) y = Transpose<perm=[0,2,1]>(a) z = Neg(a)"
    rewritten = assert_walk_rule_fires(between(body, outputs=f"{OUTPUT}, float[B,8,S] z"), MergeTransposes)
    assert operators(rewritten) == {"Transpose": 2, "Neg": 1}


def test_transposes_that_cancel_go() -> None:
    body = "n = Neg(x) a = Transpose<perm=[0,2,1]>(n) b = Transpose<perm=[0,2,1]>(a) y = Tanh(b)"
    fused = between(body)
    fuse(fused, "cpu")
    assert operators(fused) == {"Neg": 1, "Tanh": 1}


@pytest.mark.parametrize(
    "body",
    [
        "a = Transpose<perm=[0,2,1]>(x) b = Neg(a) y = Transpose<perm=[0,2,1]>(b)",
        "y = Transpose<perm=[0,1,2]>(x)",
    ],
)
def test_transposes_apart_are_no_candidates(body: str) -> None:
    assert_walk_rule_refuses(between(body), MergeTransposes)


def test_a_transpose_without_a_permutation_stays() -> None:
    model = between("a = Transpose(x) y = Transpose(a)")
    assert_walk_rule_refuses(model, MergeTransposes)
    fused = copied(model)
    fuse(fused, "cpu")
    assert_same_function(fused, model)


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        ([2], [3], [2, 3]),
        ([0], [0], [0, 1]),
        ([2], [0], [0, 3]),
        ([-1], [-1], [2, 3]),
        ([-1], [1], [1, 3]),
        ([1], [-2], [1, 2]),
        ([0, 1], [0], [0, 1, 2]),
        ([0], [3, 1], [0, 1, 3]),
    ],
)
def test_unsqueezes_merge(first: list[int], second: list[int], merged: list[int]) -> None:
    rank = 2 + len(merged)
    rest = iter("BS")
    shape = ",".join("1" if axis in merged else next(rest) for axis in range(rank))
    body = "a = Unsqueeze(x, p) y = Unsqueeze(a, q)"
    model = graph("float[B,S] x", f"float[{shape}] y", body, p=int64(first), q=int64(second))
    rewritten = assert_walk_rule_fires(model, MergeUnsqueezes)
    axes = node_of(rewritten, "Unsqueeze").inputs[1]
    assert required(constant_value(axes)).tolist() == merged


def test_an_unsqueeze_between_that_is_used_elsewhere_stays() -> None:
    body = "a = Unsqueeze(x, p) y = Unsqueeze(a, p) z = Neg(a)"
    model = graph("float[B,S] x", "float[1,1,B,S] y, float[1,B,S] z", body, p=int64([0]))
    assert operators(assert_walk_rule_fires(model, MergeUnsqueezes), "Unsqueeze") == {"Unsqueeze": 2}


def test_axes_from_outside_stay() -> None:
    model = graph(
        "float[B,S] x, int64[1] q", "float[P,Q,L,H] y", "a = Unsqueeze(x, p) y = Unsqueeze(a, q)", p=int64([0])
    )
    assert_walk_rule_refuses(model, MergeUnsqueezes)


# name: (input, shape in between, output, its target; sizes that the first target says)
RESHAPES = {
    "last axis split again": ("B,S,16", [0, 0, 2, 8], "B,S,4,4", [0, 0, 4, 4]),
    "split and joined": ("B,S,16", [0, 0, 2, 8], "B,S,16", [0, 0, 16]),
    "flattened": ("B,S,16", [-1, 16], "P,4,4", [-1, 4, 4]),
    "fixed": ("2,6,16", [12, 16], "3,64", [3, 64]),
    "open size elsewhere": ("B,6,16", [0, 96], "B,P,32", [0, -1, 32]),
}


@pytest.mark.parametrize("name", RESHAPES)
def test_reshapes_merge(name: str) -> None:
    source, first, result, second = RESHAPES[name]
    body = "a = Reshape(x, p) y = Reshape(a, q)"
    model = graph(f"float[{source}] x", f"float[{result}] y", body, p=int64(first), q=int64(second))
    rewritten = assert_walk_rule_fires(model, MergeReshapes, sizes={"B": 2, "S": 6, "P": 12})
    assert operators(rewritten) == {"Reshape": 1}


def test_a_reshape_between_that_is_used_elsewhere_stays() -> None:
    body = "a = Reshape(x, p) y = Reshape(a, q) z = Neg(a)"
    outputs = "float[B,S,4,4] y, float[B,S,2,8] z"
    model = graph("float[B,S,16] x", outputs, body, p=int64([0, 0, 2, 8]), q=int64([0, 0, 4, 4]))
    assert operators(assert_walk_rule_fires(model, MergeReshapes), "Reshape") == {"Reshape": 2}


def test_reshapes_to_two_new_sizes_stay() -> None:
    """Of two sizes that the source has not, only one may be left open."""
    body = "s = Shape(z) a = Reshape(x, p) t = Concat<axis=0>(s, q) y = Reshape(a, t)"
    model = graph("float[T,8] x, float[H,W] z", "float[H,W,8] y", body, p=int64([-1, 2, 4]), q=int64([8]))
    assert_walk_rule_refuses(model, MergeReshapes)


def test_a_target_of_unknown_sizes_stays() -> None:
    model = graph(
        "float[B,S,16] x, int64[3] q", "float[P,H,W] y", "a = Reshape(x, p) y = Reshape(a, q)", p=int64([0, 0, 2, 8])
    )
    for node in model.graph:
        node.outputs[0].shape = ir.Shape([None] * 3) if node.outputs[0].name == "y" else node.outputs[0].shape
    assert_walk_rule_refuses(model, MergeReshapes)


# --- the key of scaled_dot_product_attention --------------------------------------------------------------------------

FOLDED = "a = Reshape(x, fold) b = Transpose<perm={}>(a) y = Reshape(b, back)"


@pytest.mark.parametrize(
    ("source", "fold", "back", "result"),
    [
        ("2,3,6,8", [6, 6, 8], [2, 3, 8, 6], "2,3,8,6"),
        ("2,3,6,8", [-1, 6, 8], [2, 3, 8, 6], "2,3,8,6"),
        ("B,3,6,8", [-1, 6, 8], [-1, 3, 8, 6], "B,3,8,6"),
        ("2,6,8", [2, 6, 8], [2, 8, 6], "2,8,6"),
    ],
)
def test_transpose_of_folded(source: str, fold: list[int], back: list[int], result: str) -> None:
    body = FOLDED.format("[0,2,1]")
    model = graph(f"float[{source}] x", f"float[{result}] y", body, fold=int64(fold), back=int64(back))
    rewritten = assert_walk_rule_fires(model, TransposeOfFolded)
    assert operators(rewritten) == {"Transpose": 1}


OTHER_FOLDINGS = {
    "another permutation": ("2,3,6,8", "[1,0,2]", [6, 6, 8], [2, 3, 8, 6], "2,3,8,6"),
    "none": ("2,3,6,8", "[0,1,2]", [6, 6, 8], [2, 3, 6, 8], "2,3,6,8"),
    "more than the batch folded": ("2,3,6,8", "[0,2,1]", [2, 18, 8], [2, 8, 3, 6], "2,8,3,6"),
    "heads and batch exchanged": ("2,3,6,8", "[0,2,1]", [6, 6, 8], [3, 2, 8, 6], "3,2,8,6"),
    "not swapped back": ("2,3,6,8", "[0,2,1]", [6, 6, 8], [2, 3, 6, 8], "2,3,6,8"),
    "left folded": ("2,3,6,8", "[0,2,1]", [6, 6, 8], [6, 8, 6], "6,8,6"),
    "the last axis cut": ("2,3,6,8", "[0,2,1]", [12, 6, 4], [2, 3, 8, 6], "2,3,8,6"),
}


@pytest.mark.parametrize("name", OTHER_FOLDINGS)
def test_other_foldings_stay(name: str) -> None:
    source, perm, fold, back, result = OTHER_FOLDINGS[name]
    model = graph(f"float[{source}] x", f"float[{result}] y", FOLDED.format(perm), fold=int64(fold), back=int64(back))
    assert_walk_rule_refuses(model, TransposeOfFolded)


def test_a_folded_value_used_elsewhere_stays_beside() -> None:
    model = graph(
        "float[2,3,6,8] x", "float[2,3,8,6] y, float[6,8,6] z", f"{FOLDED.format('[0,2,1]')} z = Neg(b)",
        fold=int64([6, 6, 8]), back=int64([2, 3, 8, 6]),
    )  # fmt: skip
    assert operators(assert_walk_rule_fires(model, TransposeOfFolded), "Transpose") == {"Transpose": 2}


# --- padding ----------------------------------------------------------------------------------------------------------

IMAGE = "float[B,4,H,W] x"
WEIGHTS: dict[str, Array] = {"k": normal(4, 4, 3, 3, scale=0.3), "bias": normal(4)}


def padded(
    amounts: list[int], pad: str = "Pad(x, amounts)", conv: str = "Conv(a, k, bias)", more: str = "", extra: str = "",
    **weights: Array,
) -> ir.Model:  # fmt: skip
    body = f"a = {pad} y = {conv} {more}"
    known = WEIGHTS | weights | {"amounts": int64(amounts)}
    return graph(IMAGE, f"float[B,4,P,Q] y{extra}", body, **used(body, known))


AMOUNTS = {
    "all around": [0, 0, 1, 1, 0, 0, 1, 1],
    "only at the end, as diffusers' downsampling": [0, 0, 0, 0, 0, 0, 1, 1],
    "each other": [0, 0, 1, 2, 0, 0, 3, 4],
}
CONVS = {
    "plain": ("Conv(a, k, bias)", [0, 0, 0, 0]),
    "no bias": ("Conv(a, k)", [0, 0, 0, 0]),
    "with pads": ("Conv<pads=[1,2,1,0]>(a, k, bias)", [1, 2, 1, 0]),
    "with strides": ("Conv<strides=[2,2],kernel_shape=[3,3]>(a, k, bias)", [0, 0, 0, 0]),
    "dilated": ("Conv<dilations=[2,1],pads=[1,1,1,1]>(a, k, bias)", [1, 1, 1, 1]),
}


@pytest.mark.parametrize("conv", CONVS)
@pytest.mark.parametrize("amounts", AMOUNTS)
def test_pad_into_conv(amounts: str, conv: str) -> None:
    added, (written, own) = AMOUNTS[amounts], CONVS[conv]
    rewritten = assert_walk_rule_fires(padded(added, conv=written), PadIntoConv, sizes=IMAGE_SIZES)
    assert operators(rewritten) == {"Conv": 1}
    expected = [before + after for before, after in zip(own, [*added[2:4], *added[6:]], strict=True)]
    assert list(node_of(rewritten, "Conv").attributes.get_ints("pads")) == expected


@pytest.mark.parametrize("pad", ["Pad(x, amounts, zero)", 'Pad<mode="constant">(x, amounts)'])
def test_pads_with_zeros(pad: str) -> None:
    zero = np.array(0, np.float32)
    assert_walk_rule_fires(padded(AMOUNTS["all around"], pad, zero=zero), PadIntoConv, sizes=IMAGE_SIZES)


def test_pads_of_one_axis() -> None:
    model = graph(
        "float[B,4,S] x", "float[B,4,P] y", "a = Pad(x, amounts) y = Conv<pads=[1,0]>(a, k)",
        amounts=int64([0, 0, 1, 0, 0, 2]), k=normal(4, 4, 3),
    )  # fmt: skip
    rewritten = assert_walk_rule_fires(model, PadIntoConv)
    assert node_of(rewritten, "Conv").attributes.get_ints("pads") == (2, 2)


def test_a_padded_image_used_elsewhere() -> None:
    model = padded(AMOUNTS["all around"], more="z = Neg(a)", extra=", float[B,4,T,U] z")
    rewritten = assert_walk_rule_fires(model, PadIntoConv, sizes=IMAGE_SIZES)
    assert operators(rewritten) == {"Pad": 1, "Conv": 1, "Neg": 1}


BATCH = "batch or channels are padded"
OTHER_PADS = {
    "mode reflect": (AMOUNTS["all around"], 'Pad<mode="reflect">(x, amounts)', None),
    "mode edge": (AMOUNTS["all around"], 'Pad<mode="edge">(x, amounts)', None),
    "cropped": ([0, 0, -1, 0, 0, 0, 0, 0], "Pad(x, amounts)", None),
    "some axes": ([1, 1], "Pad(x, amounts, , axes)", None),
    "all axes by name": (AMOUNTS["all around"], "Pad(x, amounts, , all)", None),
    "ones": (AMOUNTS["all around"], "Pad(x, amounts, one)", "the padding value is not zero"),
    "batch": ([1, 0, 0, 0, 0, 0, 0, 0], "Pad(x, amounts)", BATCH),
    "batch behind": ([0, 0, 0, 0, 1, 0, 0, 0], "Pad(x, amounts)", BATCH),
}


@pytest.mark.parametrize("name", OTHER_PADS)
def test_other_pads_stay(name: str) -> None:
    amounts, pad, reason = OTHER_PADS[name]
    weights: dict[str, Any] = {"one": np.array(1, np.float32), "axes": int64([2]), "all": int64([0, 1, 2, 3])}
    assert_walk_rule_refuses(padded(amounts, pad, **weights), PadIntoConv, reason)


def test_padded_channels_stay() -> None:
    model = padded([0, 1, 0, 0, 0, 1, 0, 0], k=normal(4, 6, 3, 3))
    assert_walk_rule_refuses(model, PadIntoConv, BATCH)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "VALID"])
def test_a_convolution_that_pads_by_itself_stays(auto_pad: str) -> None:
    model = padded(AMOUNTS["all around"], conv=f'Conv<auto_pad="{auto_pad}">(a, k, bias)')
    fused = copied(model)
    fuse(fused, "cpu")
    assert operators(fused, "Pad", "Conv") == {"Pad": 1, "Conv": 1}


def test_pads_from_outside_stay() -> None:
    body = "a = Pad(x, amounts) y = Conv(a, k)"
    model = graph(f"{IMAGE}, int64[8] amounts", "float[B,4,P,Q] y", body, k=WEIGHTS["k"])
    assert_walk_rule_refuses(model, PadIntoConv)


class Downsample(torch.nn.Module):
    """As diffusers pads before it halves an image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(4, 4, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.conv(torch.nn.functional.pad(x, (0, 1, 0, 1), mode="constant", value=0))
        return result


@pytest.mark.parametrize("opset", [14, 17])
def test_torchscript_pads_in_the_convolution(opset: int) -> None:
    net = Downsample()
    model = torchscript(net, torch.randn(2, 4, 6, 8), dynamic=({0: "B", 2: "H", 3: "W"},), opset=opset)
    fused = copied(model)
    fuse(fused, "cpu")
    assert operators(fused) == {"Conv": 1}
    feeds = feeds_for(model, sizes=IMAGE_SIZES)
    (found,) = run(fused, feeds).values()
    with torch.no_grad():
        assert relative_error(found, net(torch.from_numpy(feeds["x0"])).numpy()) < 1e-5


class Remains(torch.nn.Module):
    """Leftovers of exporters: copies, casts, expansions and reshapes without effect."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        x = torch.neg(x).to(x.dtype).expand(batch, length, width).contiguous().clone()
        x = x.reshape(batch, length, width) * 1.0 + 0.0
        x = x.permute(0, 2, 1).permute(0, 2, 1).unsqueeze(0).squeeze(0)
        x = x.view(batch, length, 2, width // 2).flatten(2)
        return torch.tanh(torch.nn.functional.dropout(x, training=False).to(torch.float64).to(torch.float32))


@pytest.mark.parametrize("opset", [14, 17])
def test_torchscript_leaves_nothing_behind(opset: int) -> None:
    model = torchscript(Remains(), torch.randn(2, 6, 8), dynamic=({0: "B", 1: "S"},), opset=opset)
    fused = copied(model)
    fuse(fused, "cpu")
    assert {"Neg", "Tanh"} <= operators(fused).keys() <= {"Neg", "Tanh", "Unsqueeze", "Squeeze"}
    assert_same_function(fused, model)
