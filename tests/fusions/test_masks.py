"""Causal masks: every way in which they are computed, and near misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.graphs import (
    Array,
    assert_fires,
    assert_refuses,
    assert_same_function,
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

from sdonnx.fusions.fuse_attention import CausalMaskToAttribute
from sdonnx.fusions.fusion_table import PROVIDERS, fuse
from sdonnx.graph.edit import known_dims
from sdonnx.graph.passes import tidy

HEADS = "float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, int64[B,S] ids"
ATTENTION = "y = Attention(q, k, v, mask)"
RANGE = "n = Shape<start=1,end=2>(ids) m = Squeeze(n) r = Range(zero, m, one) "
CONSTANTS = {"zero": int64(0), "one": int64(1)}


def causal(
    compare: str, *, rest: str = f"mask = Expand(c, s) {ATTENTION}", values: str = RANGE, **more: Array
) -> ir.Model:
    """An attention with a mask that compares columns and rows of a range."""
    body = f"{values} column = Unsqueeze(r, column_axes) row = Unsqueeze(r, row_axes) c = {compare} {rest}"
    weights = CONSTANTS | {
        "two": int64(2), "s": int64([1, 1, 1, 1]), "one_": int64([1]),
        "column_axes": int64([0, 1, 2]), "row_axes": int64([0, 1, 3]), **more,
    }  # fmt: skip
    model = graph(HEADS, "float[B,2,S,8] y", body, **weights)
    tidy(model)
    for node in model.graph:
        # As the exporter knows it: ONNX's own inference loses the length of a range.
        if node.op_type == "Range":
            node.outputs[0].shape = ir.Shape(["S"])
        if node.outputs[0].name == "column":
            node.outputs[0].shape = ir.Shape([1, 1, 1, "S"])
        if node.outputs[0].name == "row":
            node.outputs[0].shape = ir.Shape([1, 1, "S", 1])
    return model


@pytest.mark.parametrize("compare", ["LessOrEqual(column, row)", "GreaterOrEqual(row, column)"])
def test_a_causal_mask(compare: str) -> None:
    rewritten = assert_fires(causal(compare), CausalMaskToAttribute, 1)
    assert operators(rewritten) == {"Attention": 1}
    assert node_of(rewritten, "Attention").attributes.get_int("is_causal") == 1
    assert len(node_of(rewritten, "Attention").inputs) == 3


def test_an_expanded_causal_mask_of_two_attentions() -> None:
    spread = "b = Shape<start=0,end=1>(ids) e = Concat<axis=0>(b, one_, n, n) mask = Expand(c, e)"
    rest = f"{spread} u = Attention<scale=0.3>(k, q, v, mask) y = Attention(q, u, v, mask)"
    model = causal("LessOrEqual(column, row)", rest=rest)
    rewritten = assert_fires(model, CausalMaskToAttribute, 2)
    assert operators(rewritten) == {"Attention": 2}


def test_the_vector_of_columns_may_stand_as_it_is() -> None:
    """[S] against [S,1] gives [S,S], as torch's tril writes it."""
    body = f"{RANGE} row = Unsqueeze(r, ones) mask = LessOrEqual(r, row) {ATTENTION}"
    model = graph(HEADS, "float[B,2,S,8] y", body, ones=int64([1]), **CONSTANTS)
    node_of(model, "Range").outputs[0].shape = ir.Shape(["S"])
    node_of(model, "Unsqueeze").outputs[0].shape = ir.Shape(["S", 1])
    rewritten = assert_fires(model, CausalMaskToAttribute, 1)
    assert operators(rewritten) == {"Attention": 1}


NOT_CAUSAL = {
    "anti-causal": causal("LessOrEqual(row, column)"),
    "anti-causal too": causal("GreaterOrEqual(column, row)"),
    "strict": causal("Less(column, row)"),
    "equal": causal("Equal(column, row)"),
    "two ranges": causal(
        "LessOrEqual(column, other)", values=f"{RANGE} p = Range(one, m, one) other = Unsqueeze(p, row_axes)"
    ),
    "step of two": causal("LessOrEqual(column, row)", values=RANGE.replace("one)", "two)")),
    "not from zero": causal("LessOrEqual(column, row)", values=RANGE.replace("zero", "two")),
    "only columns": causal("LessOrEqual(column, column)"),
    "only rows": causal("LessOrEqual(row, row)"),
}


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_other_masks_stay(name: str) -> None:
    assert_refuses(NOT_CAUSAL[name], CausalMaskToAttribute, "the mask is not known to be causal")


