from __future__ import annotations

import onnx_ir as ir
import pytest
from support.graphs import Array, assert_fires, assert_refuses, copied, graph, node_of, normal, operators

from sdonnx.fusions.fuse_group_norm import SiluIntoGroupNorm
from sdonnx.fusions.fuse_skip_group_norm import GroupNormToSkipGroupNorm
from sdonnx.graph.edit import constant_value, input_of, required
from sdonnx.graph.match import Rule, apply_rules
from sdonnx.graph.modules import MODULE_KEY, module_path

IMAGE, OUTPUT = "float[B,H,W,8]", "float[B,H,W,8] y"
NORM = {"g": normal(8, seed=1), "b": normal(8, seed=2)}


def norm(of: str, to: str, activation: int = 0) -> str:
    attributes = f"groups=2, epsilon=0.01, channels_last=1, activation={activation}"
    return f"{to} = com.microsoft.GroupNorm<{attributes}>({of}, g, b) "


@pytest.mark.parametrize("product", ["Mul(n, s)", "Mul(s, n)"])
def test_silu(product: str) -> None:
    model = graph(f"{IMAGE} x", OUTPUT, norm("x", "n") + f"s = Sigmoid(n) y = {product}", **NORM)
    rewritten = assert_fires(model, SiluIntoGroupNorm, 1, commute=True)
    assert operators(rewritten) == {"GroupNorm": 1}
    attributes = {name: value.value for name, value in node_of(rewritten, "GroupNorm").attributes.items()}
    assert attributes == {"groups": 2, "epsilon": pytest.approx(0.01), "channels_last": 1, "activation": 1}


def test_silu_of_a_silu_is_taken_once() -> None:
    body = norm("x", "n") + "s = Sigmoid(n) a = Mul(n, s) t = Sigmoid(a) y = Mul(a, t)"
    rewritten = assert_fires(graph(f"{IMAGE} x", OUTPUT, body, **NORM), SiluIntoGroupNorm, 1, commute=True)
    assert operators(rewritten) == {"GroupNorm": 1, "Sigmoid": 1, "Mul": 1}


NO_SILU = {
    "of another": (f"{IMAGE} x, {IMAGE} z", OUTPUT, norm("x", "n") + "s = Sigmoid(z) y = Mul(n, s)"),
    "only the sigmoid": (f"{IMAGE} x", OUTPUT, norm("x", "n") + "y = Sigmoid(n)"),
    "times itself": (f"{IMAGE} x", OUTPUT, norm("x", "n") + "s = Sigmoid(n) y = Mul(s, s)"),
    "norm used elsewhere": (f"{IMAGE} x", f"{OUTPUT}, {IMAGE} n", norm("x", "n") + "s = Sigmoid(n) y = Mul(n, s)"),
    "sigmoid used elsewhere": (f"{IMAGE} x", f"{OUTPUT}, {IMAGE} s", norm("x", "n") + "s = Sigmoid(n) y = Mul(n, s)"),
    "active already": (f"{IMAGE} x", OUTPUT, norm("x", "n", activation=1) + "s = Sigmoid(n) y = Mul(n, s)"),
}


@pytest.mark.parametrize("name", NO_SILU)
def test_near_misses_of_silu_stay(name: str) -> None:
    assert_refuses(graph(*NO_SILU[name], **NORM), SiluIntoGroupNorm, None, commute=True)


