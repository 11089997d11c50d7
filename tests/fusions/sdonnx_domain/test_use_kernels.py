"""Nodes are replaced by our own operators where their contracts accept them and it is worth it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import copied, graph, normal
from support.replacements import failures, own, swapped
from support.steps import step_around

from sdonnx.fusions.sdonnx_domain.attention_rules import MAX_TOKENS, MIN_TOKENS
from sdonnx.fusions.sdonnx_domain.use_kernels import RULES, use_kernels
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.operators.operator_table import OUR_CONTRACTS
from sdonnx.operators.sdonnx_domain.attention import HEAD_SIZES

GROUP_NORM = "com.microsoft.GroupNorm<groups=8, epsilon=0.001, channels_last=1, activation=1>"
SKIP_GROUP_NORM = GROUP_NORM.replace("GroupNorm", "SkipGroupNorm", 1)


def half(*shape: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    return normal(*shape, seed=seed).astype(np.float16)


VECTOR, WEIGHT = half(64), half(64, 64, seed=1) / np.float16(8)
NORM = {"g": normal(64), "b": normal(64, seed=2)}


def test_layer_norm() -> None:
    body = "y = LayerNormalization<axis=-1, epsilon=0.001>(x, v, w)"
    model = graph("float16[B,S,64] x", "float16[B,S,64] y", body, v=VECTOR, w=half(64, seed=3))
    after, fired = swapped(model)
    assert fired == {"LayerNormalizationToOwnLayerNorm": 1}
    (node,) = after.graph
    assert node.attributes.get_float("epsilon") == pytest.approx(1e-3)
    assert after.graph.opset_imports[OUR_DOMAIN] == 1


def test_layer_norm_without_a_shift_and_with_another_name_of_the_last_axis() -> None:
    model = graph("float16[B,S,64] x", "float16[B,S,64] y", "y = LayerNormalization<axis=2>(x, v)", v=VECTOR)
    assert swapped(model)[1] == {"LayerNormalizationToOwnLayerNorm": 1}


GATED = "t = Mul(w, gate) p = MatMul(x, t)"
SHAPES = "float16[B,S,64] x, float16[B,S,64] r, float16[64] gate"
INNER = "float16[64,64] t, float16[B,S,64] p"


@pytest.mark.parametrize("terms", ["p, r, v, u, c", "r, p, v, u", "p, r, v"])
@pytest.mark.parametrize("outputs", ["y", "y, , , s"])
@pytest.mark.parametrize("scaling", ["Mul(w, gate)", "Mul(gate, w)"])
def test_gate_before_a_norm(terms: str, outputs: str, scaling: str) -> None:
    body = f"t = {scaling} p = MatMul(x, t) {outputs} = com.microsoft.SkipLayerNormalization<epsilon=0.001>({terms})"
    results = ", ".join(f"float16[B,S,64] {name}" for name in outputs.split(", ") if name)
    model = graph(SHAPES, results, body, INNER, w=WEIGHT, v=VECTOR, u=half(64, seed=3), c=half(64, seed=4))
    after, fired = swapped(model)
    assert fired == {"SkipLayerNormalizationToOwnSkipLayerNorm": 1, "MatMulToOwnMatMul": 1}
    assert [(node.domain, node.op_type) for node in after.graph] == [
        (OUR_DOMAIN, "MatMul"),
        (OUR_DOMAIN, "SkipLayerNorm"),
    ]
    assert after.graph[1].attributes.get_float("epsilon") == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "body",
    [
        "p = MatMul(x, w) y = com.microsoft.SkipLayerNormalization(p, r, v)",
        f"{GATED} q = com.microsoft.SkipLayerNormalization(p, r, v) y = Mul(p, q)",
        "t = Mul(w, column) p = MatMul(x, t) y = com.microsoft.SkipLayerNormalization(p, r, v)",
        "t = Mul(w, w) p = MatMul(x, t) y = com.microsoft.SkipLayerNormalization(p, r, v)",
    ],
    ids=["no gate", "two readers", "gate of rows", "no vector"],
)
def test_norms_with_a_skip_that_stay(body: str) -> None:
    model = graph(SHAPES, "float16[B,S,64] y", body, INNER, w=WEIGHT, v=VECTOR, column=half(64, 1))
    assert failures(model) == ()


def test_bias_split_gelu() -> None:
    model = graph("float16[B,S,2560] x", "float16[B,S,1280] y", "y = com.microsoft.BiasSplitGelu(x, b)", b=half(2560))
    assert swapped(model)[1] == {"BiasSplitGeluToOwnBiasSplitGelu": 1}


@pytest.mark.parametrize("width", [64, 2048])
def test_geglu_of_a_width_without_a_kernel_of_onnxruntime(width: int) -> None:
    body = "t = Add(x, b) v, g = Split<axis=2, num_outputs=2>(t) h = Gelu(g) y = Mul(h, v)"
    model = graph(f"float16[B,S,{width}] x", f"float16[B,S,{width // 2}] y", body, b=half(width))
    after, fired = swapped(model)
    assert fired == {"GegluToOwnBiasSplitGelu": 1}
    assert own(after) == ["BiasSplitGelu"]


def test_group_norm() -> None:
    shapes = "float16[B,H,W,64] x", "float16[B,H,W,64] y"
    after, fired = swapped(graph(*shapes, f"y = {GROUP_NORM}(x, g, b)", **NORM), latent_size=32)
    assert fired == {"GroupNormToOwnGroupNorm": 1}
    (node,) = after.graph
    assert {name: each.value for name, each in node.attributes.items()} == {
        "groups": 8, "activation": 1, "epsilon": pytest.approx(1e-3)
    }  # fmt: skip


@pytest.mark.parametrize("skip", ["B,H,W,64", "B,1,1,64", "B,64"])
@pytest.mark.parametrize("outputs", ["y", "y, s"])
def test_skip_group_norm(skip: str, outputs: str) -> None:
    results = ", ".join(f"float16[B,H,W,64] {name}" for name in outputs.split(", "))
    body = f"{outputs} = {SKIP_GROUP_NORM}(x, g, b, r, c)"
    model = graph(f"float16[B,H,W,64] x, float16[{skip}] r", results, body, **NORM, c=VECTOR)
    assert swapped(model, latent_size=32)[1] == {"SkipGroupNormToOwnGroupNorm": 1}


ROW = "g0 = Gather<axis=0>(t, i) e = Expand(g0, z)"


def row_graph(body: str) -> ir.Model:
    """Return SkipGroupNorm of x and u (2,64), where z is [2, 192]."""
    text = f"{ROW} {body} y = {SKIP_GROUP_NORM}(x, g, b, u)"
    inner = "float16[1,192] g0, float16[2,192] e, float16[2,64] p0, float16[2,64] p1, float16[2,64] p2"
    model = graph("float16[B,H,W,64] x, float16[N,192] t, int64[1] i", "float16[B,H,W,64] y", text, inner,
                  **NORM, z=np.array([2, 192]), a12=np.array([1, 2]),
                  none=np.array([0]), one=np.array([1]), two=np.array([2]), last=np.array([64]))  # fmt: skip
    return model


@pytest.mark.parametrize("cut", ["", "d = Slice(p{}, none, two, none)"], ids=["all images", "images of one prompt"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_group_norm_reads_a_row_of_a_table(place: int, cut: str) -> None:
    """Rows that depend on the timestep are neither gathered nor repeated nor split."""
    part = "d" if cut else f"p{place}"
    body = f"p0, p1, p2 = Split<axis=1, num_outputs=3>(e) {cut.format(place)} u = Unsqueeze({part}, a12)"
    after, fired = swapped(row_graph(body))
    assert fired == {"SkipGroupNormToOwnGroupNorm": 1}
    (node,) = after.graph
    assert [value.name if value is not None else "" for value in node.inputs] == ["x", "g", "b", "t", "", "i"]
    assert node.attributes.get_int("offset") == 64 * place


@pytest.mark.parametrize(
    "body",
    [
        "p0, p1, p2 = Split<axis=1, num_outputs=3>(e) p = Tanh(p0) u = Unsqueeze(p, a12)",
        "p0, p1, p2 = Split<axis=1, num_outputs=3>(e) d = Slice(p0, none, last, one) u = Unsqueeze(d, a12)",
        "h = Tanh(g0) f = Expand(h, z) p0, p1, p2 = Split<axis=1, num_outputs=3>(f) u = Unsqueeze(p0, a12)",
    ],
    ids=["not the row", "channels", "computed"],
)
def test_rows_that_are_no_row_of_a_table_stay(body: str) -> None:
    after, fired = swapped(row_graph(body))
    assert fired == {"SkipGroupNormToOwnGroupNorm": 1}
    assert {node.op_type for node in after.graph} >= {"Gather", "Expand", "Split", "Unsqueeze"}


def attention(
    inputs: str = "q, k, v",
    attributes: str = "",
    width: int = 72,
    queries: int | str = MIN_TOKENS[72],
    keys: int | str = MIN_TOKENS[72],
    outputs: str = "",
) -> ir.Model:
    """Return a graph of one MultiHeadAttention with one head."""
    lengths = {"q": queries, "k": keys, "v": keys}
    declared = [f"float16[B,{length},{width}] {name}" for name, length in lengths.items()]
    declared += [f"int32[B] {name}" for name in ("counts",) if name in inputs]
    results = [f"float16[B,{queries},{width}] y", *(f"float16[B,1,{keys},{width}] {name}" for name in outputs.split())]
    names = ", ".join(["y", *outputs.split()])
    body = f"{names} = com.microsoft.MultiHeadAttention<num_heads=1{attributes}>({inputs})"
    bias = {"bias": half(3 * width)} if "bias" in inputs else {}
    return graph(", ".join(declared), ", ".join(results), body, **bias)


def self_attention() -> ir.Model:
    body = (
        "q = MatMul(x, a) k = MatMul(x, b) v = MatMul(x, c) y = com.microsoft.MultiHeadAttention<num_heads=1>(q, k, v)"
    )
    products = ", ".join(f"float16[B,S,64] {name}" for name in "qkv")
    return graph("float16[B,S,64] x", "float16[B,S,64] y", body, products, a=WEIGHT, b=WEIGHT, c=WEIGHT)


@pytest.mark.parametrize("attributes", ["", ", scale=0.2"])
def test_attention(attributes: str) -> None:
    after, fired = swapped(attention(attributes=attributes))
    assert fired == {"MultiHeadAttentionToOwnAttention": 1}
    (node,) = after.graph
    assert node.attributes.get_int("num_heads") == 1
    assert node.attributes.get_float("scale", 0.0) == pytest.approx(0.2 if attributes else 0)


@pytest.mark.parametrize("width", HEAD_SIZES)
@pytest.mark.parametrize("keys", [77, "L"])
def test_attention_to_a_caption(width: int, keys: int | str) -> None:
    """The sizes of the image are not needed."""
    model = attention(width=width, queries="S", keys=keys)
    assert use_kernels(model).fired == {"MultiHeadAttentionToOwnAttention": 1}


def test_attention_with_key_counts() -> None:
    model = attention("q, k, v, , counts", keys="L")
    assert use_kernels(model).fired == {"MultiHeadAttentionToOwnAttention": 1}
    assert [each.name for each in model.graph.node(0).inputs if each] == ["q", "k", "v", "counts"]


def test_attention_needs_the_number_of_keys_or_its_name() -> None:
    model = attention()
    for value in model.graph.inputs[1:]:
        value.shape = ir.Shape(["B", None, 72])
    assert [each.reason for each in failures(model, 64)] == ["the number of keys is not known"]


@pytest.mark.parametrize("width", HEAD_SIZES)
def test_short_attention_of_a_sequence_to_itself(width: int) -> None:
    model = attention(width=width, queries=MAX_TOKENS, keys=MAX_TOKENS)
    assert swapped(model)[1] == {"MultiHeadAttentionToOwnAttention": 1}


@pytest.mark.parametrize(("latent_size", "patch_size", "fires"), [(64, 2, True), (62, 2, False), (32, 1, True)])
def test_tokens_follow_from_the_latents_and_the_patches(latent_size: int, patch_size: int, fires: bool) -> None:
    """Shape inference names the rows and columns of patches itself: they are no axes of the graph's inputs."""
    model = attention(queries="S", keys="S")
    (node,) = model.graph
    image = ir.Value(name="image", shape=ir.Shape(["B", 4, "H", "W"]), type=ir.TensorType(ir.DataType.FLOAT16))
    tokens = ir.node("Patches", [image], domain="test")
    tokens.outputs[0].shape = ir.Shape(["B", ir.SymbolicDim("unknown_1*unknown_2"), 72])
    tokens.outputs[0].type = image.type
    model.graph.inputs[:] = [image]
    model.graph.insert_before(node, tokens)
    for index in range(3):
        node.replace_input_with(index, tokens.outputs[0])
    assert bool(use_kernels(model, latent_size, patch_size).fired) == fires


