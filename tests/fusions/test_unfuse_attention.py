"""Attention that no MultiHeadAttention takes, against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.graphs import SIZES, assert_same_function, copied, feeds_for, graph, operators, relative_error, run

from sdonnx.fusions.fusion_table import fuse
from sdonnx.fusions.unfuse_attention import AttentionToMatMul
from sdonnx.graph.match import apply_walk_rules
from sdonnx.graph.passes import infer_shapes, tidy

HEADS = "float[B,3,S,8] q, float[B,3,L,8] k, float[B,3,L,6] v"
OUTPUT = "float[B,3,S,6] y"
FORMS = {
    "plain": ("", "y = Attention(q, k, v)"),
    "scale": ("", "y = Attention<scale=0.3>(q, k, v)"),
    "mask to add": (", float[B,1,S,L] m", "y = Attention(q, k, v, m)"),
    "mask of all rows": (", float[1,3,1,L] m", "y = Attention<scale=0.2>(q, k, v, m)"),
    "mask of booleans": (", bool[B,1,S,L] m", "y = Attention(q, k, v, m)"),
    "matrix": (", float[S,L] m", "y = Attention(q, k, v, m)"),
}


@pytest.mark.parametrize("name", FORMS)
def test_attention_is_spelled_out(name: str) -> None:
    more, body = FORMS[name]
    model = graph(f"{HEADS}{more}", OUTPUT, body)
    plain = copied(model)
    fired, failures = apply_walk_rules(plain, [AttentionToMatMul])
    tidy(plain)
    infer_shapes(plain)
    assert (fired, failures) == ({"AttentionToMatMul": 1}, [])
    assert operators(plain, "Attention", "MatMul", "Softmax") == {"Attention": 0, "MatMul": 2, "Softmax": 1}
    feeds = feeds_for(model)
    if "m" in feeds and feeds["m"].dtype == bool:
        feeds["m"][..., 0] = True  # a row that is masked altogether has no meaning
    found = run(plain, feeds)["y"]
    tensors = {key: torch.from_numpy(value) for key, value in feeds.items()}
    scale = 0.3 if name == "scale" else 0.2 if "rows" in name else None
    expected = F.scaled_dot_product_attention(
        tensors["q"], tensors["k"], tensors["v"], attn_mask=tensors.get("m"), scale=scale
    )
    assert relative_error(found, expected.numpy()) < 1e-5


def test_causal_attention_is_spelled_out() -> None:
    model = graph("float[B,3,S,8] q", "float[B,3,S,8] y", "y = Attention<is_causal=1>(q, q, q)")
    plain = copied(model)
    fired, _ = apply_walk_rules(plain, [AttentionToMatMul])
    tidy(plain)
    assert fired == {"AttentionToMatMul": 1}
    assert_same_function(plain, model)
    feeds = feeds_for(model)
    q = torch.from_numpy(feeds["q"])
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert relative_error(run(plain, feeds)["y"], expected.numpy()) < 1e-5


@pytest.mark.parametrize(
    "body", ["y = Attention<softcap=2.0>(q, k, v)", "z, pk, pv = Attention(q, k, v, , a, b) y = Identity(z)"]
)
def test_unsupported_attention_stays(body: str) -> None:
    more = ", float[B,3,P,8] a, float[B,3,P,6] b" if "pk" in body else ""
    model = graph(f"{HEADS}{more}", OUTPUT, body)
    fired, failures = apply_walk_rules(model, [AttentionToMatMul])
    assert fired == {"AttentionToMatMul": 0}
    assert ["not supported" in failure.reason for failure in failures] == [True]


def test_no_attention_of_onnx_is_left_for_cuda() -> None:
    """Its kernel is wrong for some sizes, so it never gets an attention that MultiHeadAttention does not support."""
    model = graph("float[B,3,S,160] q, float[B,3,L,160] k", "float[B,3,S,160] y", "y = Attention(q, k, k)")
    original = copied(model)
    fuse(model, "cuda")
    assert operators(model, "Attention", "MultiHeadAttention") == {"Attention": 0, "MultiHeadAttention": 0}
    assert_same_function(model, original, sizes=SIZES)
    disabled = copied(original)
    fuse(disabled, "cuda", disabled=["attention"])
    assert operators(disabled, "Attention") == {"Attention": 0}
