from __future__ import annotations

import onnx_ir as ir
import pytest
from support.graphs import (
    assert_fires,
    assert_refuses,
    graph,
    int64,
    node_of,
    normal,
    operators,
)

from sdonnx.fusions.fuse_bias_add import BiasAfterReshape
from sdonnx.fusions.fuse_group_norm import FlatGroupNormToGroupNorm
from sdonnx.fusions.transpose_flat_images import ChannelsLastToFlatChannels, FlatChannelsToChannelsLast

NORM = {"g": normal(8, seed=1), "b": normal(8, seed=2)}
SIZES = {"B": 2, "H": 4, "W": 7, "P": 28}

IMAGE = "float[B,8,H,W] x"
FLAT = "float[B,8,P] y"
FLAT_NORM = "f = Reshape(x, flat) y = GroupNormalization<num_groups=4, epsilon=0.01>(f, g, b)"


def test_flat_group_norm() -> None:
    model = graph(IMAGE, FLAT, FLAT_NORM, flat=int64([0, 0, -1]), **NORM)
    rewritten = assert_fires(model, FlatGroupNormToGroupNorm, 1, sizes=SIZES)
    assert [node.op_type for node in rewritten.graph] == ["GroupNormalization", "Reshape"]
    assert node_of(rewritten, "GroupNormalization").outputs[0].shape == ir.Shape(["B", 8, "H", "W"])


def test_flat_group_norm_whose_input_is_the_residual() -> None:
    model = graph(IMAGE, f"{FLAT}, float[B,8,P] z", f"{FLAT_NORM} z = Add(f, y)", flat=int64([0, 0, -1]), **NORM)
    rewritten = assert_fires(model, FlatGroupNormToGroupNorm, 1, sizes=SIZES)
    assert operators(rewritten, "GroupNormalization", "Reshape") == {"GroupNormalization": 1, "Reshape": 2}


@pytest.mark.parametrize(
    ("inputs", "outputs", "target"),
    [
        ("float[B,4,H,W] x", "float[B,8,P] y", [0, 8, -1]),
        ("float[2,8,4,6] x", "float[4,8,12] y", [4, 8, 12]),
        ("float[B,8,P] x", "float[B,8,P] y", [0, 0, -1]),
        ("float[2,8,4,6] x", "float[2,8,8,3] y", [2, 8, 8, 3]),
        # Sizes without names may differ: here the batch would be 2 before and 1 after.
        ("float[?,8,H,W] x", "float[?,8,?] y", [-1, 8, 56]),
    ],
)
def test_another_reshape_before_the_norm_is_refused(inputs: str, outputs: str, target: list[int]) -> None:
    model = graph(inputs, outputs, FLAT_NORM, flat=int64(target), **NORM)
    assert_refuses(model, FlatGroupNormToGroupNorm, "the reshape does more than flatten height and width")


TO_SEQUENCE = "f = Reshape(x, flat) y = Transpose<perm=[0,2,1]>(f)"


def test_flat_channels() -> None:
    model = graph(IMAGE, "float[B,P,8] y", TO_SEQUENCE, flat=int64([0, 8, -1]))
    rewritten = assert_fires(model, FlatChannelsToChannelsLast, 1, sizes=SIZES)
    assert operators(rewritten) == {"Transpose": 1, "Constant": 1, "Reshape": 1}
    assert node_of(rewritten, "Transpose").outputs[0].shape == ir.Shape(["B", "H", "W", 8])


def test_flat_channels_whose_flat_image_is_used_elsewhere() -> None:
    outputs = "float[B,P,8] y, float[B,8,P] z"
    model = graph(IMAGE, outputs, f"{TO_SEQUENCE} z = Neg(f)", flat=int64([0, 8, -1]))
    rewritten = assert_fires(model, FlatChannelsToChannelsLast, 1, sizes=SIZES)
    assert operators(rewritten, "Reshape") == {"Reshape": 2}


@pytest.mark.parametrize(
    ("inputs", "outputs", "target", "reason"),
    [
        ("float[B,8,H,W] x", "float[B,P,4] y", [0, 4, -1], "the reshape does more"),
        ("float[2,8,4,6] x", "float[4,6,16] y", [4, 16, 6], "the reshape does more"),
        ("float[B,8,P] x", "float[B,P,8] y", [0, 0, -1], "the reshape does more"),
        ("float[?,8,H,W] x", "float[?,?,8] y", [-1, 8, 56], "the reshape does more"),
        ("float[B,C,H,W] x", "float[B,P,C] y", [0, 0, -1], "the number of channels is dynamic"),
    ],
)
def test_other_reshapes_to_a_sequence_are_refused(inputs: str, outputs: str, target: list[int], reason: str) -> None:
    model = graph(inputs, outputs, TO_SEQUENCE, flat=int64(target))
    assert_refuses(model, FlatChannelsToChannelsLast, reason)


def test_another_transpose_is_no_candidate() -> None:
    model = graph(
        IMAGE, "float[8,B,P] y", "f = Reshape(x, flat) y = Transpose<perm=[1,0,2]>(f)", flat=int64([0, 8, -1])
    )
    assert_refuses(model, FlatChannelsToChannelsLast, None)