def test_product_by_a_weight() -> None:
    model = graph("float16[B,S,64] x", "float16[B,S,64] y", "y = MatMul(x, w)", w=WEIGHT)
    assert swapped(model)[1] == {"MatMulToOwnMatMul": 1}


def test_product_of_two_tensors_is_no_candidate() -> None:
    model = graph("float16[B,S,64] x, float16[64,64] t", "float16[B,S,64] y", "y = MatMul(x, t)")
    outcome = use_kernels(model)
    assert (outcome.fired, outcome.failures) == ({}, ())


def test_gelu_after_a_product() -> None:
    body = "p = MatMul(x, w) y = com.microsoft.FastGelu(p, v)"
    model = graph("float16[B,S,64] x", "float16[B,S,64] y", body, w=WEIGHT, v=VECTOR)
    after, fired = swapped(model)
    assert fired == {"FastGeluToOwnMatMul": 1}
    (node,) = after.graph
    assert node.attributes.get_int("gelu") == 1


@pytest.mark.parametrize("sum_", ["BiasAdd(p, v, r)", "BiasAdd(r, v, p)"])
def test_residual_after_a_product(sum_: str) -> None:
    body = f"p = MatMul(x, w) y = com.microsoft.{sum_}"
    inputs = "float16[B,S,64] x, float16[B,S,64] r"
    model = graph(inputs, "float16[B,S,64] y", body, "float16[B,S,64] p", w=WEIGHT, v=VECTOR)
    after, fired = swapped(model)
    assert fired == {"BiasAddToOwnMatMul": 1}
    assert own(after) == ["MatMul"]


