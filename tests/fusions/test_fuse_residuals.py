from __future__ import annotations

import onnx_ir as ir
import pytest
from support.graphs import Array, assert_fires, assert_refuses, graph, node_of, normal, operators

from sdonnx.fusions.fuse_bias_add import ResidualToBiasAdd
from sdonnx.fusions.fuse_nhwc_conv import BiasIntoNhwcConv
from sdonnx.fusions.fuse_skip_layer_norm import LayerNormToSkipLayerNorm
from sdonnx.graph.edit import dims, input_of, required
from sdonnx.graph.modules import MODULE_KEY, module_path

INPUTS, OUTPUT = "float[B,S,8] x, float[B,S,8] s", "float[B,S,8] y"
NORM = {"g": normal(8, seed=1), "b": normal(8, seed=2)}
BIASES = {"c": normal(8, seed=3), "d": normal(8, seed=4)}
LAYER_NORM = "y = LayerNormalization<axis=-1, epsilon=0.01>(t, g, b)"

SUMS = {
    "two activations": ("t = Add(x, s)", 0),
    "bias on the first": ("a = Add(x, c) t = Add(a, s)", 1),
    "bias on the second": ("a = Add(c, s) t = Add(x, a)", 1),
    "bias last": ("a = Add(x, s) t = Add(a, c)", 1),
    "two biases": ("a = Add(x, c) e = Add(s, d) t = Add(a, e)", 2),
    "two biases on one": ("a = Add(x, c) e = Add(a, d) t = Add(e, s)", 2),
}


def biases_of(body: str) -> dict[str, Array]:
    return {name: value for name, value in BIASES.items() if f"({name}," in body or f" {name})" in body}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("attributes", ["axis=-1, epsilon=0.01", "axis=2, epsilon=0.00001", "epsilon=0.001"])
def test_skip_layer_norm(name: str, attributes: str) -> None:
    body, biases = SUMS[name]
    full = f"{body} y = LayerNormalization<{attributes}>(t, g, b)"
    rewritten = assert_fires(graph(INPUTS, OUTPUT, full, **NORM, **biases_of(body)), LayerNormToSkipLayerNorm, 1)
    assert operators(rewritten) == {"SkipLayerNormalization": 1}
    node = node_of(rewritten, "SkipLayerNormalization")
    assert len(node.inputs) == 4 + (biases > 0)
    assert [output.name for output in node.outputs] == ["y", "", "", ""]


def test_the_standards_epsilon_is_spelled_out() -> None:
    """LayerNormalization's default is 1e-5, the kernel's is 1e-12."""
    tiny = {"g": normal(8, seed=1), "b": normal(8, seed=2)}
    model = graph(INPUTS, OUTPUT, "t = Add(x, s) y = LayerNormalization(t, g, b)", **tiny)
    node = node_of(assert_fires(model, LayerNormToSkipLayerNorm, 1), "SkipLayerNormalization")
    assert node.attributes.get_float("epsilon") == pytest.approx(1e-5)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("others", ["float[B,S,8] z", "float[B,S,8] t", "float[B,S,8] t, float[B,S,8] z"])
def test_the_sum_is_given_to_whoever_uses_it(name: str, others: str) -> None:
    body = f"{SUMS[name][0]} {LAYER_NORM}" + (" z = Neg(t)" if " z" in others else "")
    model = graph(INPUTS, f"{others}, {OUTPUT}", body, **NORM, **biases_of(body))
    rewritten = assert_fires(model, LayerNormToSkipLayerNorm, 1)
    assert operators(rewritten, "Add", "SkipLayerNormalization") == {"Add": 0, "SkipLayerNormalization": 1}
    summed = node_of(rewritten, "SkipLayerNormalization").outputs[3]
    assert summed.shape == ir.Shape(["B", "S", 8])
    assert summed.dtype == ir.DataType.FLOAT


def test_a_chain_of_residuals() -> None:
    """As in a transformer block: each sum is normalized and is the next residual."""
    body = """a = Add(x, c) t = Add(a, s) n = LayerNormalization<epsilon=0.01>(t, g, b) m = Relu(n)
        e = Add(m, d) u = Add(e, t) y = LayerNormalization<epsilon=0.01>(u, g, b) z = Add(u, y)"""
    model = graph(INPUTS, f"{OUTPUT}, float[B,S,8] z", body, **NORM, **BIASES)
    rewritten = assert_fires(model, LayerNormToSkipLayerNorm, 2)
    assert operators(rewritten) == {"SkipLayerNormalization": 2, "Relu": 1, "Add": 1}


def test_two_norms_of_one_sum() -> None:
    body = f"t = Add(x, s) {LAYER_NORM} z = LayerNormalization<epsilon=0.1>(t, g, b)"
    rewritten = assert_fires(graph(INPUTS, f"{OUTPUT}, float[B,S,8] z", body, **NORM), LayerNormToSkipLayerNorm, 1)
    assert operators(rewritten) == {"SkipLayerNormalization": 1, "LayerNormalization": 1}


