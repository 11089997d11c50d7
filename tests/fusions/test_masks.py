"""Causal masks: every way in which they are computed, and what only looks like them."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from graphs import (
    assert_fires,
    assert_refuses,
    exported,
    feeds_for,
    graph,
    int64,
    node_of,
    operators,
    relative_error,
    run,
)

from sdonnx.fusions.masks import CausalMaskToAttribute
from sdonnx.graph.passes import tidy

HEADS = "float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, int64[B,S] ids"
ATTENTION = "y = Attention(q, k, v, mask)"
RANGE = "n = Shape<start=1,end=2>(ids) m = Squeeze(n) r = Range(zero, m, one) "
CONSTANTS = {"zero": int64(0), "one": int64(1)}


def causal(compare: str, *, rest: str = f"mask = Expand(c, s) {ATTENTION}", values: str = RANGE) -> ir.Model:
    """An attention whose mask compares columns and rows of a range."""
    body = f"{values} column = Unsqueeze(r, column_axes) row = Unsqueeze(r, row_axes) c = {compare} {rest}"
    weights = CONSTANTS | {
        "two": int64(2), "s": int64([1, 1, 1, 1]), "one_": int64([1]),
        "column_axes": int64([0, 1, 2]), "row_axes": int64([0, 1, 3]),
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
    "columns alone": causal("LessOrEqual(column, column)"),
    "rows alone": causal("LessOrEqual(row, row)"),
}


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_other_masks_stay(name: str) -> None:
    assert_refuses(NOT_CAUSAL[name], CausalMaskToAttribute, "the mask is not known to be causal")


def test_lengths_without_a_name_are_not_known_to_be_equal() -> None:
    model = causal("LessOrEqual(column, row)")
    for node in model.graph:
        if node.op_type == "Unsqueeze":
            shape = node.outputs[0].shape
            node.outputs[0].shape = ir.Shape([None if dim == "S" else dim for dim in shape.dims])
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


def test_what_torch_exports() -> None:
    model = exported(Causal(), torch.randn(3, 2, 6, 8), dynamic=({0: "B", 2: "S"},))
    rewritten = assert_fires(model, CausalMaskToAttribute, 1)
    feeds = feeds_for(model)
    x = torch.from_numpy(feeds["x"])
    (found,) = run(rewritten, feeds).values()
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert relative_error(found, expected.numpy()) < 1e-5
    assert operators(rewritten, "Range") == {"Range": 0}