@pytest.mark.parametrize("sum_", ["Add(p, v)", "Add(v, p)"])
def test_bias_after_a_product(sum_: str) -> None:
    model = graph("float16[B,S,64] x", "float16[B,S,64] y", f"p = MatMul(x, w) y = {sum_}", w=WEIGHT, v=VECTOR)
    assert swapped(model)[1] == {"AddToOwnMatMul": 1}


def test_bias_that_is_computed() -> None:
    body = "p = MatMul(x, w) v = Mul(r, r) y = Add(p, v)"
    model = graph("float16[B,S,64] x, float16[64] r", "float16[B,S,64] y", body, "float16[64] v", w=WEIGHT)
    after, fired = swapped(model)
    assert fired == {"AddToOwnMatMul": 1}
    assert [node.op_type for node in after.graph] == ["Mul", "MatMul"]


FLAT = np.array([0, -1, 64])


@pytest.mark.parametrize(
    "body", ["y = Add(f, v)", "y = com.microsoft.BiasAdd(f, v, k)", "y = com.microsoft.BiasAdd(k, v, f)"]
)
def test_bias_after_a_product_of_an_image(body: str) -> None:
    """A projection of (B,H,W,C), read as tokens (B,H*W,C)."""
    has_residual = "BiasAdd" in body
    model = graph(
        "float16[B,4,6,64] x" + ", float16[B,4,6,64] r" * has_residual,
        "float16[B,24,64] y",
        f"p = MatMul(x, w) f = Reshape(p, shape) {'k = Reshape(r, shape)' * has_residual} {body}",
        "float16[B,4,6,64] p, float16[B,24,64] f" + ", float16[B,24,64] k" * has_residual,
        w=WEIGHT, v=VECTOR, shape=FLAT,
    )  # fmt: skip
    after, fired = swapped(model)
    assert fired == {f"{'BiasAdd' if has_residual else 'Add'}ToOwnMatMul": 1}
    assert [node.op_type for node in after.graph] == ["MatMul", "Reshape"]


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        ([0, -1, 32], "p = MatMul(x, w) f = Reshape(p, shape) y = Add(f, u)"),
        ([0, -1, 64], "p = MatMul(x, w) f = Reshape(p, shape) t = Add(f, v) y = Mul(t, f)"),
        ([0, -1, 64], "p = MatMul(x, w) f = Reshape(p, shape) t = Add(f, v) q = Reshape(p, shape) y = Mul(t, q)"),
        ([0, -1, 64], "p = MatMul(x, w) f = Reshape(p, shape) k = Relu(f2) y = com.microsoft.BiasAdd(f, v, k)"),
    ],
    ids=["other width", "two readers", "two readers of the product", "residual of another form"],
)
def test_products_of_images_that_stay(shape: list[int], body: str) -> None:
    width = shape[-1]
    rows = 24 * 64 // width
    body = f"f2 = Reshape(x, shape) {body}" if "f2" in body else body
    weights = {"u": half(32)} if width == 32 else {"v": VECTOR}
    declared = f"float16[B,4,6,64] p, float16[B,{rows},{width}] f"
    results = f"float16[B,{rows},{width}] y"
    model = graph("float16[B,4,6,64] x", results, body, declared, w=WEIGHT, shape=np.array(shape), **weights)
    assert failures(model) == ()