def test_lengths_without_a_name_are_not_known_to_be_equal() -> None:
    model = causal("LessOrEqual(column, row)")
    for node in model.graph:
        if node.op_type == "Unsqueeze":
            shape = known_dims(node.outputs[0])
            node.outputs[0].shape = ir.Shape([None if dim == "S" else dim for dim in shape])
    assert_refuses(model, CausalMaskToAttribute, "the mask is not known to be causal")


def test_a_mask_from_outside_stays() -> None:
    model = graph(f"{HEADS}, bool[B,1,S,S] mask", "float[B,2,S,8] y", ATTENTION)
    assert_refuses(model, CausalMaskToAttribute, "the mask is not known to be causal")


class Causal(torch.nn.Module):
    """As transformers masks: positions compared with positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[2])
        mask = (positions[None, None, None, :] <= positions[None, None, :, None]).expand(x.shape[0], 1, -1, -1)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_fuses_the_export_of_torch() -> None:
    model = exported(Causal(), torch.randn(3, 2, 6, 8), dynamic=({0: "B", 2: "S"},))
    rewritten = assert_fires(model, CausalMaskToAttribute, 1)
    feeds = feeds_for(model)
    x = torch.from_numpy(feeds["x"])
    (found,) = run(rewritten, feeds).values()
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert relative_error(found, expected.numpy()) < 1e-5
    assert operators(rewritten, "Range") == {"Range": 0}


# --- masks that are added, and triangles of ones ----------------------------------------------------------------------

NUMBERS = {
    "nought": np.array(0, np.float32), "minus": np.array(-1, np.float32), "unit": np.array(1, np.float32),
    "low": np.array(np.finfo(np.float32).min), "never": np.array(-np.inf, np.float32),
    "enough": np.array(-1e4, np.float32), "false": np.array(False), "none": int64(0), "one": int64(1), "two": int64(2),
    "less": int64(-1), "axes": int64([0, 1]),
}  # fmt: skip
# The range is one, and its length is known to be q's: ids have it too.
SQUARE = "n = Shape<start=1,end=2>(ids) e = Concat<axis=0>(n, n) "
ONES = f"{SQUARE} o = ConstantOfShape<value=float[1]{{1}}>(e) "
TRUE = f"{ONES} t = Cast<to=9>(o) "
LOWER = f"{TRUE} l = Trilu<upper=0>(t) "
NEVER = f"{SQUARE} f = Expand(never, e) "


def masked(body: str, attention: str = ATTENTION, inputs: str = HEADS) -> ir.Model:
    """An attention with the mask that the body makes."""
    text = f"{body} {attention}"
    return graph(inputs, "float[B,2,S,8] y", text, **used(text, NUMBERS))


TRIANGLES = {
    "ones, kept below": f"{TRUE} mask = Trilu<upper=0>(t)",
    "ones, kept below, cast": f"{ONES} l = Trilu<upper=0>(o) mask = Cast<to=9>(l)",
    "ones, kept up to the diagonal 0": f"{TRUE} mask = Trilu<upper=0>(t, none)",
    "of four dimensions": f"{LOWER} mask = Unsqueeze(l, axes)",
    "spread over the batch": (
        f"{LOWER} b = Shape<end=1>(ids) h = Concat<axis=0>(b, b1, n, n) mask = Expand(l, h)"
    ),
    "0 and -inf by the lower triangle": f"{LOWER} mask = Where(l, nought, never)",
    "0 and the lowest number": f"{LOWER} mask = Where(l, nought, low)",
    "0 and -10000": f"{LOWER} mask = Where(l, nought, enough)",
    "0 and a filled matrix": f"{LOWER} f = Expand(low, e) mask = Where(l, nought, f)",
    "-inf and 0 by its complement": f"{LOWER} u = Not(l) mask = Where(u, never, nought)",
    "-inf and 0 where ones are missing": (
        f"{ONES} l = Trilu<upper=0>(o) u = Equal(l, nought) mask = Where(u, never, nought)"
    ),
    "0 first": f"{ONES} l = Trilu<upper=0>(o) u = Equal(nought, l) mask = Where(u, never, nought)",
    "-inf, kept above": f"{NEVER} mask = Trilu<upper=1>(f, one)",
    "the lowest number, kept above": f"{SQUARE} f = Expand(low, e) mask = Trilu<upper=1>(f, one)",
    "a constant of that shape": f"{SQUARE} f = ConstantOfShape<value=float[1]{{-1e9}}>(e) mask = Trilu(f, one)",
    "kept above, of four dimensions": f"{NEVER} u = Trilu<upper=1>(f, one) mask = Unsqueeze(u, axes)",
}  # fmt: skip


@pytest.mark.parametrize("name", TRIANGLES)
def test_triangles(name: str) -> None:
    body = TRIANGLES[name]
    model = masked(body) if "b1" not in body else masked(f"b1 = Constant<value_ints=[1]>() {body}")
    tidy(model)
    rewritten = assert_fires(model, CausalMaskToAttribute, 1)
    assert operators(rewritten) == {"Attention": 1}
    assert node_of(rewritten, "Attention").attributes.get_int("is_causal") == 1


LOW: dict[str, Any] = {name: NUMBERS[name] for name in ("never", "nought")}


@pytest.mark.parametrize("compare", ["Greater(column, row)", "Less(row, column)"])
def test_columns_behind_rows_are_refused_by_a_low_number(compare: str) -> None:
    model = causal(compare, rest=f"mask = Where(c, never, nought) {ATTENTION}", **LOW)
    assert operators(assert_fires(model, CausalMaskToAttribute, 1)) == {"Attention": 1}


NO_TRIANGLES = {
    "kept above": f"{TRUE} mask = Trilu<upper=1>(t)",
    "without the diagonal": f"{TRUE} mask = Trilu<upper=0>(t, less)",
    "one more diagonal": f"{TRUE} mask = Trilu<upper=0>(t, one)",
    "everything": f"{TRUE} mask = Identity(t)",
    "zeros, kept below": f"{SQUARE} o = ConstantOfShape(e) t = Cast<to=9>(o) mask = Trilu<upper=0>(t)",
    "the complement": f"{LOWER} mask = Not(l)",
    "-inf below": f"{LOWER} mask = Where(l, never, nought)",
    "0 above": f"{LOWER} u = Not(l) mask = Where(u, nought, never)",
    "a number that is not low": f"{LOWER} mask = Where(l, nought, minus)",
    "1 below": f"{LOWER} mask = Where(l, unit, never)",
    "-inf, kept above with the diagonal": f"{NEVER} mask = Trilu<upper=1>(f)",
    "-inf, kept above the next diagonal": f"{NEVER} mask = Trilu<upper=1>(f, two)",
    "-inf, kept below": f"{NEVER} mask = Trilu<upper=0>(f, less)",
    "-1, kept above": f"{SQUARE} f = Expand(minus, e) mask = Trilu<upper=1>(f, one)",
    "-inf everywhere": f"{NEVER} mask = Identity(f)",
    "where ones are": f"{ONES} l = Trilu<upper=0>(o) u = Equal(l, unit) mask = Where(u, never, nought)",
    "the transposed triangle": f"{LOWER} mask = Transpose<perm=[1,0]>(l)",
}


@pytest.mark.parametrize("name", NO_TRIANGLES)
def test_other_triangles_stay(name: str) -> None:
    model = masked(NO_TRIANGLES[name])
    tidy(model)
    assert_refuses(model, CausalMaskToAttribute, "the mask is not known to be causal")


@pytest.mark.parametrize(
    "body",
    [
        f"{ONES} mask = Trilu<upper=0>(o)",
        f"{LOWER} mask = Cast<to=1>(l)",
    ],
)
def test_ones_that_are_added_stay(body: str) -> None:
    model = masked(body)
    tidy(model)
    assert_refuses(model, CausalMaskToAttribute, "the mask is not known to be causal")


@pytest.mark.parametrize(
    "body",
    [f"{LOWER} w = Where(l, nought, never) mask = Cast<to=9>(w)", f"{NEVER} u = Trilu(f, one) mask = Cast<to=9>(u)"],
)
def test_an_added_triangle_cast_to_booleans_stays(body: str) -> None:
    model = masked(body)
    tidy(model)
    assert_refuses(model, CausalMaskToAttribute, "the mask is not known to be causal")


def test_a_triangle_that_is_not_square_stays() -> None:
    body = "n = Shape<start=2,end=3>(q) m = Shape<start=2,end=3>(k) e = Concat<axis=0>(n, m) "
    body += "o = ConstantOfShape<value=float[1]{1}>(e) t = Cast<to=9>(o) mask = Trilu<upper=0>(t)"
    model = masked(body, inputs="float[B,2,S,8] q, float[B,2,L,8] k, float[B,2,L,8] v")
    assert_refuses(model, CausalMaskToAttribute, "the mask is not known to be causal")


def test_a_triangle_of_one_element_that_is_broadcast_stays() -> None:
    body = "o = Constant<value_ints=[1,1]>() p = ConstantOfShape<value=float[1]{1}>(o) t = Cast<to=9>(p) "
    model = masked(f"{body} mask = Trilu<upper=0>(t)")
    assert_refuses(model, CausalMaskToAttribute, "the mask is not known to be causal")


def by_comparison(x: torch.Tensor) -> torch.Tensor:
    """As transformers did up to 4.4x: columns before the next row."""
    mask = torch.full((x.shape[2], x.shape[2]), torch.finfo(x.dtype).min)
    positions = torch.arange(mask.size(-1))
    mask.masked_fill_(positions < (positions + 1).view(mask.size(-1), 1), 0)
    return mask[None, None, :, :].expand(x.shape[0], 1, x.shape[2], x.shape[2])


def by_triu(x: torch.Tensor) -> torch.Tensor:
    """As transformers' first CLIP."""
    mask = torch.empty(x.shape[0], x.shape[2], x.shape[2], dtype=x.dtype)
    mask.fill_(torch.tensor(torch.finfo(x.dtype).min))
    mask.triu_(1)
    return mask.unsqueeze(1)