TO_IMAGE = "t = Transpose<perm=[0,2,1]>(x) y = Reshape(t, shape)"


@pytest.mark.parametrize("target", [[-1, 8, 4, 7], [0, 0, 4, 7], [0, 8, 4, -1], [0, 0, -1, 7]])
def test_sequence_to_image(target: list[int]) -> None:
    """The target may say 0 (the size at the same place) and -1."""
    model = graph("float[B,28,8] x", "float[B,8,4,7] y", TO_IMAGE, shape=int64(target))
    rewritten = assert_fires(model, ChannelsLastToFlatChannels, 1)
    assert node_of(rewritten, "Reshape").outputs[0].shape == ir.Shape(["B", 4, 7, 8])
    assert node_of(rewritten, "Transpose").attributes.get_ints("perm") == (0, 3, 1, 2)


def test_sequence_to_an_image_whose_sizes_are_computed() -> None:
    model = graph("float[B,P,8] x, float[B,8,H,W] i", "float[B,8,H,W] y", f"shape = Shape(i) {TO_IMAGE}")
    assert_fires(model, ChannelsLastToFlatChannels, 1, sizes=SIZES)


@pytest.mark.parametrize(
    ("inputs", "outputs", "target", "reason"),
    [
        ("float[2,28,8] x", "float[2,4,8,7] y", [2, 4, 8, 7], "the reshape does more"),
        ("float[2,28,8] x", "float[1,16,4,7] y", [1, 16, 4, 7], "the reshape does more"),
        ("float[2,28,8] x", "float[2,224] y", [2, 224], "the reshape does more"),
        ("float[?,28,8] x", "float[?,8,?,7] y", [-1, 8, 2, 7], "the reshape does more"),
        ("float[B,28,C] x", "float[B,C,4,7] y", [0, 0, 4, 7], "the number of channels is dynamic"),
    ],
)
def test_other_reshapes_to_an_image_are_refused(inputs: str, outputs: str, target: list[int], reason: str) -> None:
    assert_refuses(graph(inputs, outputs, TO_IMAGE, shape=int64(target)), ChannelsLastToFlatChannels, reason)


def test_a_transposed_sequence_used_elsewhere_blocks() -> None:
    model = graph("float[B,28,8] x", "float[B,8,4,7] y, float[B,8,28] t", TO_IMAGE, shape=int64([0, 8, 4, 7]))
    assert_refuses(model, ChannelsLastToFlatChannels, None)


BIASED = "a = Add(x, bias) y = Reshape(a, shape)"


@pytest.mark.parametrize(
    ("inputs", "outputs", "target"),
    [
        ("float[B,4,7,8] x", "float[B,28,8] y", [0, 28, 8]),
        ("float[B,28,8] x", "float[B,4,7,8] y", [0, 4, 7, 8]),
        ("float[B,S,8] x", "float[P,8] y", [-1, 8]),
    ],
)
@pytest.mark.parametrize("body", [BIASED, "a = Add(bias, x) y = Reshape(a, shape)"])
def test_a_bias_is_added_after_the_reshape(inputs: str, outputs: str, target: list[int], body: str) -> None:
    model = graph(inputs, outputs, body, bias=normal(8), shape=int64(target))
    rewritten = assert_fires(model, BiasAfterReshape, 1, commute=True)
    assert [node.op_type for node in rewritten.graph] == ["Reshape", "Add"]
    wanted = ir.Shape(["B*S", 8]) if "P" in outputs else model.graph.outputs[0].shape
    assert node_of(rewritten, "Reshape").outputs[0].shape == wanted


NOT_BIASES = {
    "last axis changed": ("float[B,4,6,8] x", "float[B,24,4,2] y", [0, 24, 4, 2], normal(8), "the last axis"),
    "last axis made": ("float[B,4,6,1] x", "float[B,192,1] y", [0, 192, 1], normal(8), "not a constant vector"),
    "a matrix": ("float[B,4,6,8] x", "float[B,24,8] y", [0, 24, 8], normal(6, 8), "not a constant vector"),
    "a number": ("float[B,4,6,8] x", "float[B,24,8] y", [0, 24, 8], normal(), "not a constant vector"),
    "one element": ("float[B,4,6,8] x", "float[B,24,8] y", [0, 24, 8], normal(1), "not a constant vector"),
}


@pytest.mark.parametrize("name", NOT_BIASES)
def test_other_addends_stay_before_the_reshape(name: str) -> None:
    inputs, outputs, target, bias, reason = NOT_BIASES[name]
    assert_refuses(graph(inputs, outputs, BIASED, bias=bias, shape=int64(target)), BiasAfterReshape, reason)


def test_an_activation_is_no_bias() -> None:
    model = graph("float[B,4,6,8] x, float[8] bias", "float[B,24,8] y", BIASED, shape=int64([0, 24, 8]))
    assert_refuses(model, BiasAfterReshape, None, commute=True)


def test_a_biased_value_used_elsewhere_blocks() -> None:
    outputs = "float[B,24,8] y, float[B,4,6,8] a"
    model = graph("float[B,4,6,8] x", outputs, BIASED, bias=normal(8), shape=int64([0, 24, 8]))
    assert_refuses(model, BiasAfterReshape, None)