def test_residual_of_a_gemm() -> None:
    """The second factor may be computed, such as a weight times a gate."""
    body = "g = Mul(w, v) y = Gemm(x, g, r)"
    shapes = "float16[N,64] x, float16[N,64] r"
    after, fired = swapped(graph(shapes, "float16[N,64] y", body, "float16[64,64] g", w=WEIGHT, v=VECTOR))
    assert fired == {"GemmToOwnMatMul": 1}
    (_, node) = after.graph
    assert [None if value is None else value.name for value in node.inputs] == ["x", "g", None, "r"]


@pytest.mark.parametrize("bias", ["float16[64] r", "float16[N,1] r", "float16[M,64] r"])
def test_gemm_without_a_residual_of_its_shape_stays(bias: str) -> None:
    assert failures(graph(f"float16[N,64] x, {bias}", "float16[N,64] y", "y = Gemm(x, w, r)", w=WEIGHT)) == ()


def test_everything_at_once() -> None:
    """A block of a transformer: each node is replaced."""
    model = graph(
        "float16[B,S,64] x",
        "float16[B,S,64] y",
        """n = LayerNormalization(x, v, u) p = MatMul(n, wide) h = com.microsoft.BiasSplitGelu(p, c)
        q = MatMul(h, narrow) y = com.microsoft.BiasAdd(q, v, x)""",
        "float16[B,S,5120] p, float16[B,S,2560] h, float16[B,S,64] q",
        v=VECTOR, u=half(64, seed=5), c=half(5120), wide=half(64, 5120) / np.float16(8),
        narrow=half(2560, 64) / np.float16(50),
    )  # fmt: skip
    after, _ = swapped(model)
    assert [(node.domain, node.op_type) for node in after.graph] == [
        (OUR_DOMAIN, op_type) for op_type in ("LayerNorm", "MatMul", "BiasSplitGelu", "MatMul")
    ]


