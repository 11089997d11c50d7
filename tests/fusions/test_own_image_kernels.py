"""Nodes that move channels-last images are replaced by our own operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import Array, graph, normal, used
from support.own_swaps import failures, own, swapped

IMAGE = "float16[B,H,W,{}]"


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
    assert fired == {"ConcatToOwnConcatChannels": 1}
    *convolutions, node = after.graph
    assert [None if each is None else each.name for each in node.inputs[2:]] == biases
    for each in convolutions:
        assert len(each.inputs) == 2
        assert each.attributes.get_ints("pads") == (1, 1, 1, 1)


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
    assert fired == {"ConcatToOwnConcatChannels": 1}
    assert {node.op_type: len(node.inputs) for node in after.graph if node.op_type != "Relu"} == {
        "NhwcConv": 3, "ConcatChannels": 2
    }  # fmt: skip


def test_bias_that_is_computed_stays() -> None:
    body = f"d = Mul(b, b) {convolution('s', 'x, u, d')} y = Concat<axis=3>(s, r)"
    model = graph(
        f"{IMAGE.format(8)} x, {IMAGE.format(24)} r, float16[16] b",
        f"{IMAGE.format(40)} y", body, f"{IMAGE.format(16)} s, float16[16] d", u=WEIGHTS["u"],
    )  # fmt: skip
    after, _ = swapped(model)
    assert own(after) == ["ConcatChannels"]
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
