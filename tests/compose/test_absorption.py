"""Absorbed projections of attention to short prompts return the same numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from support.graphs import Array, copied, graph, int64, normal, operators, text_of, used
from support.steps import run

from sdonnx.compose import absorb_projections
from sdonnx.graph.edit import MAX_SPLIT_OUTPUTS, MICROSOFT, constant
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
    "cube": normal(1, 6, 12, seed=8),
    "flat": normal(12, seed=9),
    "left": normal(3, 9, 9, seed=10),
    "each": normal(9, 12, seed=11),
    "narrow": normal(5, 9, seed=14),
    "narrow_out": normal(9, 7, seed=15),
    "qkv": normal(36, seed=12),
    "back": normal(7, 12, seed=13),
    "ends": int64([0, 1]),
    "half": np.array(0.5, np.float32),
    "flag": np.array(True),
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


def denoiser(body: str, more: str = "int32[B,L] grid") -> ir.Model:
    inputs = f"float[B,S,6] x, float[B,L,5] p, int32[B] lengths, int64[B] n, float[1,12] t, {more}"
    model = graph(inputs, "float[B,S,E] y", body, **used(body, WEIGHTS))
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
        "grid": np.ones((3, tokens), np.int32),
        "p2": normal(3, 6, 5, seed=23),
        "others": np.array([2, 3, 1], np.int32),
    }
    return run(model, feeds)["y"]


def check(model: ir.Model, attentions: int = 1) -> ir.Model:
    """Return the model with absorbed projections; check that results for few and many tokens are the same."""
    made = copied(model)
    assert absorb_projections(made, ["p", "lengths", "n"]) == attentions
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
        # A bias of queries that is computed at each step, not from the prompt.
        f"""f = MatMul(t, row) g = Reshape(f, twelve) q0 = MatMul(x, wq) q = Add(q0, g) k = MatMul(p, wk)
        v = MatMul(p, wv) a = {LENGTHS} {OUT}""",
        f"{PROJECTED} a = {LENGTHS.replace('num_heads=3', 'num_heads=3, scale=0.7')} {OUT}",
        # Keys that also depend on constants.
        f"q = MatMul(x, wq) c = Neg(bq) k0 = MatMul(p, wk) k = Add(k0, c) v = MatMul(p, wv) a = {LENGTHS} {OUT}",
    ],
    ids=["lengths", "bias-of-queries", "bias-and-mask", "mask", "row-of-step", "scale", "constants"],
)
def test_projections_around_attention_to_a_prompt_are_absorbed(body: str) -> None:
    check(denoiser(body))


def test_biases_of_all_attentions_are_multiplied_in_groups() -> None:
    """A kernel receives a limited number of addresses by value; more would be copied from the host."""
    count = MAX_SPLIT_OUTPUTS + 2
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
    assert widest <= MAX_SPLIT_OUTPUTS
    assert operators(made, "Split") == {"Split": 2}
    np.testing.assert_allclose(result(made), result(model), rtol=1e-4, atol=1e-4)


def test_products_do_not_broadcast_their_batch() -> None:
    """Where a factor is broadcast, ONNX Runtime copies addresses from the host, which a CUDA graph cannot capture."""
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


PLAIN = f"{PROJECTED} a = {LENGTHS} {OUT}"


@pytest.mark.parametrize(
    "body",
    [
        f"{PROJECTED} a = com.microsoft.MultiHeadAttention<num_heads=3>(q, k, v) {OUT}",
        PLAIN.replace("num_heads=3", "num_heads=3, unidirectional=1"),
        PLAIN.replace("(q, k, v, , lengths)", "(q, k, v, qkv, lengths)"),
        PLAIN.replace("(q, k, v, , lengths)", "(q, k, v, , grid)"),
        PLAIN.replace("wv", "narrow").replace("wo", "narrow_out"),
        f"{PROJECTED} {BIAS} {OUT}".replace("(q, k, v, , , bias)", "(q, k, v, , lengths, bias)"),
        # Keys, values or both computed from the image.
        f"q = MatMul(x, wq) k = MatMul(x, wq) v = MatMul(x, wq) a = {LENGTHS} {OUT}",
        PLAIN.replace("k = MatMul(p, wk)", "k = MatMul(x, wq)"),
        PLAIN.replace("v = MatMul(p, wv)", "v = MatMul(x, wq)"),
        # The result is also read before the projection, or is not projected.
        f"{PROJECTED} a = {LENGTHS} y0 = MatMul(a, wo) z = ReduceMean<keepdims=1>(a) y = Add(y0, z)",
        f"{PROJECTED} a = {LENGTHS} y = ReduceMean<keepdims=1>(a)",
        # A factor that is not a weight, or a weight without two axes.
        PLAIN.replace("MatMul(x, wq)", "MatMul(x, w)").replace("q =", "w = Mul(wq, t) q =", 1),
        PLAIN.replace("MatMul(a, wo)", "MatMul(a, w)").replace("y =", "h = Transpose(t) w = Mul(wo, h) y ="),
        PLAIN.replace("wq", "cube"),
        PLAIN.replace("wo", "flat"),
        # Attention as the second factor of the product.
        f"{PROJECTED} a = {LENGTHS} y = MatMul(left, a)",
        # A query with an activation, or to which a matrix is added.
        f"q0 = MatMul(x, wq) q = Relu(q0) k = MatMul(p, wk) v = MatMul(p, wv) a = {LENGTHS} {OUT}",
        f"q0 = MatMul(x, wq) q = Add(q0, each) k = MatMul(p, wk) v = MatMul(p, wv) a = {LENGTHS} {OUT}",
        # A bias that differs from query to query.
        f"{PROJECTED} b0 = MatMul(q, row) z = Transpose<perm=[0,2,1]>(k) bb = MatMul(b0, z) bias = Unsqueeze(bb, axis) "
        f"a = com.microsoft.MultiHeadAttention<num_heads=3>(q, k, v, , , bias) {OUT}",
    ],
    ids=["no-mask", "causal", "bias-input", "mask-of-two-axes", "other-width", "two-masks", "image", "keys",
         "values", "read-twice", "not-projected", "no-weight", "no-weight-behind", "three-axes",
         "three-axes-behind", "other-factor", "relu", "more-than-a-row", "bias"],
)  # fmt: skip
def test_other_attentions_are_unchanged(body: str) -> None:
    model = denoiser(body)
    before = text_of(model)
    assert absorb_projections(model, ["p", "lengths", "n", "grid"]) == 0
    assert text_of(model) == before


def test_a_prompt_that_differs_from_step_to_step_is_unchanged() -> None:
    model = denoiser(PLAIN)
    assert absorb_projections(model, ["p"]) == 0
    assert absorb_projections(model, ["lengths"]) == 0
    assert absorb_projections(model, ["p", "lengths"]) == 1


@pytest.mark.parametrize(
    "other",
    [
        LENGTHS.replace("lengths", "others"),
        LENGTHS.replace("num_heads=3", "num_heads=2, scale=0.5"),  # the default scale of three heads of 4 channels
        LENGTHS.replace("num_heads=3", "num_heads=3, scale=0.3"),
        LENGTHS.replace("(q,", "(q2,"),
        LENGTHS.replace("(q, k, v", "(q, k2, v2"),
    ],
    ids=["mask", "heads", "scale", "row", "prompt"],
)
def test_different_attentions_are_not_grouped(other: str) -> None:
    body = f"""q0 = MatMul(x, wq) q = Add(q0, bq) q2 = MatMul(x, wq) k = MatMul(p, wk) v = MatMul(p, wv)
        k2 = MatMul(p2, wk) v2 = MatMul(p2, wv) a = {LENGTHS} b = {other} c = MatMul(a, wo) d = MatMul(b, wo)
        y = Add(c, d)"""
    model = denoiser(body, "float[B,L2,5] p2, int32[B] others")
    made = copied(model)
    assert absorb_projections(made, ["p", "p2", "lengths", "others"]) == 2
    np.testing.assert_allclose(result(made), result(model), rtol=1e-5, atol=1e-5)


def test_attentions_of_two_types_are_not_grouped() -> None:
    """This occurs where one block stays in float32."""
    halves = {name: f"{name}h" for name in ("wq", "wk", "wv", "wo", "bq")}
    cast = " ".join(f"{half} = Cast<to=10>({name})" for name, half in halves.items())
    body = f"""q0 = MatMul(x, wq) q = Add(q0, bq) k = MatMul(p, wk) v = MatMul(p, wv) a = {LENGTHS} c = MatMul(a, wo)
        xh = Cast<to=10>(x) ph = Cast<to=10>(p) r0 = MatMul(xh, wqh) r = Add(r0, bqh) l = MatMul(ph, wkh)
        w = MatMul(ph, wvh) b = com.microsoft.MultiHeadAttention<num_heads=3>(r, l, w, , lengths) dh = MatMul(b, woh)
        d = Cast<to=1>(dh) y = Add(c, d)"""
    model = denoiser(f"{cast} {body}")
    fold(model)
    made = copied(model)
    assert absorb_projections(made, ["p", "lengths"]) == 2
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    np.testing.assert_allclose(result(made), result(model), rtol=2e-2, atol=2e-2)


def fold(model: ir.Model) -> None:
    """Fold casts of constants, as a conversion to half precision does."""
    for node in list(model.graph):
        if node.op_type == "Cast" and node.inputs[0] in model.graph.initializers.values():
            given, held = node.inputs[0], node.outputs[0]
            assert given is not None
            assert given.const_value is not None
            assert held.name is not None
            value = constant(model.graph, given.const_value.numpy(), np.float16, f"{held.name}_held")
            held.replace_all_uses_with(value)
            model.graph.remove(node, safe=True)


def test_bfloat16_is_unchanged() -> None:
    body = f"""xb = Cast<to=16>(x) pb = Cast<to=16>(p) q = MatMul(xb, wqb) k = MatMul(pb, wkb) v = MatMul(pb, wvb)
        a = {LENGTHS} yb = MatMul(a, wob) y = Cast<to=1>(yb)"""
    model = denoiser(body)
    for name, weight in (("wqb", "wq"), ("wkb", "wk"), ("wvb", "wv"), ("wob", "wo")):
        narrow = WEIGHTS[weight].astype(ir.DataType.BFLOAT16.numpy())
        value = constant(model.graph, narrow, narrow.dtype, f"{name}_held")
        for node in model.graph:
            for index, read in enumerate(node.inputs):
                if read is not None and read.name == name:
                    node.replace_input_with(index, value)
    infer_shapes(model)
    assert absorb_projections(model, ["p", "lengths"]) == 0


def test_a_bias_computed_from_an_attention_is_unchanged() -> None:
    body = f"""q0 = MatMul(x, wq) q = Add(q0, bq) k = MatMul(p, wk) v = MatMul(p, wv) a = {LENGTHS} c = MatMul(a, wo)
        m = ReduceMean<keepdims=0>(c, ends) r0 = MatMul(m, back) r = Reshape(r0, twelve) s0 = MatMul(x, wq)
        s = Add(s0, r) b = {LENGTHS.replace("(q,", "(s,")} d = MatMul(b, wo) y = Add(c, d)"""
    model = denoiser(body)
    made = copied(model)
    assert absorb_projections(made, ["p", "lengths"]) == 1
    np.testing.assert_allclose(result(made), result(model), rtol=1e-5, atol=1e-5)


def test_values_read_by_subgraphs_count_as_inputs() -> None:
    """They are not among the inputs of the node that holds the subgraph."""
    branches = (
        "then_branch = t () => (float[B,L,5] z) { z = Mul(p, half) }, else_branch = e () => (float[B,L,5] z) "
        "{ m = ReduceMean<keepdims=1>(x) z = Add(p, m) }"
    )
    model = denoiser(f"g = If<{branches}>(flag) h = Add(p, g) {PROJECTED.replace('p,', 'h,')} a = {LENGTHS} {OUT}")
    assert absorb_projections(model, ["p", "lengths"]) == 0