REFUSED: Mapping[str, tuple[ir.Model, str]] = {
    "float32": (
        graph("float[B,S,64] x", "float[B,S,64] y", "y = LayerNormalization(x, v)", v=normal(64)),
        "the input is FLOAT, the kernel accepts FLOAT16",
    ),
    "odd width": (
        graph("float16[B,S,60] x", "float16[B,S,60] y", "y = LayerNormalization(x, v)", v=half(60)),
        "60 channels: the kernel accepts multiples of 8",
    ),
    "other axis": (
        graph("float16[B,8,64] x", "float16[B,8,64] y", "y = LayerNormalization<axis=1>(x, v)", v=half(8, 64)),
        "the norm is not over the last axis only",
    ),
    "mean": (
        graph("float16[B,S,64] x", "float16[B,S,64] y, float[B,S,1] m", "y, m = LayerNormalization(x, v)", v=VECTOR),
        "the mean or the deviation is read",
    ),
    "small groups": (
        graph("float16[B,8,8,64] x", "float16[B,8,8,64] y", f"y = {GROUP_NORM.replace('=8', '=32')}(x, g, b)", **NORM),
        "64 channels in 32 groups",
    ),
    "packed attention": (
        graph(
            "float16[B,1024,1,3,72] x", "float16[B,1024,72] y", "y = com.microsoft.MultiHeadAttention<num_heads=1>(x)"
        ),
        "packed layouts stay with ONNX Runtime",
    ),
    "attention with biases": (attention("q, k, v, bias"), "a bias, a mask or a cache stays with ONNX Runtime"),
    "causal attention": (attention(attributes=", unidirectional=1"), "a bias, a mask or a cache stays"),
    "attention with a cache": (attention(outputs="k_heads v_heads"), "keys, values or scores are read"),
    "other head size": (attention(width=48), "the kernel accepts heads of 40, 64, 72, 80 or 160"),
    "long attention": (attention(width=64, queries=4096, keys=4096), "4096 tokens: ONNX Runtime's kernel is faster"),
    "attention of medium length": (attention(queries=1023, keys=1023), "1023 tokens: ONNX Runtime's kernel is faster"),
    "mean of a gated norm": (
        graph(
            SHAPES,
            "float16[B,S,64] y, float[B,S,1] m",
            f"{GATED} y, m = com.microsoft.SkipLayerNormalization(p, r, v)",
            INNER,
            w=WEIGHT,
            v=VECTOR,
        ),
        "the mean or the deviation is read",
    ),
    "gate with a broadcast skip": (
        graph(
            SHAPES.replace("float16[B,S,64] r", "float16[1,S,64] r"),
            "float16[B,S,64] y",
            f"{GATED} y = com.microsoft.SkipLayerNormalization(p, r, v)",
            INNER,
            w=WEIGHT,
            v=VECTOR,
        ),
        "the skip is not known to have the shape of the matmul",
    ),
    "scaled residual": (
        graph("float16[N,64] x, float16[N,64] r", "float16[N,64] y", "y = Gemm<beta=0.5>(x, w, r)", w=WEIGHT),
        "the matmul or the residual is scaled",
    ),
    "transposed factor": (
        graph("float16[N,64] x, float16[N,64] r", "float16[N,64] y", "y = Gemm<transB=1>(x, w, r)", w=WEIGHT),
        "a factor is transposed",
    ),
    "odd product": (
        graph("float16[B,S,64] x", "float16[B,S,60] y", "p = MatMul(x, w) y = Add(p, v)", w=half(64, 60), v=half(60)),
        "a weight of 64 x 60: the kernel accepts multiples of 8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    model, reason = REFUSED[name]
    assert [reason in failure.reason for failure in failures(copied(model))] == [True]


@pytest.mark.parametrize("latent_size", [None, 32, 1024])
def test_group_norms_of_images_of_any_size_are_replaced(latent_size: int | None) -> None:
    model = graph("float16[B,H,W,64] x", "float16[B,H,W,64] y", f"y = {GROUP_NORM}(x, g, b)", **NORM)
    assert use_kernels(model, latent_size).fired == {"GroupNormToOwnGroupNorm": 1}


def test_attention_needs_the_number_of_tokens() -> None:
    model = attention(queries="S", keys="S")
    assert [each.reason for each in failures(copied(model), None)] == ["the number of tokens is not known"]
    assert [each.reason[:9] for each in failures(copied(model), 65)] == ["65 tokens"]


def test_size_of_the_image_follows_from_the_latents() -> None:
    """A layer behind two strided convolutions has a quarter of the latents' height and width."""
    body = f"y = {GROUP_NORM}(x, g, b)"
    shape = "float16[B,H,W,64]"
    model = graph(f"{shape} x", f"{shape} y", body, **NORM)
    (x,) = model.graph.inputs
    x.shape = ir.Shape(["B", ir.SymbolicDim("floor(H/4 + 1/2)"), ir.SymbolicDim("floor(W/4 + 1/2)"), 64])
    assert use_kernels(model, 128).fired == {"GroupNormToOwnGroupNorm": 1}


@pytest.mark.parametrize(
    "body",
    [
        "p = MatMul(x, x2) y = Add(p, v)",  # not by a constant
        "p = MatMul(x, w) q = Relu(p) z = Add(p, v) y = Add(z, q)",  # the product is read twice
        "p = MatMul(x, w) y = Add(p, x)",  # no bias
        "p = Relu(x) y = Add(p, v)",  # no product
    ],
)
def test_sums_that_are_no_bias_of_a_product_are_not_candidates(body: str) -> None:
    inputs = "float16[B,64,64] x" + (", float16[B,64,64] x2" if "x2" in body else "")
    known = {name: array for name, array in {"w": WEIGHT, "v": VECTOR}.items() if re.search(rf"\b{name}\b", body)}
    assert failures(graph(inputs, "float16[B,64,64] y", body, **known)) == ()


def test_every_operator_is_emitted() -> None:
    emitted = {
        node.op_type
        for model in (
            graph("float16[B,S,64] x", "float16[B,S,64] y", "y = LayerNormalization(x, v)", v=VECTOR),
            graph("float16[B,S,64] x", "float16[B,S,64] y", "p = MatMul(x, w) y = Add(p, v)", w=WEIGHT, v=VECTOR),
            graph("float16[B,8,8,64] x", "float16[B,8,8,64] y", f"y = {GROUP_NORM}(x, g, b)", **NORM),
            graph("float16[B,S,2560] x", "float16[B,S,1280] y", "y = com.microsoft.BiasSplitGelu(x, b)", b=half(2560)),
            attention(),
            self_attention(),
            step_around("out_sample = Mul(sample, w)"),
            graph("float16[B,8,8,64] x, float16[B,8,8,8] r", "float16[B,8,8,72] y", "y = Concat<axis=3>(x, r)"),
            graph(
                "float16[B,8,8,64] x", "float16[B,8,8,64] y", "y = com.microsoft.NhwcConv(x, k)", k=half(64, 1, 1, 64)
            ),
            graph(
                "float16[B,8,8,64] x",
                "float16[B,16,16,64] y",
                "y = Resize<coordinate_transformation_mode='asymmetric', nearest_mode='floor'>(x, , k)".replace(
                    "'", '"'
                ),
                k=np.array([1, 2, 2, 1], np.float32),
            ),
            graph(
                SHAPES,
                "float16[B,S,64] y",
                f"{GATED} y = com.microsoft.SkipLayerNormalization(p, r, v)",
                INNER,
                w=WEIGHT,
                v=VECTOR,
            ),
        )
        if use_kernels(model).fired
        for node in model.graph
        if node.domain == OUR_DOMAIN
    }
    for_8_bits = {
        "QuantizeRows",
        "LayerNormRows",
        "SplitGeluRows",
        "SumRows",
        "ScaledMatMul",
    }  # test_matmul_8bit_rules.py
    assert emitted == OUR_CONTRACTS.keys() - for_8_bits


def test_every_operator_has_a_rule_and_a_row_in_the_documentation() -> None:
    """The page names the files of the contract, the rules and the kernel."""
    root = Path(__file__).parents[3]
    page = (root / "docs" / "explanation" / "kernels.md").read_text(encoding="utf-8")
    assert RULES.keys() == OUR_CONTRACTS.keys()
    for op_type, contract in OUR_CONTRACTS.items():
        (row,) = re.findall(rf"^\| `{op_type}` \| `(\w+)\.py` \| `(\w+)\.py` \| `(\w+\.cuh)` \|$", page, re.MULTILINE)
        assert row[0] == contract.lower.__module__.rpartition(".")[2]
        assert row[1] in {rule.__module__.rpartition(".")[2] for rule in RULES[op_type]}
        assert f'"{op_type}"' in (root / "kernels" / "src" / row[2]).read_text(encoding="utf-8")
