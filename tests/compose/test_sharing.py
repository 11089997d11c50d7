"""Values that are equal for all copies of an image are computed once, with the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import copied, graph, int64, normal, operators, text_of, used
from support.steps import CONFIG, feeds, run

import sdonnx.compose.step
from sdonnx.compose import compose_step
from sdonnx.compose.rowwise import RowRules
from sdonnx.graph.edit import MICROSOFT, dims
from sdonnx.graph.passes import infer_shapes

SIZES = ((1, 2), (2, 2), (3, 1), (1, 1), (2, 3))
WEIGHTS = {
    "conv": normal(4, 4, 3, 3),
    "w": normal(4, 4, seed=1),
    "u": normal(4, 4, seed=2),
    "wide": normal(4, 8, seed=3),
    "bias": normal(4, seed=4),
    "g": normal(4, seed=5),
    "b": normal(4, seed=6),
    "position": normal(1, 4, seed=7),
    "tokens": int64([0, 4, -1]),
    "flat": int64([-1, 4]),
    "joined": int64([1, -1, 4]),
    "zero": int64([0]),
    "one": int64([1]),
    "two": int64([2]),
    "none": int64(0),
    "outer": int64([1, 2]),
    "four": int64([4]),
    "first": np.array(0, np.float32),
    "unit": np.array(1, np.float32),
}
ATTENTIONS = {
    "MultiHeadAttention": "a = com.microsoft.MultiHeadAttention<num_heads=2>(y, k, k)",
    "Attention": "a = Attention<q_num_heads=2, kv_num_heads=2>(y, k, k)",
}


def denoiser(body: str, attention: str = "MultiHeadAttention", end: str = "z = Add(a, m)") -> ir.Model:
    """Return a denoiser: tokens x of the image, `body` to y, self-attention, attention to the prompt, and an image."""
    text = f"""t = Reshape(sample, tokens) x = Transpose<perm=[0,2,1]>(t) {body} k = MatMul(y, w)
        {ATTENTIONS[attention]} q = MatMul(a, u) c = MatMul(encoder_hidden_states, w)
        m = com.microsoft.MultiHeadAttention<num_heads=2>(q, c, c) {end}
        back = Transpose<perm=[0,2,1]>(z) s = Shape(sample) out_sample = Reshape(back, s)"""
    model = graph(
        "float[batch_size,4,height,width] sample, float[1] timestep, float[batch_size,S,4] encoder_hidden_states",
        "float[batch_size,4,height,width] out_sample",
        text,
        **used(text, WEIGHTS),
    )
    for node in model.graph:
        first = node.inputs[0] if node.inputs else None
        if node.domain == MICROSOFT and first is not None and node.outputs[0].shape is None:
            for output in node.outputs:
                output.type, output.shape = first.type, first.shape  # all of these have the shape of their first input
            infer_shapes(model)
    return model


def composed(model: ir.Model, monkeypatch: pytest.MonkeyPatch, shares: bool) -> ir.Model:
    step = copied(model)
    with monkeypatch.context() as patch:
        if not shares:
            patch.setattr(sdonnx.compose.step, "share_images", lambda *_: False)
        compose_step(step, CONFIG)
    return step


def check(model: ir.Model, monkeypatch: pytest.MonkeyPatch) -> ir.Model:
    """Return the step graph; check that results for all sizes are the same as without sharing."""
    whole, shared = (composed(model, monkeypatch, shares) for shares in (False, True))
    for batch, copies in SIZES:
        given = feeds(batch, copies)
        np.testing.assert_allclose(
            run(shared, given)["new_state"], run(whole, given)["new_state"], rtol=2e-5, atol=2e-5
        )
    return shared


def first_attention(step: ir.Model) -> Any:
    """Return the name of the size of the first attention's first axis."""
    node = next(node for node in step.graph if "Attention" in node.op_type)
    return str((dims(node.outputs[0]) or (None,))[0])