def by_full_triu(x: torch.Tensor) -> torch.Tensor:
    """As OpenAI's CLIP."""
    return torch.full((x.shape[2], x.shape[2]), float("-inf")).triu(1)


def by_tril(x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
    return torch.zeros(x.shape[2], x.shape[2]).masked_fill(~ones, float("-inf"))


def by_range(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[2])
    allowed = positions[None, :] <= positions[:, None]
    return torch.where(allowed, 0.0, torch.finfo(x.dtype).min)[None, None]


WAYS = (by_comparison, by_triu, by_full_triu, by_tril, by_range)


class Masked(torch.nn.Module):
    """Projections that split into two heads, scores and a mask."""

    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.q, self.k, self.v = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (net(x).view(x.shape[0], -1, 2, 8).transpose(1, 2) for net in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * 8**-0.5 + self.way(q)
        result: torch.Tensor = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape[0], -1, 16)
        return result


# to be causal.
@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_fuses_the_export_of_torchscript(
    provider: str, way: Callable[[torch.Tensor], torch.Tensor], opset: int
) -> None:
    net, x = Masked(way), torch.from_numpy(normal(3, 7, 16))
    model = torchscript(net, torch.randn(2, 5, 16), dynamic=({0: "B", 1: "S"},), opset=opset)
    fused = copied(model)
    fuse(fused, provider)
    assert operators(fused, "MultiHeadAttention", "Softmax", "Where", "Trilu", "Range", "Expand") == {
        "MultiHeadAttention": 1, "Softmax": 0, "Where": 0, "Trilu": 0, "Range": 0, "Expand": 0,
    }  # fmt: skip
    node = node_of(fused, "MultiHeadAttention")
    assert node.attributes.get_int("unidirectional") == 1
    assert len(node.inputs) == 3
    assert_same_function(fused, model)
    (found,) = run(fused, {"x0": x.numpy()}).values()
    with torch.no_grad():
        assert relative_error(found, net(x).numpy()) < 1e-5