def test_a_value_added_to_itself() -> None:
    model = graph("float[B,S,8] x", OUTPUT, f"t = Add(x, x) {LAYER_NORM}", **NORM)
    assert operators(assert_fires(model, LayerNormToSkipLayerNorm, 1)) == {"SkipLayerNormalization": 1}


def test_the_kernel_belongs_to_the_module_of_the_norm() -> None:
    model = graph(INPUTS, OUTPUT, f"t = Add(x, s) {LAYER_NORM}", **NORM)
    node_of(model, "Add").metadata_props[MODULE_KEY] = "block"
    node_of(model, "LayerNormalization").metadata_props[MODULE_KEY] = "block.norm2"
    rewritten = assert_fires(model, LayerNormToSkipLayerNorm, 1)
    assert module_path(node_of(rewritten, "SkipLayerNormalization")) == "block.norm2"


NOT_NORMS: dict[str, tuple[str, str, str, str | None]] = {
    "no sum": ("float[B,S,8] x", "t = Relu(x)", LAYER_NORM, None),
    "only a bias": ("float[B,S,8] x", "t = Add(x, c)", LAYER_NORM, None),
    "three": (f"{INPUTS}, float[B,S,8] u", "a = Add(x, s) t = Add(a, u)", LAYER_NORM, "a sum of 3 activations"),
    "one token for all": ("float[B,S,8] x, float[B,1,8] s", "t = Add(x, s)", LAYER_NORM, "not of one shape"),
    "position embedding": ("float[B,S,8] x, float[S,8] s", "t = Add(x, s)", LAYER_NORM, "not of one shape"),
    "two dimensions": ("float[B,8] x, float[B,8] s", "t = Add(x, s)", LAYER_NORM, "not of one shape (B,S,D)"),
    "four dimensions": ("float[B,H,W,8] x, float[B,H,W,8] s", "t = Add(x, s)", LAYER_NORM, "not of one shape (B,S,D)"),
    "nameless": ("float[?,S,8] x, float[?,S,8] s", "t = Add(x, s)", LAYER_NORM, "not of one shape"),
    "one number": (INPUTS, "a = Add(x, one) t = Add(a, s)", LAYER_NORM, "a sum of 3 activations"),
    "other axis": ("float[B,6,8] x, float[B,6,8] s", "t = Add(x, s)", "y = LayerNormalization<axis=1>(t, gg, bb)",
                   "the norm is not over the last axis"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_NORMS)
def test_near_misses_are_refused(name: str) -> None:
    inputs, body, norm, reason = NOT_NORMS[name]
    weights = {"one": normal(1), "gg": normal(6, 8), "bb": normal(6, 8)} | NORM | BIASES
    used = {key: value for key, value in weights.items() if f" {key})" in body + norm or f" {key}," in norm}
    shape = inputs.split(" x")[0]
    assert_refuses(graph(inputs, f"{shape} y", f"{body} {norm}", **used), LayerNormToSkipLayerNorm, reason)


@pytest.mark.parametrize("name", ["g", "b"])
def test_a_number_for_all_channels_is_refused(name: str) -> None:
    model = graph(INPUTS, OUTPUT, f"t = Add(x, s) {LAYER_NORM}", **(NORM | {name: normal(1)}))
    assert_refuses(model, LayerNormToSkipLayerNorm, "scale and shift do not have one element per channel")


def test_a_norm_without_beta_is_no_candidate() -> None:
    model = graph(INPUTS, OUTPUT, "t = Add(x, s) y = LayerNormalization(t, g)", g=NORM["g"])
    assert_refuses(model, LayerNormToSkipLayerNorm, None)


@pytest.mark.parametrize("name", [name for name in SUMS if SUMS[name][1]])
def test_bias_add(name: str) -> None:
    body, _ = SUMS[name]
    rewritten = assert_fires(graph(INPUTS, OUTPUT, f"{body} y = Relu(t)", **biases_of(body)), ResidualToBiasAdd, 1)
    assert operators(rewritten) == {"BiasAdd": 1, "Relu": 1}


@pytest.mark.parametrize("name", [name for name in SUMS if SUMS[name][1]])
def test_bias_add_of_images(name: str) -> None:
    body = SUMS[name][0].replace("t = ", "y = ")
    model = graph("float[B,H,W,8] x, float[B,H,W,8] s", "float[B,H,W,8] y", body, **biases_of(body))
    rewritten = assert_fires(model, ResidualToBiasAdd, 1)
    assert operators(rewritten, "BiasAdd", "Add", "Reshape") == {"BiasAdd": 1, "Add": 0, "Reshape": 3}
    # The kernel takes three dimensions.
    assert all(len(dims(required(value)) or (None,)) in (1, 3) for value in node_of(rewritten, "BiasAdd").inputs)


def test_a_sum_that_is_an_output_or_used_twice() -> None:
    body = "a = Add(x, c) y = Add(a, s) z = Neg(y) w = Exp(y)"
    model = graph(INPUTS, f"{OUTPUT}, float[B,S,8] z, float[B,S,8] w", body, c=BIASES["c"])
    assert operators(assert_fires(model, ResidualToBiasAdd, 1)) == {"BiasAdd": 1, "Neg": 1, "Exp": 1}


def test_a_biased_value_used_elsewhere_stays_a_term() -> None:
    """x + c is needed by itself: no bias is left for the kernel."""
    model = graph(INPUTS, f"{OUTPUT}, float[B,S,8] a", "a = Add(x, c) y = Add(a, s)", c=BIASES["c"])
    assert_refuses(model, ResidualToBiasAdd, None)


def test_residuals_in_a_row() -> None:
    body = "a = Add(x, c) t = Add(a, s) r = Relu(t) e = Add(r, d) y = Add(e, t)"
    rewritten = assert_fires(graph(INPUTS, OUTPUT, body, **BIASES), ResidualToBiasAdd, 2)
    assert operators(rewritten) == {"BiasAdd": 2, "Relu": 1}


NOT_RESIDUALS: dict[str, tuple[str, str, str | None]] = {
    "no bias": (INPUTS, "y = Add(x, s)", None),
    "no residual": ("float[B,S,8] x", "y = Add(x, c)", None),
    "three": (f"{INPUTS}, float[B,S,8] u", "a = Add(x, s) e = Add(a, u) y = Add(e, c)", "3 activations and 1 biases"),
    "one for all": ("float[B,S,8] x, float[1,S,8] s", "a = Add(x, c) y = Add(a, s)", "not of one shape"),
    "two dimensions": ("float[B,8] x, float[B,8] s", "a = Add(x, c) y = Add(a, s)", "neither (B,S,C) nor (B,H,W,C)"),
    "one number": (INPUTS, "a = Add(x, one) y = Add(a, s)", None),
}


@pytest.mark.parametrize("name", NOT_RESIDUALS)
def test_other_additions_are_refused(name: str) -> None:
    inputs, body, reason = NOT_RESIDUALS[name]
    weights = {key: value for key, value in {"c": BIASES["c"], "one": normal(1)}.items() if f" {key})" in body}
    assert_refuses(graph(inputs, f"{inputs.split(' x')[0]} y", body, **weights), ResidualToBiasAdd, reason)


CONV = "com.microsoft.NhwcConv<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]>(x, w)"
WEIGHT = {"w": normal(8, 3, 3, 4)}
HALF = "float[B,P,Q,8] y"


@pytest.mark.parametrize("total", ["Add(a, c)", "Add(c, a)"])
def test_bias_of_a_convolution(total: str) -> None:
    model = graph("float[B,H,W,4] x", HALF, f"a = {CONV} y = {total}", **WEIGHT, c=BIASES["c"])
    rewritten = assert_fires(model, BiasIntoNhwcConv, 1, commute=True)
    node = node_of(rewritten, "NhwcConv")
    assert operators(rewritten) == {"NhwcConv": 1}
    assert input_of(node, 2).name == "c"
    assert node.attributes.get_ints("strides") == (2, 2)


def test_a_second_bias_stays() -> None:
    model = graph("float[B,H,W,4] x", HALF, f"a = {CONV} e = Add(a, c) y = Add(e, d)", **WEIGHT, **BIASES)
    rewritten = assert_fires(model, BiasIntoNhwcConv, 1, commute=True)
    assert operators(rewritten) == {"NhwcConv": 1, "Add": 1}


@pytest.mark.parametrize("shape", [(1,), (), (1, 8), (1, 1, 1, 8)])
def test_other_addends_stay_after_the_convolution(shape: tuple[int, ...]) -> None:
    model = graph("float[B,H,W,4] x", HALF, f"a = {CONV} y = Add(a, c)", **WEIGHT, c=normal(*shape))
    assert_refuses(model, BiasIntoNhwcConv, "the addend is not a constant vector", commute=True)


def test_an_activation_is_no_bias_of_a_convolution() -> None:
    model = graph("float[B,H,W,4] x, float[8] c", HALF, f"a = {CONV} y = Add(a, c)", **WEIGHT)
    assert_refuses(model, BiasIntoNhwcConv, "the addend is not a constant vector", commute=True)


def test_a_convolution_used_elsewhere_blocks() -> None:
    outputs = f"{HALF}, {HALF.replace('y', 'a')}"
    model = graph("float[B,H,W,4] x", outputs, f"a = {CONV} y = Add(a, c)", **WEIGHT, c=BIASES["c"])
    assert_refuses(model, BiasIntoNhwcConv, None, commute=True)
