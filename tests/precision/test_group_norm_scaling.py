"""Scaling of the inputs of group norms, on small graphs: the same result bit for bit, and the reasons against it."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import Array, copied, feeds_for, graph, normal, run, text_of, used

from sdonnx.precision.group_norm_scaling import scalable_values, scale_group_norms
from sdonnx.precision.value_regions import find_regions

SCALE = 2.0**-6
SIZES = {"B": 2, "H": 4, "W": 6}
IMAGE = "float[B,H,W,8] x"
CONV = "com.microsoft.NhwcConv<kernel_shape=[3,3], pads=[1,1,1,1]>"
NORM = "com.microsoft.GroupNorm<groups=2, epsilon=0.001, channels_last=1, activation=1>"
SKIP = "com.microsoft.SkipGroupNorm<groups=2, epsilon=0.001, channels_last=1, activation=1>"

WEIGHTS: dict[str, Array] = {
    **{f"w{index}": normal(8, 3, 3, 8, seed=index, scale=0.2) for index in range(6)},
    **{f"c{index}": normal(8, seed=10 + index) for index in range(6)},
    "m": normal(8, 8, seed=20, scale=0.4),
    "g": normal(8, seed=21) + 1,
    "b": normal(8, seed=22),
    "rows": np.array([1, 1, 1, 8], np.int64),
    "flat": np.array([0, -1, 8], np.int64),
    "twice": np.array([1, 2, 2, 1], np.float32),
    "pads": np.array([0, 1, 0, 0, 0, -1, 0, 0], np.int64),  # one row down
    "five": np.array(5, np.float32),
    "half": np.array([0.5], np.float32),
}  # fmt: skip

# A decoder in short: a stream with a branch, an attention's projection, a resize, a shortcut, and the last norm.
DECODER = f"""
    x1 = {CONV}(x, w0)
    row = Expand(c0, rows)
    n1, s1 = {SKIP}(x1, g, b, row)
    h1 = {CONV}(n1, w1, c1)
    n2 = {NORM}(h1, g, b)
    h2 = {CONV}(n2, w2)
    n3, s2 = {SKIP}(s1, g, b, h2, c2)
    f3 = Reshape(n3, flat)
    q = MatMul(f3, m)
    p = Softmax(q)
    o = MatMul(p, m)
    f2 = Reshape(s2, flat)
    s3 = com.microsoft.BiasAdd(o, c3, f2)
    back = Shape(s2)
    s4 = Reshape(s3, back)
    s5 = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(s4, , twice)
    u = {CONV}(s5, w3, c4)
    n4 = {NORM}(u, g, b)
    h4 = {CONV}(n4, w4)
    k = MatMul(u, m)
    n5, unused = {SKIP}(k, g, b, h4, c5)
    y = {CONV}(n5, w5, c0)
"""


def small(body: str, **sizes: str) -> ir.Model:
    """Return a graph; convolutions and norms have the size of x by default."""
    convolved = dict.fromkeys(re.findall(r"(\w+) = com.microsoft.(?:NhwcConv|GroupNorm)", body), "B,H,W,8")
    known = {name: dims for name, dims in (convolved | sizes).items() if name != "y"}
    declared = ", ".join(f"float[{dims}] {name}" for name, dims in known.items())
    return graph(IMAGE, "float[B,P,Q,8] y", body, declared, **used(body, WEIGHTS, IMAGE))


def decoder() -> ir.Model:
    image, twice = "B,H,W,8", "B,P,Q,8"
    return small(DECODER, n1=image, s1=image, n2=image, n3=image, s2=image, s3="B,N,8", u=twice, n4=twice, h4=twice,
                 n5=twice)  # fmt: skip


def test_decoder_is_equal_bit_for_bit() -> None:
    model = decoder()
    scaled = copied(model)
    found = scale_group_norms(scaled, SCALE)
    assert (found.scale, found.norms, found.reason) == (SCALE, 5, None)
    feeds = feeds_for(model, sizes=SIZES)
    assert np.array_equal(run(scaled, feeds)["y"], run(model, feeds)["y"])
    norms = [node for node in scaled.graph if "GroupNorm" in node.op_type]
    assert {node.attributes.get_float("epsilon") for node in norms} == {np.float32(0.001) * SCALE**2}


def test_values_are_scaled_and_others_stay() -> None:
    model = decoder()
    names = ("x1", "s1", "h1", "h2", "s2", "o", "s5", "u", "h4", "k", "n1", "n2", "n4", "q", "p", "f3")
    for value in (value for node in model.graph for value in node.outputs if value.name in names):
        model.graph.outputs.append(value)
    expected = run(model, feeds := feeds_for(model, sizes=SIZES))
    model = decoder()
    scale_group_norms(model, SCALE)
    for value in (value for node in model.graph for value in node.outputs if value.name in names):
        model.graph.outputs.append(value)
    found = run(model, feeds)
    quotients = {name: float(np.unique(found[name] / expected[name]).item()) for name in names}
    scaled = {"x1", "s1", "h1", "h2", "s2", "o", "s5", "u", "h4", "k"}
    assert quotients == {name: SCALE if name in scaled else 1.0 for name in names}


def test_constants_are_copied_for_their_scaled_use() -> None:
    """c0 is the first convolution's bias and the last one's, m an attention's projection and a shortcut."""
    model = decoder()
    scale_group_norms(model, SCALE)
    weights = {name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value}
    expected = {f"{name}.times_{SCALE:g}": WEIGHTS[name] * np.float32(SCALE)
                for name in ("w0", "w1", "w2", "w4", "c0", "c1", "c2", "c3", "c4", "c5", "m")}  # fmt: skip
    for name, values in expected.items():
        assert np.array_equal(weights[name], values), name
    # The upsampler and the shortcut read and write scaled values.
    assert {"w3", "w5", "m", "c0"} <= weights.keys()
    assert not {"w0", "w1", "c1"} & weights.keys()


