from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import (
    CONVERTERS,
    IMAGE_SIZES,
    assert_same_function,
    channels_last,
    copied,
    graph,
    int64,
    node_of,
    normal,
    operators,
    text_of,
)

from sdonnx.fusions.channels_last import convert_to_channels_last
from sdonnx.graph.edit import constant_value, input_of, required
from sdonnx.graph.modules import MODULE_KEY, module_path


def image(channels: int | str, name: str, height: str = "H", width: str = "W") -> str:
    return f"float[B,{channels},{height},{width}] {name}"


CONVOLUTIONS = {
    "3x3": ("pads=[1,1,1,1]", (12, 8, 3, 3), "NhwcConv"),
    "without attributes": ("", (12, 8, 3, 3), "NhwcConv"),
    "strided": ("strides=[2,2], pads=[1,1,1,1]", (12, 8, 3, 3), "NhwcConv"),
    "dilated": ("dilations=[2,2], pads=[2,2,2,2]", (12, 8, 3, 3), "NhwcConv"),
    "grouped": ("group=4, pads=[1,1,1,1]", (12, 2, 3, 3), "NhwcConv"),
    "depthwise": ("group=8, pads=[1,1,1,1]", (8, 1, 3, 3), "NhwcConv"),
    "oblong": ("pads=[0,1,0,1], kernel_shape=[1,3]", (12, 8, 1, 3), "NhwcConv"),
    "1x1": ("kernel_shape=[1,1]", (12, 8, 1, 1), "MatMul"),
    "1x1 strided": ("strides=[2,2]", (12, 8, 1, 1), "NhwcConv"),
    "1x1 padded": ("pads=[1,1,1,1]", (12, 8, 1, 1), "NhwcConv"),
    "1x1 grouped": ("group=2", (12, 4, 1, 1), "NhwcConv"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_convolutions(name: str, has_bias: bool) -> None:
    attributes, shape, op_type = CONVOLUTIONS[name]
    weights = {"w": normal(*shape)} | ({"b": normal(shape[0], seed=1)} if has_bias else {})
    call = f"y = Conv{f'<{attributes}>' if attributes else ''}(x, w{', b' if has_bias else ''})"
    model = graph(image(8, "x"), image(shape[0], "y", "P", "Q"), call, **weights)
    rewritten, layout = channels_last(model)
    assert layout.fired == {"Conv": 1}
    assert layout.failures == ()
    assert operators(rewritten) == {"Transpose": 2, op_type: 1} | ({"Add": 1} if has_bias else {})
    # The kernel wants its weight as an initializer.
    assert input_of(node_of(rewritten, op_type), 1).is_initializer()


def test_uneven_pads_become_an_operator() -> None:
    """As in the VAE encoder's downsampling; cuDNN pads both sides alike."""
    model = graph(
        image(8, "x"), image(12, "y", "P", "Q"), "y = Conv<pads=[0,0,1,1], strides=[2,2]>(x, w)", w=normal(12, 8, 3, 3)
    )
    rewritten, _ = channels_last(model)
    assert operators(rewritten) == {"Transpose": 2, "Pad": 1, "NhwcConv": 1}
    assert node_of(rewritten, "NhwcConv").attributes.get_ints("pads") == (0, 0, 0, 0)
    assert required(constant_value(node_of(rewritten, "Pad").inputs[1])).tolist() == [0, 0, 0, 0, 0, 1, 1, 0]


REFUSED = {
    "activation as weight": (f"{image(8, 'x')}, float[12,8,3,3] w", "y = Conv(x, w)", "the weights are not constant"),
    "activation as bias": (f"{image(8, 'x')}, float[12] b", "y = Conv(x, w, b)", "the weights are not constant"),
    "one-dimensional": ("float[B,8,W] x", "y = Conv(x, w1)", "the convolution is not two-dimensional"),
    "auto_pad": (image(8, "x"), 'y = Conv<auto_pad="SAME_UPPER">(x, w)', "padding is computed at run time"),
    "odd group": (image(8, "x"), "y = GroupNormalization<num_groups=8>(x, g, b)", "8 channels in 8 groups"),
    "one scale a group": (
        image(8, "x"), "y = GroupNormalization<num_groups=2>(x, g2, b)", "do not have one element per channel",
    ),
    "group norm of a sequence": ("float[B,8,W] x", "y = GroupNormalization<num_groups=2>(x, g, b)",
                                 "the input has 3 dimensions, the kernel accepts 4"),
    "group norm of any channels": ("float[B,D,H,W] x", "y = GroupNormalization<num_groups=2>(x, g, b)",
                                   "the number of channels is not known"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_operators_stay_with_a_reason(name: str) -> None:
    inputs, call, reason = REFUSED[name]
    weights = {
        "w": normal(12, 8, 3, 3), "w1": normal(12, 8, 3), "g": normal(8), "g2": normal(2),
        "b": normal(8 if " g" in call else 12),
    }  # fmt: skip
    used = {key: value for key, value in weights.items() if f" {key}," in call or f" {key})" in call}
    used = {key: value for key, value in used.items() if f"] {key}" not in inputs}
    output = "float[B,D,W] y" if "float[B,8,W]" in inputs else "float[B,D,P,Q] y"
    model = graph(inputs, output, call, **used)
    node = next(iter(model.graph))
    node.metadata_props[MODULE_KEY] = "mid.conv"
    before = text_of(model)
    layout = convert_to_channels_last(model, CONVERTERS)
    assert layout.fired == {}
    assert text_of(model) == before
    ((rule, name_, module, found),) = [
        (failure.rule, failure.node, failure.module, failure.reason) for failure in layout.failures
    ]
    assert (rule, name_, module) == ("ChannelsLast", node.name, "mid.conv")
    assert reason in found


def test_images_of_unknown_shape_stay() -> None:
    """Operators on values of unknown shape are not rewritten."""
    body = """n = GroupNormalization<num_groups=2>(x, g, b) r = Relu(n) c = Conv<pads=[1,1,1,1]>(r, w)
        d = Conv<pads=[1,1,1,1]>(x, w) e = Concat<axis=1>(d, n) y = Relu(e)"""
    weights = {"g": normal(8), "b": normal(8), "w": normal(8, 8, 3, 3)}
    model = graph(image(8, "x"), image(16, "y"), body, image(16, "e"), **weights)
    for node in model.graph:
        if node.outputs[0].name in ("n", "r", "c"):
            node.outputs[0].shape = None
    rewritten = copied(model)
    layout = convert_to_channels_last(rewritten, CONVERTERS)
    assert_same_function(rewritten, model, sizes=IMAGE_SIZES)
    assert layout.fired == {"Conv": 1}
    assert {failure.reason for failure in layout.failures} == {
        "the shape of its output is not known", "the shape of an operand is not known",
    }  # fmt: skip


def test_group_norm_keeps_its_numbers() -> None:
    body = "y = GroupNormalization<num_groups=4, epsilon=0.1>(x, g, b)"
    model = graph(image(8, "x"), image(8, "y"), body, g=normal(8, seed=1), b=normal(8, seed=2))
    rewritten, layout = channels_last(model)
    attributes = {name: value.value for name, value in node_of(rewritten, "GroupNorm").attributes.items()}
    assert attributes == {"groups": 4, "epsilon": pytest.approx(0.1), "activation": 0, "channels_last": 1}
    assert layout.fired == {"GroupNormalization": 1}


CONV = "c = Conv<pads=[1,1,1,1]>(x, w)"
W8 = {"w": normal(8, 8, 3, 3)}


@pytest.mark.parametrize("op", ["Sigmoid", "Tanh", "Relu", "Gelu", "Identity", "Erf", "Neg", "Exp"])
def test_unary_operators_follow(op: str) -> None:
    rewritten, layout = channels_last(graph(image(8, "x"), image(8, "y"), f"{CONV} y = {op}(c)", **W8))
    assert layout.fired == {"Conv": 1, op: 1}
    assert operators(rewritten, "Transpose") == {"Transpose": 2}


def test_attributes_and_types_of_unary_operators_stay() -> None:
    body = f'{CONV} a = Gelu<approximate="tanh">(c) y = Cast<to=10>(a)'
    rewritten, _ = channels_last(graph(image(8, "x"), image(8, "y").replace("float", "float16"), body, **W8), 1e-3)
    assert node_of(rewritten, "Gelu").attributes.get_string("approximate") == "tanh"
    assert rewritten.graph.outputs[0].dtype == ir.DataType.FLOAT16


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("operand", "inputs", "transposes"),
    [
        ("number", "", 2),
        ("one", "", 2),
        ("ones", "", 2),
        ("row", "", 2),
        ("plane", "", 2),
        ("z", image(8, "z"), 3),
        ("r", "float[B,8,1,1] r", 3),
        ("n", "float n", 2),
    ],
)
def test_binary_operators_follow(op: str, swapped: bool, operand: str, inputs: str, transposes: int) -> None:
    """An image, a row for each image, a constant of either kind, or a number."""
    constants = {
        "number": np.array(3, np.float32), "one": normal(1), "ones": normal(1, 1, 1) + 4,
        "row": normal(1, 8, 1, 1) + 4, "plane": normal(1, 1, 6, 8) + 4,
    }  # fmt: skip
    weights = {operand: constants[operand]} if operand in constants else {}
    order = f"{operand}, c" if swapped else f"c, {operand}"
    model = graph(
        f"{image(8, 'x')}{', ' if inputs else ''}{inputs}", image(8, "y"), f"{CONV} y = {op}({order})", **W8, **weights
    )
    rewritten, layout = channels_last(model, 1e-3)
    assert layout.fired == {"Conv": 1, op: 1}
    assert operators(rewritten, "Transpose") == {"Transpose": transposes}


@pytest.mark.parametrize("operand", ["column", "vector", "plane"])
def test_other_broadcasts_stay(operand: str) -> None:
    weights = {"column": normal(8, 1, 1), "vector": normal(8), "plane": normal(6, 8)}
    model = graph(image(8, "x"), image(8, "y"), f"{CONV} y = Mul(c, {operand})", **W8, **{operand: weights[operand]})
    rewritten, layout = channels_last(model)
    assert [failure.reason for failure in layout.failures] == ["an operand is neither an image nor a number"]
    assert operators(rewritten, "Transpose") == {"Transpose": 2}


@pytest.mark.parametrize("axes", [[2, 3], [-2, -1], [3, 2]])
@pytest.mark.parametrize("swapped", [False, True])
def test_the_time_embedding_is_added_as_a_row(axes: list[int], swapped: bool) -> None:
    order = "r, c" if swapped else "c, r"
    body = f"{CONV} r = Unsqueeze(e, axes) a = Add({order}) y = Conv<pads=[1,1,1,1]>(a, w)"
    model = graph(f"{image(8, 'x')}, float[B,8] e", image(8, "y"), body, **W8, axes=int64(axes))
    rewritten, _ = channels_last(model)
    assert operators(rewritten, "Transpose") == {"Transpose": 2}
    assert [node.outputs[0].shape for node in rewritten.graph if node.op_type == "Unsqueeze"] == [
        ir.Shape(["B", 1, 1, 8])
    ]


def test_a_row_used_elsewhere() -> None:
    """The time embedding that was unsqueezed is read by a node that wants it as it was."""
    body = f"r = Unsqueeze(e, axes) z = Exp(r) {CONV} y = Add(c, r)"
    outputs = f"{image(8, 'y')}, float[B,8,1,1] z"
    model = graph(f"{image(8, 'x')}, float[B,8] e", outputs, body, **W8, axes=int64([2, 3]))
    rewritten, _ = channels_last(model)
    assert operators(rewritten, "Transpose", "Unsqueeze") == {"Transpose": 2, "Unsqueeze": 2}


@pytest.mark.parametrize("axis", [1, -3])
def test_channels_are_joined_last(axis: int) -> None:
    model = graph(f"{image(8, 'x')}, {image(4, 'z')}", image(20, "y"), f"{CONV} y = Concat<axis={axis}>(z, c, x)", **W8)
    rewritten, _ = channels_last(model)
    assert node_of(rewritten, "Concat").attributes.get_int("axis") == 3
    assert operators(rewritten, "Transpose") == {"Transpose": 3}


def test_another_axis_is_joined_as_it_is() -> None:
    model = graph(image(8, "x"), image(8, "y", "P"), f"{CONV} y = Concat<axis=2>(c, x)", **W8)
    rewritten, layout = channels_last(model)
    assert layout.fired == {"Conv": 1}
    assert node_of(rewritten, "Concat").attributes.get_int("axis") == 2


RESIZES = {
    "scales": ("Resize<mode=\"nearest\", coordinate_transformation_mode=\"asymmetric\", nearest_mode=\"floor\">"
               "(c, , scales)", {"scales": np.array([1, 1, 2, 3], np.float32)}),
    "sizes": ("Resize<mode=\"nearest\", coordinate_transformation_mode=\"asymmetric\", nearest_mode=\"floor\">"
              "(c, , , sizes)", {"sizes": int64([2, 8, 9, 11])}),
    "defaults": ("Resize(c, , scales)", {"scales": np.array([1, 1, 0.5, 2], np.float32)}),
}  # fmt: skip


@pytest.mark.parametrize("name", RESIZES)
def test_images_are_resized_in_their_order(name: str) -> None:
    call, weights = RESIZES[name]
    model = graph(image(8, "x"), "float[B,8,P,Q] y", f"{CONV} y = {call}", **W8, **weights)
    rewritten, layout = channels_last(model)
    assert layout.fired == {"Conv": 1, "Resize": 1}
    assert operators(rewritten, "Transpose") == {"Transpose": 2}


def test_an_image_is_resized_to_the_size_of_another() -> None:
    """As UNet2DConditionModel upsamples to the size of the skip connection."""
    sizes = "s = Shape(z) a = Slice(s, two, four) n = Shape<end=2>(c) t = Concat<axis=0>(n, a)"
    body = f"{CONV} {sizes} y = Resize(c, , , t)"
    model = graph(f"{image(8, 'x')}, float[B,3,P,Q] z", "float[B,8,P,Q] y", body, **W8, two=int64([2]), four=int64([4]))
    rewritten, _ = channels_last(model)
    assert operators(rewritten, "Transpose", "Conv") == {"Transpose": 2, "Conv": 0}


@pytest.mark.parametrize(
    ("attributes", "scales"),
    [
        ('mode="linear"', [1, 1, 2, 2]),
        ('mode="cubic"', [1, 1, 2, 2]),
        ('mode="nearest", axes=[2,3]', [2, 2]),
    ],
)
def test_other_resizes_stay(attributes: str, scales: list[int]) -> None:
    body = f"{CONV} y = Resize<{attributes}>(c, , scales)"
    model = graph(image(8, "x"), "float[B,8,P,Q] y", body, **W8, scales=np.array(scales, np.float32))
    rewritten, layout = channels_last(model)
    (failure,) = layout.failures
    assert failure.reason == "only nearest-neighbour resizing of whole images is moved"
    assert operators(rewritten, "Transpose") == {"Transpose": 2}


@pytest.mark.parametrize("part", ["", "<start=2>", "<start=1, end=3>", "<end=-2>", "<start=-1>", "<start=-3, end=-1>"])
def test_sizes_are_read_from_the_twin(part: str) -> None:
    model = graph(image(8, "x"), f"{image(8, 'y')}, int64[N] s", f"{CONV} s = Shape{part}(c) y = Relu(c)", **W8)
    rewritten, _ = channels_last(model)
    assert operators(rewritten, "Transpose") == {"Transpose": 2}


def test_an_image_that_is_channels_last_already() -> None:
    """A graph with an input and an output of (B,H,W,C) needs no transpose at all."""
    body = f"t = Transpose<perm=[0,3,1,2]>(i) {CONV.replace('x', 't')} y = Transpose<perm=[0,2,3,1]>(c)"
    model = graph("float[B,H,W,8] i", "float[B,H,W,8] y", body, **W8)
    rewritten, _ = channels_last(model)
    assert operators(rewritten) == {"NhwcConv": 1}


def test_an_image_given_out_in_both_orders_and_twice() -> None:
    body = f"{CONV} y = Transpose<perm=[0,2,3,1]>(c) z = Transpose<perm=[0,2,3,1]>(c)"
    outputs = f"{image(8, 'c')}, float[B,H,W,8] y, float[B,H,W,8] z"
    rewritten, _ = channels_last(graph(image(8, "x"), outputs, body, **W8))
    assert operators(rewritten, "Transpose", "NhwcConv") == {"Transpose": 2, "NhwcConv": 1}


def test_an_input_given_out_in_the_order_that_it_came_in() -> None:
    body = f"t = Transpose<perm=[0,3,1,2]>(i) {CONV.replace('x', 't')} y = Relu(c) z = Transpose<perm=[0,2,3,1]>(t)"
    model = graph("float[B,H,W,8] i", f"{image(8, 'y')}, float[B,H,W,8] z", body, **W8)
    channels_last(model)


def test_an_image_of_another_operator() -> None:
    """It stays where it is, is transposed once for both convolutions, and serves its other user."""
    body = (
        "a = Softmax<axis=1>(x) c = Conv<pads=[1,1,1,1]>(a, w) d = Conv<pads=[1,1,1,1]>(a, w) e = Add(c, d) "
        "y = ReduceMean<keepdims=1>(a)"
    )
    model = graph(image(8, "x"), f"float[1,1,1,1] y, {image(8, 'e')}", body, **W8)
    model.graph.outputs[0].shape = ir.Shape([1, 1, 1, 1])
    second = [node for node in model.graph if node.op_type == "Conv"][1]
    second.attributes["dilations"] = ir.AttrInt64s("dilations", [1, 1])  # or they would be one
    rewritten, _ = channels_last(model)
    assert operators(rewritten, "Transpose", "Conv") == {"Transpose": 2, "Conv": 0}


def test_squeeze_and_excite() -> None:
    """A value computed from an image by an operator that is not moved, and multiplied with it."""
    body = f"{CONV} m = ReduceMean<keepdims=1>(c, axes) y = Mul(c, m)"
    rewritten, _ = channels_last(graph(image(8, "x"), image(8, "y"), body, **W8, axes=int64([2, 3])))
    assert operators(rewritten, "Conv", "NhwcConv") == {"Conv": 0, "NhwcConv": 1}


def test_a_convolution_that_stays_reads_the_original() -> None:
    body = f"{CONV} y = Conv<pads=[1,1,1,1]>(c, v)"
    rewritten, layout = channels_last(graph(f"{image(8, 'x')}, float[8,8,3,3] v", image(8, "y"), body, **W8))
    assert layout.fired == {"Conv": 1}
    assert len(layout.failures) == 1
    assert operators(rewritten) == {"Transpose": 2, "NhwcConv": 1, "Conv": 1}


def test_one_weight_of_two_convolutions_is_turned_once() -> None:
    body = "a = Conv<pads=[1,1,1,1]>(x, w, b) y = Conv<pads=[1,1,1,1]>(a, w, b)"
    rewritten, _ = channels_last(graph(image(8, "x"), image(8, "y"), body, **W8, b=normal(8)))
    assert set(rewritten.graph.initializers) == {"b", "w.nhwc"}


def test_new_nodes_belong_to_the_module_of_the_old_one() -> None:
    model = graph(image(8, "x"), image(8, "y"), "y = Conv<pads=[1,1,1,1]>(x, w, b)", **W8, b=normal(8))
    node_of(model, "Conv").metadata_props[MODULE_KEY] = "conv_in"
    rewritten, _ = channels_last(model)
    assert {module_path(node) for node in rewritten.graph} == {"conv_in"}
