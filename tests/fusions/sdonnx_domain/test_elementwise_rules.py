"""Nodes that move channels-last images are replaced by our own operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import Array, copied, graph, normal, used
from support.replacements import failures, own, swapped

from sdonnx.fusions.sdonnx_domain.use_kernels import use_kernels
from sdonnx.graph.shapes.expressions import parsed

IMAGE = "float16[B,H,W,{}]"
CONVOLUTIONS = "NhwcConvToOwnChannelsLastConv"


def half(*shape: int, seed: int = 0) -> Array:
    array: Array = normal(*shape, seed=seed) / np.sqrt(np.prod(shape[1:]))
    return array.astype(np.float16)


def convolution(name: str, inputs: str) -> str:
    return f"{name} = com.microsoft.NhwcConv<kernel_shape=[3,3], pads=[1,1,1,1]>({inputs})"


WEIGHTS = {"u": half(16, 3, 3, 8), "v": half(24, 3, 3, 8, seed=1), "b": half(16, seed=2), "c": half(24, seed=3)}


def concat(body: str, outputs: str = f"{IMAGE.format(40)} y") -> ir.Model:
    """Return a graph of x (B,H,W,8), q (B,H,W,16) and r (B,H,W,24), in which s has 16 channels and t 24."""
    inputs = f"{IMAGE.format(8)} x, {IMAGE.format(16)} q, {IMAGE.format(24)} r"
    results = {"s": f"{IMAGE.format(16)} s", "t": f"{IMAGE.format(24)} t"}
    known = [text for name, text in results.items() if f"{name} = " in body and text not in outputs]
    return graph(inputs, outputs, body, ", ".join(known), **used(body, WEIGHTS))


@pytest.mark.parametrize("axis", [3, -1])
def test_concat_of_channels(axis: int) -> None:
    after, fired = swapped(concat(f"y = Concat<axis={axis}>(q, r)"))
    assert fired == {"ConcatToOwnConcatChannels": 1}
    (node,) = after.graph
    assert [each.name for each in node.inputs if each is not None] == ["q", "r"]


@pytest.mark.parametrize(
    ("body", "biases"),
    [
        (f"{convolution('s', 'x, u, b')} y = Concat<axis=3>(s, r)", ["b"]),
        (f"{convolution('t', 'x, v, c')} y = Concat<axis=3>(q, t)", [None, "c"]),
        (f"{convolution('s', 'x, u, b')} {convolution('t', 'x, v, c')} y = Concat<axis=3>(s, t)", ["b", "c"]),
        (f"{convolution('s', 'x, u')} y = Concat<axis=3>(s, r)", []),
    ],
    ids=["first", "second", "both", "no bias"],
)
def test_bias_of_a_convolution_moves_into_the_concat(body: str, biases: list[str | None]) -> None:
    after, fired = swapped(concat(body))
    *convolutions, node = after.graph
    assert fired == {"ConcatToOwnConcatChannels": 1, CONVOLUTIONS: len(convolutions)}
    assert [None if each is None else each.name for each in node.inputs[2:]] == biases
    for each in convolutions:
        assert len(each.inputs) == 2
        assert each.attributes.get_int("pad") == 1


def test_concat_of_one_convolution_with_itself() -> None:
    body = f"{convolution('s', 'x, u, b')} y = Concat<axis=3>(s, s)"
    after, _ = swapped(concat(body, f"{IMAGE.format(32)} y"))
    assert [len(node.inputs) for node in after.graph] == [2, 4]


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        (f"{convolution('s', 'x, u, b')} z = Relu(s) y = Concat<axis=3>(s, r)", f", {IMAGE.format(16)} z"),
        (f"{convolution('s', 'x, u, b')} y = Concat<axis=3>(s, r)", f", {IMAGE.format(16)} s"),
    ],
    ids=["another reader", "an output"],
)
def test_bias_of_a_convolution_that_others_read_stays(body: str, outputs: str) -> None:
    after, fired = swapped(concat(body, f"{IMAGE.format(40)} y{outputs}"))
    assert fired == {"ConcatToOwnConcatChannels": 1, CONVOLUTIONS: 1}
    assert {node.op_type: len(node.inputs) for node in after.graph if node.op_type != "Relu"} == {
        "ChannelsLastConv": 3, "ConcatChannels": 2
    }  # fmt: skip


def test_bias_that_is_computed_stays() -> None:
    body = f"d = Mul(b, b) {convolution('s', 'x, u, d')} y = Concat<axis=3>(s, r)"
    model = graph(
        f"{IMAGE.format(8)} x, {IMAGE.format(24)} r, float16[16] b",
        f"{IMAGE.format(40)} y", body, f"{IMAGE.format(16)} s, float16[16] d", u=WEIGHTS["u"],
    )  # fmt: skip
    after, _ = swapped(model)
    assert own(after) == ["ChannelsLastConv", "ConcatChannels"]
    assert [len(node.inputs) for node in after.graph] == [2, 3, 2]


@pytest.mark.parametrize(
    ("inputs", "outputs", "body"),
    [
        ("float16[B,4,6,64] x, float16[B,8,6,64] r", "float16[B,12,6,64] y", "y = Concat<axis=1>(x, r)"),
        ("float16[B,S,64] x, float16[B,S,8] r", "float16[B,S,72] y", "y = Concat<axis=2>(x, r)"),
        ("float16[B,8,8,64] x, float16[B,8,8,8] r", "float16[B,8,8,80] y", "y = Concat<axis=3>(x, r, r)"),
    ],
    ids=["other axis", "no image", "three inputs"],
)
def test_concats_that_stay(inputs: str, outputs: str, body: str) -> None:
    assert failures(graph(inputs, outputs, body)) == ()


@pytest.mark.parametrize(
    ("kind", "left", "reason"),
    [
        ("float16", "12", "12 and 24 channels: the kernel accepts multiples of 8"),
        ("float16", "C", "None and 24 channels: the kernel accepts multiples of 8"),
        ("float", "16", "the input is FLOAT, the kernel accepts FLOAT16"),
    ],
)
def test_refused_concats(kind: str, left: str, reason: str) -> None:
    total = {"12": "36", "16": "40", "C": "D"}[left]
    shapes = f"{kind}[B,H,W,{left}] x, {kind}[B,H,W,24] r", f"{kind}[B,H,W,{total}] y"
    assert [each.reason for each in failures(graph(*shapes, "y = Concat<axis=3>(x, r)"))] == [reason]


FLOOR = 'coordinate_transformation_mode="asymmetric", nearest_mode="floor"'
DOUBLED = np.array([1, 2, 2, 1], np.float32)


def resize(x: str, y: str, attributes: str = FLOOR, kind: str = "float16", **weights: Array) -> ir.Model:
    """Return a graph of a Resize by factors `k`, or to the sizes `n`."""
    inputs = "x, , , n" if "n" in weights else "x, , k"
    return graph(f"{kind}[{x}] x", f"{kind}[{y}] y", f"y = Resize<{attributes}>({inputs})", **weights)


def test_resize_by_two() -> None:
    after, fired = swapped(resize("B,H,W,16", "B,P,Q,16", k=DOUBLED))
    assert fired == {"ResizeToOwnUpsampleNearest": 1}
    (node,) = after.graph
    assert len(node.inputs) == 1


@pytest.mark.parametrize("sizes", [(2, 8, 12, 16), (2, 7, 11, 16), (2, 8, 11, 16)], ids=str)
def test_resize_to_known_sizes(sizes: tuple[int, ...]) -> None:
    model = resize("2,4,6,16", ",".join(map(str, sizes)), n=np.array(sizes))
    assert swapped(model)[1] == {"ResizeToOwnUpsampleNearest": 1}


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("floor(H/2 + 1/2)", "H"),
        ("floor(H/4 + 3/4)", "floor(H/2 + 1/2)"),
        ("H", "2*H"),
        ("H", "2*H - 1"),
    ],
)
@pytest.mark.parametrize("height", [1, 6, 7])
def test_resize_to_the_size_of_a_skip_connection(inner: str, outer: str, height: int) -> None:
    """As in a UNet: sizes are computed, and shape inference knows how they depend on the inputs' sizes."""
    model = sized(inner, outer)
    assert use_kernels(copied(model)).fired == {"ResizeToOwnUpsampleNearest": 1}
    assert size_of(inner, height) == (size_of(outer, height) + 1) // 2


