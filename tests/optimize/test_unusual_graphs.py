"""Valid, unusual graphs are fused, and keep their interface and function.

Subgraphs, shared values, outputs in the middle, inputs with defaults, operators of other domains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from support.graphs import (
    Array,
    assert_same_function,
    copied,
    feeds_for,
    graph,
    interface,
    normal,
    operators,
    relative_error,
    run,
)

from sdonnx.fusions.fusion_table import PROVIDERS, fuse
from sdonnx.graph.loading.load import load_model
from sdonnx.models.spec import ComponentSpec, Role
from sdonnx.operators.operator_table import LowerContribOperators
from sdonnx.precision.convert import ConvertPrecision
from sdonnx.precision.policy import PrecisionPolicy


def assert_same_results(fused: ir.Model, model: ir.Model, feeds: Mapping[str, Array]) -> None:
    found, expected = run(fused, feeds), run(model, feeds)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert relative_error(found[name], values) < 1e-5, name


def assert_kept(model: ir.Model, provider: str) -> ir.Model:
    """Fuse a copy, check interface and function, for either value of a condition; return the copy."""
    fused = copied(model)
    fuse(fused, provider)
    assert interface(fused) == interface(model)
    feeds = {name: array % 8 if array.dtype == np.int64 else array for name, array in feeds_for(model).items()}
    conditions = [value.name or "" for value in model.graph.inputs if value.dtype == ir.DataType.BOOL]
    for given in (True, False) if conditions else (True,):
        assert_same_results(fused, model, feeds | {name: np.array(given) for name in conditions})
    return fused


def condition(shape: str, then: str, other: str) -> str:
    """Return an If on c with the output y; its branches compute p and q."""
    return (
        f"y = If(c) <then_branch = t () => (float[{shape}] p) {{ {then} }}, "
        f"else_branch = e () => (float[{shape}] q) {{ {other} }}>"
    )


SKETCH = "float[B,S,8] x, float[B,S,8] r"
W, GAMMA, BETA, BIAS = normal(8, 8, seed=1, scale=0.3), normal(8, seed=2), normal(8, seed=3), normal(8, seed=4)
KERNEL, POINT = normal(8, 8, 3, 3, scale=0.2), normal(8, 8, 1, 1)
SEQUENCE, IMAGE = "float[B,S,8] y", "float[B,8,H,W] y"
PROJECTED = "a = MatMul(x, w) ab = Add(a, b) s = Add(ab, r)"
NORMED = "v = Conv<pads=[1,1,1,1]>(x, k, b) n = GroupNormalization<num_groups=4>(v, g, b) sg = Sigmoid(n)"
LOOP = (
    "n = Constant<value_int=2>() y = Loop(n, , s) <body = l (int64 i, bool ci, float[B,S,8] v) => "
    "(bool co, float[B,S,8] vo) { co = Identity(ci) m = MatMul(v, w) u = Add(m, s) vo = Add(u, ab) }>"
)
SCAN = "y = Scan<num_scan_inputs=1, body = l (float[S,8] v) => (float[S,8] vo) { m = MatMul(v, w) vo = Add(m, b) }>(s)"

# name: (inputs, outputs, body)
SUBGRAPHS: dict[str, tuple[str, str, str]] = {
    "sum before a norm": (
        SKETCH + ", bool c", f"{SEQUENCE}, float[B,S,8] z",
        f"{PROJECTED} z = LayerNormalization(s, g, b) " + condition("B,S,8", "p = Relu(s)", "q = Neg(s)"),
    ),
    "If between the sum and its norm": (
        SKETCH + ", bool c", f"{SEQUENCE}, float[B,S,8] z",
        f"{PROJECTED} " + condition("B,S,8", "p = Relu(s)", "q = Neg(ab)") + " z = LayerNormalization(s, g, b)",
    ),
    "inner sum": (
        SKETCH + ", bool c", f"{SEQUENCE}, float[B,S,8] s",
        f"{PROJECTED} " + condition("B,S,8", "p = Relu(ab)", "q = Neg(a)"),
    ),
    "weight used in a branch": (
        SKETCH + ", bool c", f"{SEQUENCE}, float[B,S,8] z",
        "t = Transpose<perm=[1,0]>(w) z = MatMul(x, t) "
        + condition("B,S,8", "p = MatMul(x, w)", "u = Transpose<perm=[1,0]>(w) q = MatMul(r, u)"),
    ),
    "patterns in branches": (
        SKETCH + ", bool c", SEQUENCE,
        condition("B,S,8", "s = Add(x, r) n = LayerNormalization(s, g, b) p = Add(n, s)",
                  "l = Sigmoid(x) m = Mul(x, l) a = Add(m, b) q = Add(a, r)"),
    ),
    "nothing done in branches": (
        SKETCH + ", bool c", SEQUENCE,
        "i = Identity(x) "
        + condition("B,S,8", "p = Identity(i)", "one = Constant<value_float=1.0>() q = Mul(i, one)"),
    ),
    "one computation everywhere": (
        SKETCH + ", bool c", f"{SEQUENCE}, float[B,S,8] z",
        "z = Add(x, r) " + condition("B,S,8", "u = Add(x, r) p = Neg(u)", "v = Add(x, r) q = Relu(v)"),
    ),
    "one name in both branches": (
        SKETCH + ", bool c", SEQUENCE,
        condition("B,S,8", "u = Relu(x) p = MatMul(u, w)", "u = Neg(x) q = MatMul(u, w)"),
    ),
    "If in an If": (
        SKETCH + ", bool c", f"{SEQUENCE}, float[B,S,8] z",
        f"{PROJECTED} z = LayerNormalization(s, g, b) "
        + condition("B,S,8", "p1 = If(c) <then_branch = t1 () => (float[B,S,8] p2) { p2 = Relu(s) }, else_branch = "
                    "e1 () => (float[B,S,8] q2) { q2 = Neg(ab) }> p = Add(p1, s)", "q = Neg(s)"),
    ),
    "constant condition": (
        SKETCH, SEQUENCE, "c = Constant<value = bool {1}>() " + condition("B,S,8", "p = Relu(x)", "q = Neg(x)"),
    ),
    "Loop": (SKETCH, f"{SEQUENCE}, float[B,S,8] z", f"{PROJECTED} z = LayerNormalization(s, g, b) {LOOP}"),
    "Scan": (SKETCH, f"{SEQUENCE}, float[B,S,8] z", f"{PROJECTED} z = LayerNormalization(s, g, b) {SCAN}"),
    "images": (
        "float[B,8,H,W] x, bool c", f"{IMAGE}, float[B,8,H,W] z",
        f"{NORMED} m = Mul(n, sg) z = Conv<pads=[1,1,1,1]>(m, k, b) "
        + condition("B,8,H,W", "p = Relu(v)", "q = Add(m, n)"),
    ),
    "convolutions in branches": (
        "float[B,8,H,W] x, bool c", f"{IMAGE}, float[B,8,H,W] z",
        "z = Conv<pads=[1,1,1,1]>(x, k, b) "
        + condition("B,8,H,W", "p = Conv<pads=[1,1,1,1]>(z, k, b)",
                    "n = GroupNormalization<num_groups=4>(z, g, b) i = Sigmoid(n) q = Mul(n, i)"),
    ),
    "sizes": (
        "float[B,S,8] x, bool c", "float[B,S,8] y, float[N,8] z",
        "sh = Shape(x) two = Constant<value_ints=[-1,8]>() z = Reshape(x, two) "
        + condition("B,S,8", "p = Reshape(x, sh)", "q = Expand(x, sh)"),
    ),
}  # fmt: skip


def unusual(inputs: str, outputs: str, body: str) -> ir.Model:
    """Return a graph with the common weights that it reads."""
    weights = {"w": W, "g": GAMMA, "b": BETA, "k": KERNEL, "pt": POINT, "joined": np.array([0, 0, 16])}
    words = set(re.findall(r"\w+", body + outputs))
    known = "float[B,8,H,W] n" if re.search(r"\bn = GroupNorm", body) else ""
    return graph(inputs, outputs, body, known, **{name: array for name, array in weights.items() if name in words})


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", SUBGRAPHS)
def test_subgraphs_are_fused_around(case: str, provider: str) -> None:
    assert_kept(unusual(*SUBGRAPHS[case]), provider)


@pytest.mark.parametrize("case", SUBGRAPHS)
def test_subgraphs_stay_in_float32_in_an_fp16_graph(case: str) -> None:
    model = unusual(*SUBGRAPHS[case])
    fused = copied(model)
    fuse(fused, "cpu")
    spec = ComponentSpec("unet", "unet", Role.DENOISER, (), ())
    ConvertPrecision(PrecisionPolicy(), spec)(fused)
    onnx.checker.check_model(ir.to_proto(fused), full_check=True)
    inner = [node for node in fused.graph.all_nodes() if node.graph is not fused.graph]
    assert not {ir.DataType.FLOAT16} & {output.dtype for node in inner for output in node.outputs}
    feeds = feeds_for(model)
    half = {name: array.astype(np.float16) if array.dtype == np.float32 else array for name, array in feeds.items()}
    found, expected = run(fused, half), run(model, feeds)
    for name, values in expected.items():
        assert found[name].dtype == np.float16
        assert relative_error(found[name].astype(np.float32), values) < 4e-3, name


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_main_graph_with_a_subgraph_is_fused(provider: str) -> None:
    fused = assert_kept(unusual(*SUBGRAPHS["sum before a norm"]), provider)
    assert operators(fused) == {"MatMul": 1, "SkipLayerNormalization": 1, "If": 1}


TWO = "float[B,S,8] y, float[B,S,8] z"
HEADS = "float[B,S,2,8] x, float[B,L,2,8] r"
ATTENTION = (
    "q = Transpose<perm=[0,2,1,3]>(x) kv = Transpose<perm=[0,2,1,3]>(r) a = Attention(q, kv, kv) "
    "o = Transpose<perm=[0,2,1,3]>(a) y = Reshape(o, joined)"
)
SCORES = (
    "kt = Transpose<perm=[0,1,3,2]>(r) s = MatMul(x, kt) c = Constant<value_float=0.35>() sc = Mul(s, c) "
    "p = Softmax<axis=-1>(sc) y = MatMul(p, r)"
)

SHARED: dict[str, tuple[str, str, str]] = {
    "two Convs, one weight": (
        "float[B,8,H,W] x", f"{IMAGE}, float[B,8,H,W] z", 
        "y = Conv<pads=[1,1,1,1]>(x, k, b) z = Conv<pads=[1,1,1,1]>(y, k, b)",
    ),
    "a weight as matrix and as kernel": (
        "float[B,8,H,W] x", f"{IMAGE}, float[B,8,P,Q] z", "y = Conv(x, pt, b) z = Conv<strides=[2,2]>(x, pt, b)",
    ),
    "MatMul and Gather": ("int64[B,S] i", TWO, "z = Gather(w, i) y = MatMul(z, w)"),
    "Gather and a transposed weight": (
        "int64[B,S] i", TWO, "z = Gather(w, i) t = Transpose<perm=[1,0]>(w) y = MatMul(z, t)",
    ),
    "one bias for all": (
        SKETCH, TWO, f"{PROJECTED} y = LayerNormalization(s, b, b) m = MatMul(y, w) mb = Add(b, m) z = Add(mb, s)",
    ),
    "sum is an output": (SKETCH, f"{SEQUENCE}, float[B,S,8] s", f"{PROJECTED} y = LayerNormalization(s, g, b)"),
    "part of a sum is an output": (
        SKETCH, f"{SEQUENCE}, float[B,S,8] ab", f"{PROJECTED} y = LayerNormalization(s, g, b)",
    ),
    "norm is an output and read": (
        SKETCH, TWO, "s = Add(x, r) z = LayerNormalization(s, g, b) y = MatMul(z, w)",
    ),
    "mean is an output": (
        SKETCH, f"{SEQUENCE}, float[B,S,1] m", "s = Add(x, r) y, m = LayerNormalization(s, g, b)",
    ),
    "input is an output": (SKETCH, f"{SEQUENCE}, float[B,S,8] x", "y = Add(x, r)"),
    "input is the output": ("float[B,S,8] x", "float[B,S,8] x", ""),
    "initializer is an output": (SKETCH, f"{SEQUENCE}, float[8] g", "y = Add(x, g)"),
    "initializer is the output": (SKETCH, "float[8] g", "y = Add(x, g)"),
    "transposed initializer is an output": (
        SKETCH, f"{SEQUENCE}, float[8,8] t", "t = Transpose<perm=[1,0]>(w) y = MatMul(x, t)",
    ),
    "its source is an output": (
        SKETCH, f"{SEQUENCE}, float[8,8] w", "t = Transpose<perm=[1,0]>(w) y = MatMul(x, t)",
    ),
    "kernel is an output": (
        "float[B,8,H,W] x", f"{IMAGE}, float[8,8,3,3] k", "y = Conv<pads=[1,1,1,1]>(x, k, b)",
    ),
    "constant is an output": (
        SKETCH, f"{SEQUENCE}, float[2] z", "z = Constant<value_floats=[1.0, 2.0]>() y = Add(x, r)",
    ),
    "constant is the output": (SKETCH, "float[2] z", "z = Constant<value_floats=[1.0, 2.0]>()"),
    "folded constant is an output": (SKETCH, f"{SEQUENCE}, float[8] z", "z = Add(g, b) y = Add(x, r)"),
    "an output twice, in a chain": (SKETCH, TWO, "s = Add(x, r) y = LayerNormalization(s, g, b) z = Identity(y)"),
    "an output twice, in parallel": (
        SKETCH, TWO, "s = Add(x, r) n = LayerNormalization(s, g, b) y = Identity(n) z = Identity(n)",
    ),
    "an output computed twice": (SKETCH, TWO, "y = Add(x, r) z = Add(x, r)"),
    "an input twice as output": (SKETCH, TWO, "y = Identity(x) z = Identity(x)"),
    "copy of an initializer": (SKETCH, f"{SEQUENCE}, float[8] z", "y = Add(x, g) z = Identity(g)"),
    "sizes are outputs": (
        SKETCH, f"{SEQUENCE}, int64[3] sh, int64 n, int64[1] last",
        "y = Add(x, r) sh = Shape(x) i = Constant<value_int=1>() n = Gather(sh, i) last = Shape<start=2>(x)",
    ),
    "image in both orders": (
        "float[B,8,H,W] x", f"{IMAGE}, float[B,H,W,8] t",
        "y = Conv<pads=[1,1,1,1]>(x, k, b) t = Transpose<perm=[0,2,3,1]>(y)",
    ),
    "group norm before SiLU": ("float[B,8,H,W] x", f"{IMAGE}, float[B,8,H,W] n", f"{NORMED} y = Mul(n, sg)"),
    "sigmoid of SiLU": (SKETCH, f"{SEQUENCE}, float[B,S,8] l", "l = Sigmoid(x) y = Mul(x, l)"),
    "attention's result": (HEADS, "float[B,S,16] y, float[B,2,S,8] a", ATTENTION),
    "attention's operands": (HEADS, "float[B,S,16] y, float[B,2,S,8] q, float[B,2,L,8] kv", ATTENTION),
    "attention's probabilities": (
        "float[B,2,S,8] x, float[B,2,L,8] r", "float[B,2,S,8] y, float[B,2,S,L] p", SCORES,
    ),
    "an input that nothing reads": (SKETCH, SEQUENCE, "y = Tanh(x)"),
}  # fmt: skip


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", SHARED)
def test_shared_values_keep_interface_and_function(case: str, provider: str) -> None:
    assert_kept(unusual(*SHARED[case]), provider)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nothing_to_fuse(provider: str) -> None:
    model = unusual(SKETCH, SEQUENCE, "t = Tanh(x) y = Sub(t, r)")
    fused = copied(model)
    outcomes = fuse(fused, provider)
    assert [name for outcome in outcomes for name, count in outcome.fired.items() if count] == []
    assert_same_function(fused, model)
    assert operators(fused) == {"Tanh": 1, "Sub": 1}


# --- defaults of inputs -----------------------------------------------------------------------------------------------

OVERRIDABLE: dict[str, tuple[str, str, str, Array, Array]] = {
    "bias": ("float[8] d", "float[B,S,8] y", "s = Add(x, r) t = Add(s, d) y = LayerNormalization(t, g, b)",
             normal(8, seed=4), normal(8, seed=5)),
    "scale of a norm": ("float[8] d", "float[B,S,8] y", "s = Add(x, r) y = LayerNormalization(s, d, b)",
                        normal(8, seed=4), normal(8, seed=5)),
    "transposed weight": ("float[8,8] d", "float[B,S,8] y", "t = Transpose<perm=[1,0]>(d) y = MatMul(x, t)",
                          normal(8, 8), normal(8, 8, seed=5)),
    "of constants": ("float[8] d", "float[B,S,8] y", "t = Add(d, b) u = Mul(t, b) y = Mul(x, u)",
                     normal(8, seed=4), normal(8, seed=5)),
    "one": ("float[1] d", "float[B,S,8] y", "y = Mul(x, d)", np.ones(1, np.float32), normal(1)),
    "unused": ("float[8] d", "float[B,S,8] y", "y = Add(x, r)", normal(8), normal(8, seed=5)),
    "given out": ("float[8] d", "float[B,S,8] y, float[8] d", "y = Add(x, r)", normal(8), normal(8, seed=5)),
    "condition": ("bool d", "float[B,S,8] y",
                  "y = If(d) <then_branch = t () => (float[B,S,8] p) { p = Neg(x) }, "
                  "else_branch = e () => (float[B,S,8] q) { q = Relu(r) }>", np.array(True), np.array(False)),
}  # fmt: skip


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", OVERRIDABLE)
def test_defaults_stay_overridable(case: str, provider: str) -> None:
    declared, outputs, body, default, other = OVERRIDABLE[case]
    model = graph(f"{SKETCH}, {declared}", outputs, body, d=default, g=normal(8, seed=1), b=normal(8, seed=2))
    fused = copied(model)
    fuse(fused, provider)
    assert interface(fused) == interface(model)
    for given in ({}, {"d": other}):
        assert_same_results(fused, model, {"x": normal(2, 6, 8), "r": normal(2, 6, 8, seed=3)} | given)


# --- operators of other domains ---------------------------------------------------------------------------------------


class Foo(OpRun):
    """A custom operator: p * sin(q) * k."""

    op_domain = "my.own"

    def _run(self, p: Array, q: Array, k: float) -> tuple[Array]:
        return (p * np.sin(q) * np.float32(k),)


def with_custom_operators(opset: int) -> Any:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "my.own" : 1]> g ({SKETCH}) => ({TWO}) {{'
        f"{PROJECTED} z = LayerNormalization(s, g, b) f = my.own.Foo<k = 3.0>(s, z) one = Constant<value_float=1.0>() "
        "m = Mul(f, one) t = Transpose<perm=[0,2,1]>(m) u = Transpose<perm=[0,2,1]>(t) y = my.own.Foo<k = 2.0>(u, z) }"
    )
    weights = {"w": W, "g": GAMMA, "b": BETA}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


@pytest.mark.parametrize("opset", [17, 23])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_custom_operators_are_fused_around(provider: str, opset: int, tmp_path: Path) -> None:
    original = with_custom_operators(opset)
    onnx.save(original, tmp_path / "model.onnx")
    model = load_model(tmp_path / "model.onnx")
    before = interface(model)
    fuse(model, provider)
    assert operators(model, "Foo", "SkipLayerNormalization", "LayerNormalization") == {
        "Foo": 2,
        "SkipLayerNormalization": 1,
        "LayerNormalization": 0,
    }
    assert model.opset_imports["my.own"] == 1
    assert interface(model) == before
    onnx.checker.check_model(ir.to_proto(model))
    LowerContribOperators()(model)
    model.graph.sort()
    feeds = {"x": normal(2, 6, 8), "r": normal(2, 6, 8, seed=1)}
    found, expected = (
        ReferenceEvaluator(given, new_ops=[Foo]).run(None, feeds) for given in (ir.to_proto(model), original)
    )
    assert [relative_error(*pair) < 1e-5 for pair in zip(found, expected, strict=True)] == [True, True]


@pytest.mark.parametrize("opset", [17, 23])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_functions_keep_their_meaning(provider: str, opset: int) -> None:
    text = with_custom_operators(opset)
    text.functions.append(
        onnx.parser.parse_function(
            f'<domain: "my.own", opset_import: ["" : {opset}]> Foo <k> (p, q) => (o) '
            "{ i = Sin(q) j = Mul(p, i) c = Constant<value_float: float = @k>() o = Mul(j, c) }"
        )
    )
    model = ir.from_proto(text)
    fused = copied(model)
    fuse(fused, provider)
    assert operators(fused, "SkipLayerNormalization") == {"SkipLayerNormalization": 1}
    assert_same_results(fused, model, {"x": normal(2, 6, 8), "r": normal(2, 6, 8, seed=1)})