BIASES = {"c": normal(8, seed=3), "d": normal(8, seed=4)}
SUMS = {
    "two images": ("t = Add(x, s)", 0),
    "and a bias": ("a = Add(x, c) t = Add(a, s)", 1),
    "bias first": ("a = Add(c, x) t = Add(s, a)", 1),
    "bias last": ("a = Add(x, s) t = Add(a, c)", 1),
    "two biases": ("a = Add(x, c) e = Add(s, d) t = Add(a, e)", 2),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("skip", ["float[B,H,W,8] s", "float[B,1,1,8] s"])
def test_additions_before_the_norm(name: str, skip: str) -> None:
    body, biases = SUMS[name]
    used = {key: value for key, value in BIASES.items() if f"{key}" in body.replace("Add", "")}
    model = graph(f"{IMAGE} x, {skip}", OUTPUT, body + " " + norm("t", "y", activation=1), **NORM, **used)
    rewritten = assert_fires(model, GroupNormToSkipGroupNorm, 1)
    assert operators(rewritten) == {"SkipGroupNorm": 1}
    node = node_of(rewritten, "SkipGroupNorm")
    assert [required(value).name for value in node.inputs[:4]][1:3] == ["g", "b"]
    assert len(node.inputs) == 4 + (biases > 0)
    # The kernel assumes that the sum has the shape of its first input.
    assert input_of(node, 0).shape == ir.Shape(["B", "H", "W", 8])
    assert node.attributes.get_int("activation") == 1


def test_the_row_may_come_first() -> None:
    model = graph(f"float[B,1,1,8] s, {IMAGE} x", OUTPUT, "t = Add(s, x) " + norm("t", "y"), **NORM)
    node = node_of(assert_fires(model, GroupNormToSkipGroupNorm, 1), "SkipGroupNorm")
    assert [input_of(node, 0).name, input_of(node, 3).name] == ["x", "s"]


def test_bias_without_skip_becomes_a_row_per_image() -> None:
    model = graph(f"{IMAGE} x", OUTPUT, "t = Add(x, c) " + norm("t", "y"), **NORM, c=BIASES["c"])
    rewritten = assert_fires(model, GroupNormToSkipGroupNorm, 1)
    skip = input_of(node_of(rewritten, "SkipGroupNorm"), 3)
    assert skip.shape == ir.Shape(["B", 1, 1, 8])


def test_the_norm_of_a_bias_is_no_candidate() -> None:
    model = graph("float[1,1,1,8] x", "float[1,1,1,8] y", "t = Add(c, d) r = Reshape(t, s) " + norm("r", "y"),
                  **NORM, **BIASES, s=ir.tensor([1, 1, 1, 8]).numpy())  # fmt: skip
    assert_refuses(model, GroupNormToSkipGroupNorm, None)


@pytest.mark.parametrize("outputs", [f"{OUTPUT}, {IMAGE} z", f"{OUTPUT}, {IMAGE} t", f"{IMAGE} t, {OUTPUT}, {IMAGE} z"])
@pytest.mark.parametrize("name", SUMS)
def test_the_sum_is_given_to_whoever_uses_it(outputs: str, name: str) -> None:
    """The sum may be the residual of later layers, an output of the graph, or both."""
    use = "z = Neg(t)" if " z" in outputs else ""
    used = {key: value for key, value in BIASES.items() if f"{key}" in SUMS[name][0].replace("Add", "")}
    body = f"{SUMS[name][0]} {norm('t', 'y')} {use}"
    rewritten = assert_fires(graph(f"{IMAGE} x, {IMAGE} s", outputs, body, **NORM, **used), GroupNormToSkipGroupNorm, 1)
    assert operators(rewritten, "Add", "SkipGroupNorm") == {"Add": 0, "SkipGroupNorm": 1}
    summed = node_of(rewritten, "SkipGroupNorm").outputs[1]
    assert summed.shape == ir.Shape(["B", "H", "W", 8])
    assert summed.dtype == ir.DataType.FLOAT


def test_an_inner_sum_used_elsewhere_is_a_term() -> None:
    """(x + c) is a graph output: the kernel adds it as it is."""
    body = "a = Add(x, c) t = Add(a, s) " + norm("t", "y")
    model = graph(f"{IMAGE} x, {IMAGE} s", f"{OUTPUT}, {IMAGE} a", body, **NORM, c=BIASES["c"])
    rewritten = assert_fires(model, GroupNormToSkipGroupNorm, 1)
    assert operators(rewritten) == {"Add": 1, "SkipGroupNorm": 1}
    assert len(node_of(rewritten, "SkipGroupNorm").inputs) == 4


def test_a_sum_of_two_norms_goes_into_one() -> None:
    body = "t = Add(x, s) " + norm("t", "y") + norm("t", "n") + "z = Neg(n)"
    model = graph(f"{IMAGE} x, {IMAGE} s", f"{OUTPUT}, {IMAGE} z", body, **NORM)
    # The second norm differs, or common subexpressions would be merged.
    second = [node for node in model.graph if node.op_type == "GroupNorm"][1]
    second.attributes["groups"] = ir.AttrInt64("groups", 4)
    rewritten = assert_fires(model, GroupNormToSkipGroupNorm, 1)
    assert operators(rewritten) == {"SkipGroupNorm": 1, "GroupNorm": 1, "Neg": 1}


def test_a_chain_of_residuals() -> None:
    body = f"t = Add(x, s) {norm('t', 'n')} u = Add(t, n) {norm('u', 'm')} v = Add(u, m) {norm('v', 'y')}"
    model = graph(f"{IMAGE} x, {IMAGE} s", OUTPUT, body, **NORM)
    for node in model.graph:
        # As the layout stage leaves it: no shape inference knows the kernel.
        node.outputs[0].shape = ir.Shape(["B", "H", "W", 8])
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    rewritten = assert_fires(model, GroupNormToSkipGroupNorm, 3)
    assert operators(rewritten) == {"SkipGroupNorm": 3}


def test_the_kernel_belongs_to_the_module_of_the_norm() -> None:
    model = graph(f"{IMAGE} x, {IMAGE} s", OUTPUT, "t = Add(x, s) " + norm("t", "y"), **NORM)
    node_of(model, "Add").metadata_props[MODULE_KEY] = "resnets.0"
    node_of(model, "GroupNorm").metadata_props[MODULE_KEY] = "resnets.0.norm2"
    rewritten = assert_fires(model, GroupNormToSkipGroupNorm, 1)
    assert module_path(node_of(rewritten, "SkipGroupNorm")) == "resnets.0.norm2"


def test_biases_are_summed_once() -> None:
    body = "a = Add(x, c) e = Add(s, d) t = Add(a, e) " + norm("t", "y")
    model = graph(f"{IMAGE} x, {IMAGE} s", OUTPUT, body, **NORM, **BIASES)
    rewritten = assert_fires(model, GroupNormToSkipGroupNorm, 1)
    bias = input_of(node_of(rewritten, "SkipGroupNorm"), 4)
    assert constant_value(bias) == pytest.approx(BIASES["c"] + BIASES["d"])
    assert set(rewritten.graph.initializers) == {"g", "b", bias.name}


NOT_KERNELS: dict[str, tuple[str, str, dict[str, Array], str | None]] = {
    "no sum": (f"{IMAGE} x", "t = Relu(x)", {}, None),
    "three images": (f"{IMAGE} x, {IMAGE} s, {IMAGE} u", "a = Add(x, s) t = Add(a, u)", {}, "a sum of 3 activations"),
    "one number": (f"{IMAGE} x, {IMAGE} s", "a = Add(x, c) t = Add(a, s)", {"c": normal(1)}, "a sum of 3 activations"),
    "one row of all": (f"{IMAGE} x, float[1,1,1,8] s", "t = Add(x, s)", {}, "shapes that the kernel does not add"),
    "column": (f"{IMAGE} x, float[B,H,1,8] s", "t = Add(x, s)", {}, "shapes that the kernel does not add"),
    "one channel": (f"{IMAGE} x, {IMAGE.replace('8', '1')} s", "t = Add(x, s)", {}, "the kernel does not add"),
    "nameless sizes": ("float[?,H,W,8] x, float[?,1,1,8] s", "t = Add(x, s)", {}, "the kernel does not add"),
    "outer sum": ("float[B,H,1,8] x, float[B,1,W,8] s", "t = Add(x, s)", {}, "shapes that the kernel does not add"),
    "difference": (f"{IMAGE} x, {IMAGE} s", "t = Sub(x, s)", {}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_KERNELS)
def test_near_misses_are_refused(name: str) -> None:
    inputs, body, weights, reason = NOT_KERNELS[name]
    output = "float[?,H,W,8] y" if "?" in inputs else OUTPUT
    model = graph(inputs, output, f"{body} {norm('t', 'y')}", **NORM, **weights)
    assert_refuses(model, GroupNormToSkipGroupNorm, reason)


@pytest.mark.parametrize("rule", [SiluIntoGroupNorm, GroupNormToSkipGroupNorm])
def test_a_norm_of_another_domain_is_no_candidate(rule: type[Rule]) -> None:
    body = "t = Add(x, s) n = GroupNormalization<num_groups=2>(t, g, b) u = Sigmoid(n) y = Mul(n, u)"
    model = graph("float[B,8,H,W] x, float[B,8,H,W] s", "float[B,8,H,W] y", body, **NORM)
    assert_refuses(model, rule, None, commute=True)


def test_silu_then_sum() -> None:
    """The two rules in the order of their stages."""
    body = "a = Add(x, c) t = Add(a, s) " + norm("t", "n") + "v = Sigmoid(n) m = Mul(n, v) y = Add(t, m)"
    model = graph(f"{IMAGE} x, float[B,1,1,8] s", OUTPUT, body, **NORM, c=BIASES["c"])
    rewritten = assert_fires(copied(model), SiluIntoGroupNorm, 1, commute=True)
    rewritten = assert_fires(rewritten, GroupNormToSkipGroupNorm, 1)
    assert operators(rewritten) == {"SkipGroupNorm": 1, "Add": 1}
    assert apply_rules(rewritten, [SiluIntoGroupNorm], commute=True) == (0, [])