def size_of(text: str, height: int) -> int:
    expression = parsed(text)
    return int(expression.subs(dict.fromkeys(expression.free_symbols, height)))


def sized(inner: str, outer: str, batch: str = "B") -> ir.Model:
    """Return a graph that resizes x (B,inner,8,16) to n, the sizes of y (batch,outer,16,16)."""
    model = graph("float16[B,P,8,16] x, int64[4] n", f"float16[{batch},Q,16,16] y", f"y = Resize<{FLOOR}>(x, , , n)")
    for value, size in ((model.graph.inputs[0], inner), (model.graph.outputs[0], outer)):
        shape = list(value.shape or ())
        shape[1] = ir.SymbolicDim(size)
        value.shape = ir.Shape(shape)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (resize("B,H,W,16", "B,P,Q,16", 'nearest_mode="floor"', k=DOUBLED), "coordinates are half_pixel"),
        (
            resize("B,H,W,16", "B,P,Q,16", FLOOR.replace("floor", "ceil"), k=DOUBLED),
            "coordinates are asymmetric and rounded by ceil",
        ),
        (resize("B,16,H,W", "B,16,P,Q", k=DOUBLED[[0, 3, 1, 2]]), "None channels"),
        (resize("B,16,8,8", "B,16,16,16", k=DOUBLED[[0, 3, 1, 2]]), "the factors are not known to be 1, 2, 2, 1"),
        (resize("B,H,W,16", "B,P,Q,16", k=2 * DOUBLED), "the factors are not known to be 1, 2, 2, 1"),
        (resize("2,4,6,16", "2,9,12,16", n=np.array([2, 9, 12, 16])), "the sizes are not known to be doubled"),
        (resize("2,4,6,16", "2,8,10,16", n=np.array([2, 8, 10, 16])), "the sizes are not known to be doubled"),
        (sized("H", "2*H", batch="A"), "the sizes are not known to be doubled"),
        (sized("H", "H2"), "the sizes are not known to be doubled"),
        (sized("floor(H/2)", "H"), "the sizes are not known to be doubled"),
        (resize("B,H,W,12", "B,P,Q,12", k=DOUBLED), "12 channels: the kernel accepts multiples of 8"),
        (resize("B,H,W,16", "B,P,Q,16", kind="float", k=DOUBLED), "the input is FLOAT"),
        (
            resize("2,4,6,16", "2,8,12,16", f"{FLOOR}, axes=[1,2]", n=np.array([8, 12])),
            "sizes are those of some axes, or keep an aspect ratio",
        ),
    ],
)
def test_refused_resizes(model: ir.Model, reason: str) -> None:
    assert [reason in each.reason for each in failures(copied(model))] == [True]