ROW_BY_ROW = [
    "y = Add(x, bias)", "y = Mul(x, x)", "y = Sigmoid(x)", "y = LayerNormalization(x, g, b)", "y = Softmax(x)",
    "y = MatMul(x, w)", "y = com.microsoft.SkipLayerNormalization(x, x, g, b)", "y = Add(x, position)",
    "y = com.microsoft.FastGelu(x, bias)", "f = Reshape(x, flat) h = MatMul(f, w) i = Shape(x) y = Reshape(h, i)",
    "f = Reshape(x, flat) h = Gemm(f, w, bias) i = Shape(x) y = Reshape(h, i)",
    "f = Reshape(x, flat) h = Gemm(f, w, f) i = Shape(x) y = Reshape(h, i)",
    "p, r = Split<axis=2, num_outputs=2>(x) y = Concat<axis=2>(r, p)",
    "p = Transpose<perm=[0,2,1]>(x) r = MatMul(x, p) h = Softmax(r) y = MatMul(h, x)",
    "y = com.microsoft.FusedMatMul<alpha=0.5, transB=1>(x, w)",
    "e = Unsqueeze(x, one) y = Squeeze(e, one)", "h = MatMul(x, wide) y = Slice(h, zero, four, two)",
    "i = Gather<axis=2>(x, zero) y = Mul(x, i)",
    "h = Conv<pads=[1,1,1,1]>(sample, conv) i = Reshape(h, tokens) y = Transpose<perm=[0,2,1]>(i)",
    "i = Shape(x) e = Expand(bias, i) y = Add(x, e)",
    # Values that depend only on the number of images: a timestep for each.
    "n = Shape<start=0, end=1>(sample) e = Expand(timestep, n) h = Unsqueeze(e, outer) y = Mul(x, h)",
    "n = Shape<start=0, end=1>(sample) e = Expand(timestep, n) f = Unsqueeze(e, one) o = Unsqueeze(bias, zero)"
    " h = MatMul(f, o) i = Gemm(h, w, bias) j = Unsqueeze(i, one) v = Add(x, j) y = Mul(v, j)",
    # Sizes that are used as numbers count all rows.
    "n = Shape<start=0, end=1>(x) f = Cast<to=1>(n) y = Mul(x, f)",
    "n = Shape<start=1>(x) i = Gather(n, none) f = Cast<to=1>(i) y = Div(x, f)",
    "n = Shape(x) i = Gather(n, none) f = Cast<to=1>(i) y = Div(x, f)",
    "n = Shape<start=-3, end=-1>(x) f = Cast<to=1>(n) p = ReduceMean<keepdims=1>(f) y = Mul(x, p)",
]  # fmt: skip


