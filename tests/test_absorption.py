"""Attention to short prompts with its projections absorbed: the same numbers, and only where that is so."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graphs import Array, copied, graph, int64, normal, operators, text_of, used
from steps import run

from sdonnx.compose import absorb_projections
from sdonnx.fusions.splits import MOST_OUTPUTS
from sdonnx.graph.edit import MICROSOFT
from sdonnx.graph.passes import infer_shapes, tidy

# Three heads of 4 channels.
WEIGHTS = {
    "wq": normal(6, 12, seed=1),
    "wk": normal(5, 12, seed=2),
    "wv": normal(5, 12, seed=3),
    "wo": normal(12, 7, seed=4),
    "bq": normal(12, seed=5),
    "row": normal(12, 12, seed=6),
    "zero": int64(0),
    "one": int64(1),
    "second": int64([1]),
    "axis": int64([1]),
    "axes": int64([1, 2]),
    "yes": np.array(0, np.float32),
    "no": np.array(-10000, np.float32),
    "twelve": int64([12]),
}
PROJECTED = "q = MatMul(x, wq) k = MatMul(p, wk) v = MatMul(p, wv)"
LENGTHS = "com.microsoft.MultiHeadAttention<num_heads=3>(q, k, v, , lengths)"
OUT = "y = MatMul(a, wo)"
PLACES = """m = Shape<start=1, end=2>(p) l = Squeeze(m) i = Range(zero, l, one) c = Unsqueeze(n, axis)
    allowed = Less(i, c) r = Where(allowed, yes, no)"""
BIAS = f"""{PLACES} u = Unsqueeze(r, axes) s = Shape<start=1, end=2>(x) b = Shape<start=0, end=1>(x)
    e = Concat<axis=0>(b, second, s, m) bias = Expand(u, e)
    a = com.microsoft.MultiHeadAttention<num_heads=3>(q, k, v, , , bias)"""
COUNTS = [5, 1, 8]


def denoiser(body: str) -> ir.Model:
    inputs = "float[B,S,6] x, float[B,L,5] p, int32[B] lengths, int64[B] n, float[1,12] t"
    model = graph(inputs, "float[B,S,7] y", body, **used(body, WEIGHTS))
    for node in model.graph:
        if node.domain == MICROSOFT and (query := node.inputs[0]) is not None:
            node.outputs[0].type, node.outputs[0].shape = query.type, query.shape
            infer_shapes(model)
    return model


def result(model: ir.Model, tokens: int = 8) -> Array:
    counts = np.minimum(COUNTS, tokens)
    feeds = {
        "x": normal(3, 9, 6, seed=20),
        "p": normal(3, tokens, 5, seed=21),
        "lengths": counts.astype(np.int32),
        "n": counts.astype(np.int64),
        "t": normal(1, 12, seed=22),
    }
    return run(model, feeds)["y"]


def check(model: ir.Model, attentions: int = 1) -> ir.Model:
    """Return the model with projections absorbed, which gives the same for few tokens and many."""
    made = copied(model)
    assert absorb_projections(made, ["p", "lengths", "n"]) == attentions
    tidy(made)
    assert operators(made, "MultiHeadAttention") == {"MultiHeadAttention": 0}
    for tokens in (1, 8, 50):
        np.testing.assert_allclose(result(made, tokens), result(model, tokens), rtol=1e-5, atol=1e-5)
    return made


@pytest.mark.parametrize(
    "body",
    [
        f"{PROJECTED} a = {LENGTHS} {OUT}",
        f"q0 = MatMul(x, wq) q = Add(q0, bq) k = MatMul(p, wk) v = MatMul(p, wv) a = {LENGTHS} {OUT}",
        f"q0 = MatMul(x, wq) q = Add(bq, q0) k = MatMul(p, wk) v = MatMul(p, wv) {BIAS} {OUT}",
        f"{PROJECTED} {BIAS} {OUT}",
        # A row that is computed at each step, of what is no prompt.
        f"""f = MatMul(t, row) g = Reshape(f, twelve) q0 = MatMul(x, wq) q = Add(q0, g) k = MatMul(p, wk)
        v = MatMul(p, wv) a = {LENGTHS} {OUT}""",
        f"{PROJECTED} a = {LENGTHS.replace('num_heads=3', 'num_heads=3, scale=0.7')} {OUT}",
    ],
    ids=["lengths", "bias-of-queries", "bias-and-mask", "mask", "row-of-step", "scale"],
)
def test_attention_to_a_prompt_reads_products(body: str) -> None:
    check(denoiser(body))


def test_all_attentions_are_of_one_product_of_rows() -> None:
    """In groups: a kernel is given so many addresses by value, and more would be copied from the host."""
    count = MOST_OUTPUTS + 2
    blocks = [
        f"q{i} = MatMul(x, wq) f{i} = Add(q{i}, bq) a{i} = {LENGTHS.replace('(q,', f'(f{i},')} y{i} = MatMul(a{i}, wo)"
        for i in range(count)
    ]
    total = ", ".join(f"y{i}" for i in range(count))
    model = denoiser(f"k = MatMul(p, wk) v = MatMul(p, wv) {' '.join(blocks)} y = Sum({total})")
    made = copied(model)
    assert absorb_projections(made, ["p", "lengths"]) == count
    tidy(made)
    widest = max(len(node.inputs) for node in made.graph if node.op_type == "Concat")
    assert widest <= MOST_OUTPUTS
    assert operators(made, "Split") == {"Split": 2}
    np.testing.assert_allclose(result(made), result(model), rtol=1e-4, atol=1e-4)


def test_products_multiply_as_many_rows_as_they_have() -> None:
    """Where one is repeated for the other, ONNX Runtime copies addresses from the host, which no capture survives."""
    made = check(
        denoiser(f"q0 = MatMul(x, wq) q = Add(q0, bq) k = MatMul(p, wk) v = MatMul(p, wv) a = {LENGTHS} {OUT}")
    )
    infer_shapes(made)
    for node in made.graph:
        if node.op_type == "MatMul":
            left, right = (value.shape for value in node.inputs if value is not None)
            assert left is not None
            assert right is not None
            assert len(right) == 2 or list(left[:-2]) == list(right[:-2])


@pytest.mark.parametrize(
    "body",
    [
        f"{PROJECTED} a = com.microsoft.MultiHeadAttention<num_heads=3>(q, k, v) {OUT}",
        f"{PROJECTED} a = {LENGTHS.replace('num_heads=3', 'num_heads=3, unidirectional=1')} {OUT}",
        # Keys of the image, and of a mask that is the image's.
        f"q = MatMul(x, wq) k = MatMul(x, wq) v = MatMul(x, wq) a = {LENGTHS} {OUT}",
        # Read before the projection too, or not projected at all.
        f"{PROJECTED} a = {LENGTHS} y0 = MatMul(a, wo) z = ReduceMean<keepdims=1>(a) y = Add(y0, z)",
        f"{PROJECTED} a = {LENGTHS} y = ReduceMean<keepdims=1>(a)",
        # A query that is more than projected, or by what is no weight.
        f"q0 = MatMul(x, wq) q = Relu(q0) k = MatMul(p, wk) v = MatMul(p, wv) a = {LENGTHS} {OUT}",
        f"w = Relu(wq) h = MatMul(t, row) q0 = MatMul(x, w) q = Mul(q0, h) k = MatMul(p, wk) v = MatMul(p, wv) "
        f"a = {LENGTHS} {OUT}",
        # A bias that differs from query to query.
        f"{PROJECTED} b0 = MatMul(q, row) z = Transpose<perm=[0,2,1]>(k) bb = MatMul(b0, z) bias = Unsqueeze(bb, axis) "
        f"a = com.microsoft.MultiHeadAttention<num_heads=3>(q, k, v, , , bias) {OUT}",
    ],
    ids=["no-mask", "causal", "image", "read-twice", "not-projected", "relu", "no-weight", "bias"],
)
def test_what_is_no_attention_to_a_masked_prompt_is_left(body: str) -> None:
    model = denoiser(body)
    before = text_of(model)
    assert absorb_projections(model, ["p", "lengths", "n"]) == 0
    assert text_of(model) == before


def test_a_prompt_that_changes_from_step_to_step_is_left() -> None:
    model = denoiser(f"{PROJECTED} a = {LENGTHS} {OUT}")
    assert absorb_projections(model, ["p"]) == 0
    assert absorb_projections(model, ["lengths"]) == 0
    assert absorb_projections(model, ["p", "lengths"]) == 1