@pytest.mark.parametrize(
    "model",
    [
        resize("B,H,W,16", "B,P,Q,16", f'mode="linear", {FLOOR}', k=DOUBLED),
        resize("B,S,16", "B,P,16", k=DOUBLED[[0, 1, 3]]),
    ],
    ids=["linear", "no image"],
)
def test_resizes_that_stay(model: ir.Model) -> None:
    assert failures(copied(model)) == ()


def one_convolution(attributes: str, inputs: str = "x, u", image: str = "") -> ir.Model:
    """Return a graph of a convolution of x (B,H,W,8) by 3x3 weights, and of an image of the result's size if given."""
    body = f"y = com.microsoft.NhwcConv<kernel_shape=[3,3]{attributes}>({inputs})"
    return graph(f"{IMAGE.format(8)} x{image}", "float16[B,P,Q,16] y", body, **used(body, WEIGHTS))


@pytest.mark.parametrize(
    ("attributes", "stride", "pad"),
    [("", 1, 0), (", pads=[1,1,1,1]", 1, 1), (", strides=[2,2], pads=[1,1,1,1], dilations=[1,1], group=1", 2, 1)],
)
@pytest.mark.parametrize("inputs", ["x, u", "x, u, b"])
def test_convolutions_are_replaced(attributes: str, stride: int, pad: int, inputs: str) -> None:
    """`swapped` also runs both graphs and compares the results."""
    after, fired = swapped(one_convolution(attributes, inputs))
    assert fired == {CONVOLUTIONS: 1}
    (node,) = after.graph
    assert [each.name for each in node.inputs if each is not None] == inputs.split(", ")
    assert (node.attributes.get_int("stride"), node.attributes.get_int("pad")) == (stride, pad)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        (", strides=[1,2]", "the axes have different strides or pads"),
        (", pads=[1,0,1,0]", "the axes have different strides or pads"),
        (", dilations=[2,2]", "the convolution has groups or dilations"),
        (', auto_pad="SAME_UPPER"', "padding is computed at run time (auto_pad)"),
    ],
)
def test_other_convolutions_stay(attributes: str, reason: str) -> None:
    assert [failure.reason for failure in failures(one_convolution(attributes))] == [reason]


def test_convolution_in_groups_stays() -> None:
    body = "y = com.microsoft.NhwcConv<kernel_shape=[3,3], group=2>(x, g)"
    model = graph(f"{IMAGE.format(8)} x", "float16[B,P,Q,16] y", body, g=half(16, 3, 3, 4))
    assert [failure.reason for failure in failures(model)] == ["the convolution has groups or dilations"]


def test_convolution_that_adds_an_image_stays() -> None:
    image = f", {IMAGE.format(16)} z"
    model = one_convolution(", pads=[1,1,1,1]", "x, u, b, z", image=image)
    assert [failure.reason for failure in failures(model)] == ["an image is added to the convolution"]
