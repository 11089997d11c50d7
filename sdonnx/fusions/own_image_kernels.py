"""Replacements of nodes that read channels-last images.

Concat along the channels, with a convolution's bias, Resize to twice the height and width, and convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.fusions.own_nodes import put_own
from sdonnx.fusions.repeated_rows import copied_value
from sdonnx.graph.edit import (
    MICROSOFT,
    constant_value,
    dims,
    input_of,
    insert,
    is_weight,
    known_dims,
    optional_input,
    replace,
)
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, Refused, WalkResult
from sdonnx.graph.shapes.expressions import expression_of, halved
from sdonnx.operators.kernel_case import SDONNX_DOMAIN
from sdonnx.operators.sdonnx_domain.convolution import check_channels_last_conv
from sdonnx.operators.sdonnx_domain.elementwise import check_concat_channels, check_upsample_nearest

__all__ = ["channels_last_conv", "concat_channels", "upsample_nearest"]


@dataclass(frozen=True)
class _Part:
    """An input of a Concat.

    Attributes:
        value: the input.
        convolution: the convolution that computes it, if its bias can be added later; None otherwise.
        bias: the bias of that convolution.
    """

    value: ir.Value
    convolution: ir.Node | None = None
    bias: ir.Value | None = None


def concat_channels(node: ir.Node, _: object) -> WalkResult:
    """Concat(NhwcConv(a, w, bias), y) -> ConcatChannels(NhwcConv(a, w), y, bias), with a bias of either input or none.

    ONNX Runtime adds the bias of these convolutions by a kernel of its own, which reads and writes the image once more.
    """
    rank = len(dims(node.outputs[0]) or ())
    if len(node.inputs) != 2 or rank != 4 or node.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return NOT_A_CANDIDATE
    parts = [_part(input_of(node, index)) for index in range(2)]
    inputs = [*(part.value for part in parts), *(part.bias for part in parts)]
    inputs[1] = copied_value(inputs[1]) or inputs[1]
    if (reason := check_concat_channels(parts[0].value, parts[1].value, *inputs[2:])) is not None:
        return Refused(reason)
    while inputs[-1] is None:
        inputs.pop()
    old = node.outputs[0]
    new = insert(node, "ConcatChannels", inputs, domain=SDONNX_DOMAIN, shape=old.shape, dtype=old.dtype)
    replace(old, new)
    for convolution in dict.fromkeys(part.convolution for part in parts if part.convolution is not None):
        _drop_bias(convolution)
    return REWRITTEN


def _part(value: ir.Value) -> _Part:
    convolution = value.producer()
    if convolution is None or (convolution.domain, convolution.op_type) != (MICROSOFT, "NhwcConv"):
        return _Part(value)
    bias = optional_input(convolution, 2)
    if not is_weight(bias) or value.is_graph_output() or len({use.node for use in value.uses()}) != 1:
        return _Part(value)
    return _Part(value, convolution, bias)


def _drop_bias(convolution: ir.Node) -> None:
    old = convolution.outputs[0]
    new = insert(
        convolution,
        "NhwcConv",
        convolution.inputs[:2],
        convolution.attributes,
        domain=MICROSOFT,
        shape=old.shape,
        dtype=old.dtype,
    )
    replace(old, new)


def upsample_nearest(node: ir.Node, _: object) -> WalkResult:
    """Resize(x (B,H,W,C), sizes) -> UpsampleNearest(x, sizes), or Resize(x, [1,2,2,1]) -> UpsampleNearest(x).

    Sizes come from a skip connection, which a convolution with a stride of 2 halved: twice the height, or one less.
    """
    attributes, x, old = node.attributes, input_of(node, 0), node.outputs[0]
    mode = attributes.get_string("mode", "nearest")
    if mode != "nearest" or len(dims(x) or ()) != 4 or len(dims(old) or ()) != 4:
        return NOT_A_CANDIDATE
    places = attributes.get_string("coordinate_transformation_mode", "half_pixel")
    rounding = attributes.get_string("nearest_mode", "round_prefer_floor")
    if (places, rounding) != ("asymmetric", "floor"):
        return Refused(f"coordinates are {places} and rounded by {rounding}")
    if "axes" in attributes or attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        return Refused("sizes are those of some axes, or keep an aspect ratio")
    scales, sizes = optional_input(node, 2), optional_input(node, 3)
    if (reason := check_upsample_nearest(x, sizes)) is not None:
        return Refused(reason)
    if sizes is None:
        factors = constant_value(scales)
        if factors is None or factors.tolist() != [1, 2, 2, 1]:
            return Refused("the factors are not known to be 1, 2, 2, 1")
    elif not _is_doubled(x, old):
        return Refused("the sizes are not known to be doubled, or one less")
    inputs = [x] if sizes is None else [x, sizes]
    replace(old, insert(node, "UpsampleNearest", inputs, domain=SDONNX_DOMAIN, shape=old.shape, dtype=old.dtype))
    return REWRITTEN


def _is_doubled(x: ir.Value, y: ir.Value) -> bool:
    """Return whether H = (H' + 1) // 2 and W = (W' + 1) // 2 for x (B,H,W,C) and y (B,H',W',C) of any sizes."""
    inner, outer = ([expression_of(dim) for dim in known_dims(value)] for value in (x, y))
    if None in inner or None in outer:
        return False
    return [outer[0], *map(halved, outer[1:3]), outer[3]] == inner


def channels_last_conv(node: ir.Node, _: object) -> WalkResult:
    """NhwcConv(x, w, bias) -> ChannelsLastConv(x, w, bias), with shared plans (docs/decisions/0198)."""
    attributes, bias = node.attributes, optional_input(node, 2)
    strides, pads = attributes.get_ints("strides", (1, 1)), attributes.get_ints("pads", (0, 0, 0, 0))
    if optional_input(node, 3) is not None:
        return Refused("an image is added to the convolution")
    if attributes.get_int("group", 1) != 1 or set(attributes.get_ints("dilations", (1, 1))) != {1}:
        return Refused("the convolution has groups or dilations")
    if attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return Refused("padding is computed at run time (auto_pad)")
    if len(set(strides)) != 1 or len(set(pads)) != 1:
        return Refused("the axes have different strides or pads")
    if (reason := check_channels_last_conv(input_of(node, 0), input_of(node, 1), bias)) is not None:
        return Refused(reason)
    inputs = [*node.inputs[:2], *([] if bias is None else [bias])]
    put_own(node, node.outputs[0], "ChannelsLastConv", inputs, {"stride": strides[0], "pad": pads[0]})
    return REWRITTEN