@pytest.mark.parametrize("body", ROW_BY_ROW)
def test_row_by_row_operators_are_shared(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_attention(check(denoiser(body), monkeypatch)) == "batch"


DIFFERENT = [
    "i = CumSum(x, none) y = Add(x, i)",
    "p = Transpose<perm=[1,0,2]>(x) h = Softmax<axis=1>(p) y = Transpose<perm=[1,0,2]>(h)",
    "h = Softmax<axis=0>(x) y = Add(x, h)",
    "m0 = ReduceMean<keepdims=1>(x, zero) y = Add(x, m0)",
    "i = Gather<axis=0>(x, zero) y = Add(x, i)",
    "r = Concat<axis=0>(x, x) n = Shape<start=0, end=1>(x) o = Add(n, one) y = Slice(r, one, o, zero)",
    "j = Reshape(x, joined) h = Softmax<axis=1>(j) i = Shape(x) y = Reshape(h, i)",
    "n = Shape<start=0, end=1>(x) i = Squeeze(n) l = Cast<to=1>(i) r = Range(first, l, unit) e = Unsqueeze(r, outer)"
    " y = Add(x, e)",
    "h = ReduceMean<keepdims=1>(encoder_hidden_states, one) y = Add(x, h)",
    "n = Shape<start=0, end=1>(encoder_hidden_states) e = Expand(timestep, n) h = Unsqueeze(e, outer) y = Mul(x, h)",
]


@pytest.mark.parametrize("body", DIFFERENT)
def test_operators_that_mix_images_or_read_a_prompt_are_not_shared(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_attention(check(denoiser(body), monkeypatch)) == "batch_size"


@pytest.mark.parametrize(("perm", "keeps"), [([0, 2, 1], True), ([1, 0, 2], False), ([2, 1, 0], False)])
def test_only_transpositions_of_other_axes_keep_rows(perm: list[int], keeps: bool) -> None:
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 2, 2]))
    assert RowRules({value: True}, set()).keeps_rows(ir.node("Transpose", [value], {"perm": perm})) is keeps


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_to_the_prompt_reads_all_copies(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = check(denoiser("y = MatMul(x, w)", attention), monkeypatch)
    sizes = [str((dims(node.outputs[0]) or ())[0]) for node in shared.graph if "Attention" in node.op_type]
    assert sizes == ["batch", "batch_size"]
    # The values that the rest reads are copied; the images themselves are not among them.
    assert operators(shared, "Expand") == {"Expand": 2}


def test_a_residual_is_added_to_both_copies_of_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """SkipLayerNormalization reads it once, as either input; it is repeated only for several images."""
    for order in ("m, a", "a, m"):
        end = f"n, i, j, z = com.microsoft.SkipLayerNormalization({order}, g, b)"
        shared = check(denoiser("y = MatMul(x, w)", end=end), monkeypatch)
        norm = next(node for node in shared.graph if node.op_type == "SkipLayerNormalization")
        first, skip = norm.inputs[:2]
        assert first is not None
        assert skip is not None
        producers = [producer.op_type for value in (first, skip) if (producer := value.producer()) is not None]
        assert producers == ["MultiHeadAttention", "Reshape"]


def test_a_skip_of_one_row_needs_a_residual_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other term has one row itself, so the residual must have all rows."""
    end = (
        "p = ReduceMean<keepdims=0>(m, outer) l = ReduceMean<keepdims=1>(p, zero) h = Mul(l, g) "
        "i = ReduceMean<keepdims=1>(timestep, zero) o = Shape<start=1>(a) d = Concat<axis=0>(one, o) e = Expand(i, d) "
        "z = com.microsoft.SkipLayerNormalization(a, e, h, b)"
    )
    assert first_attention(check(denoiser("y = MatMul(x, w)", end=end), monkeypatch)) == "batch"


@pytest.mark.parametrize("norm", ["z = com.microsoft.SkipLayerNormalization(a, q, h, b)",
                                  "z = com.microsoft.SkipLayerNormalization(a, a, h, b)"])  # fmt: skip
def test_a_norm_of_two_shared_values_has_all_rows(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights depend on a prompt, so it is not shared, and both inputs must have all rows."""
    scale = "p = ReduceMean<keepdims=0>(m, outer) l = ReduceMean<keepdims=1>(p, zero) h = Mul(l, g)"
    shared = check(denoiser("y = MatMul(x, w)", end=f"{scale} {norm}"), monkeypatch)
    assert first_attention(shared) == "batch"


UNCHANGED = {
    "no attention": ("float[batch_size,4,height,width] sample", "t0 = Sigmoid(sample) out_sample = Add(t0, p)"),
    "a number of images": (
        "float[2,4,height,width] sample",
        "t0 = Reshape(sample, tokens) a = com.microsoft.MultiHeadAttention<num_heads=2>(t0, t0, t0) s = Shape(sample)"
        " b0 = Reshape(a, s) out_sample = Add(b0, p)",
    ),
    "a graph within": (
        "float[batch_size,4,height,width] sample",
        "t0 = Reshape(sample, tokens) x0 = Transpose<perm=[0,2,1]>(t0) yes = Cast<to=9>(timestep) l = Squeeze(yes)"
        " a = com.microsoft.MultiHeadAttention<num_heads=2>(x0, x0, x0)"
        " r = If(l) <then_branch = then () => (float[N,M,4] i) { i = Identity(a) },"
        " else_branch = other () => (float[N,M,4] j) { j = Neg(a) }> b0 = Transpose<perm=[0,2,1]>(r)"
        " s = Shape(sample) c0 = Reshape(b0, s) out_sample = Add(c0, p)",
    ),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_graphs_without_gain_are_unchanged(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, body = UNCHANGED[case]
    text = f"h0 = ReduceMean<keepdims=1>(encoder_hidden_states, outer) p = Unsqueeze(h0, two) {body}"
    shape = sample.removesuffix(" sample")
    model = graph(
        f"{sample}, float[1] timestep, float[batch_size,S,4] encoder_hidden_states", f"{shape} out_sample", text,
        **used(text, WEIGHTS),
    )  # fmt: skip
    assert text_of(composed(model, monkeypatch, True)) == text_of(composed(model, monkeypatch, False))


def test_batches_of_one_name_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime assumes that two sizes of one name are equal."""
    model = denoiser("y = MatMul(x, w)")
    for value in model.graph.inputs:
        if value.name != "timestep":
            value.shape = ir.Shape(["batch", *(dims(value) or ())[1:]])
    assert text_of(composed(model, monkeypatch, True)) == text_of(composed(model, monkeypatch, False))


def test_a_unet_shares_its_first_self_attention(micro_cpu: Path) -> None:
    step = ir.load(micro_cpu / "unet" / "step.onnx")
    attentions = [node for node in step.graph if "Attention" in node.op_type]
    sizes = [str((dims(node.outputs[0]) or ())[0]) for node in attentions]
    assert sizes == ["batch", *["batch_size"] * (len(sizes) - 1)]