def test_factor_of_one_changes_nothing_but_names() -> None:
    model = decoder()
    scale_group_norms(model, 1.0)
    feeds = feeds_for(decoder(), sizes=SIZES)
    assert np.array_equal(run(model, feeds)["y"], run(decoder(), feeds)["y"])


@pytest.mark.parametrize(
    ("body", "scaled"),
    [
        (f"a = {CONV}(x, w0, c0) n = {NORM}(a, g, b) y = {CONV}(n, w1)", {"a"}),
        # Standard operators, before they are fused.
        ("a = MatMul(x, m) t = Transpose<perm=[0,3,1,2]>(a) n = GroupNormalization<num_groups=2>(t, g, b) "
         "y = Transpose<perm=[0,2,3,1]>(n)", {"a", "t"}),
        (f"a = {CONV}(x, w0) d = Div(a, five) e = Mul(half, d) n = {NORM}(e, g, b) y = MatMul(n, m)", {"a", "d", "e"}),
        (f"a = {CONV}(x, w0) p = Pad(a, pads) n = {NORM}(p, g, b) y = MatMul(n, m)", {"a", "p"}),
        # A constant on either side of a sum, and a difference.
        (f"a = {CONV}(x, w0) s = Add(c0, a) d = Sub(s, c1) n = {NORM}(d, g, b) y = MatMul(n, m)", {"a", "s", "d"}),
        # The second convolution reads large values, so that its result is scaled, and the third one makes it whole.
        (f"a = {CONV}(x, w0) n = {NORM}(a, g, b) c = {CONV}(a, w1, c1) d = {CONV}(c, w2, c2) y = Add(d, n)",
         {"a", "c"}),
        # The result of a norm has the range of its weights.
        (f"a = {CONV}(x, w0) n = {NORM}(a, g, b) o = {NORM}(n, g, b) y = MatMul(o, m)", {"a"}),
    ],
)  # fmt: skip
def test_patterns(body: str, scaled: set[str]) -> None:
    model = small(body)
    assert scalable_values(model) == scaled
    changed = copied(model)
    assert scale_group_norms(changed, SCALE).reason is None
    feeds = feeds_for(model, sizes=SIZES)
    assert np.array_equal(run(changed, feeds)["y"], run(model, feeds)["y"])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"a = {CONV}(x, w0) n = {NORM}(a, g, b) t = Tanh(a) y = Add(n, t)", "Tanh Tanh_2 reads a"),
        (f"a = {CONV}(x, w0) t = Tanh(a) s = Add(a, t) n = {NORM}(s, g, b) y = MatMul(n, m)", "Tanh Tanh_1 reads a"),
        (f"y = {CONV}(x, w0) n = {NORM}(y, g, b)", "y is an input or output"),
        (f"a = {CONV}(x, w0) s = Add(a, x) n = {NORM}(s, g, b) y = MatMul(n, m)", "x is an input or output"),
        (f"a = {CONV}(x, w0) p = Pad(a, pads, five) n = {NORM}(p, g, b) y = MatMul(n, m)", "Pad Pad_1 computes p"),
        (f"a = {CONV}(x, w0) d = Div(five, a) n = {NORM}(d, g, b) s = Add(a, d) o = {NORM}(s, g, b) y = Add(n, o)",
         "Div Div_1 reads a"),
        (f"a = {CONV}(x, w0) s = Mul(a, a) n = {NORM}(a, g, b) y = Add(s, n)", "Mul Mul_1 reads a"),
        (f"n = {NORM}(x, g, b) a = {CONV}(n, w0) s = Add(a, n) o = {NORM}(s, g, b) y = MatMul(o, m)",
         "GroupNorm GroupNorm_0 computes n"),
        (f"a = {CONV}(x, w0) e = ReduceMax<keepdims=0>(x) i = Greater(e, five) n = {NORM}(a, g, b) "
         "t = If(i) <then_branch = one () => (float[B,H,W,8] u) { u = Identity(a) }, "
         "else_branch = two () => (float[B,H,W,8] v) { v = Neg(a) }> y = Add(n, t)",
         "a subgraph of If If_4 reads a"),
        ("y = MatMul(x, m)", "no group norm reads a value of any range"),
    ],
)  # fmt: skip
def test_other_readers_refuse(body: str, reason: str) -> None:
    model = small(body)
    before = text_of(model)
    found = scale_group_norms(model, SCALE)
    assert (found.reason, found.scale, found.norms) == (reason, 1.0, 0)
    assert text_of(model) == before
    assert scalable_values(model) == frozenset()


def test_values_are_in_one_region_each() -> None:
    regions = find_regions(decoder().graph)
    for value, region in regions.items():
        assert [value is each for each in region.values].count(True) == 1
    norms = [node for region in {id(each): each for each in regions.values()}.values() for node in region.norms]
    assert len(norms) == len(set(norms)) == 5


def test_types_of_fp16_weights_stay() -> None:
    body = f"a = {CONV}(x, w0, c0) n = {NORM}(a, g, b) y = {CONV}(n, w1)"
    weights = used(body, WEIGHTS, IMAGE)
    narrow = {name: each if name in "gb" else each.astype(np.float16) for name, each in weights.items()}
    model = graph("float16[B,H,W,8] x", "float16[B,P,Q,8] y", body, **narrow)
    assert scale_group_norms(model, SCALE).norms == 1
    scaled = model.graph.initializers[f"w0.times_{SCALE:g}"].const_value
    assert scaled is not None
    assert np.array_equal(scaled.numpy(), (weights["w0"].astype(np.float16) * np.float16(SCALE)))
