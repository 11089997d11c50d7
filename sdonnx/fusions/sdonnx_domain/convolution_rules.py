"""The rule of ChannelsLastConv, and the biases of convolutions that another operator can add."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.fusions.sdonnx_domain.replacement import replace_by, without_absent
from sdonnx.graph.edit import MICROSOFT, input_of, insert, is_weight, optional_input, replace
from sdonnx.graph.match import REWRITTEN, Refused, WalkResult
from sdonnx.operators.sdonnx_domain.convolution import check_channels_last_conv

__all__ = ["channels_last_conv", "drop_bias", "movable_bias"]


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
    inputs = without_absent(*node.inputs[:2], bias)
    replace_by(node, node.outputs[:1], "ChannelsLastConv", inputs, {"stride": strides[0], "pad": pads[0]})
    return REWRITTEN


def movable_bias(value: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """Return the NhwcConv that computes a value, and its bias, if the only reader of the value can add the bias."""
    convolution = value.producer()
    if convolution is None or (convolution.domain, convolution.op_type) != (MICROSOFT, "NhwcConv"):
        return None
    bias = optional_input(convolution, 2)
    if bias is None or not is_weight(bias) or value.is_graph_output() or len({use.node for use in value.uses()}) != 1:
        return None
    return convolution, bias


def drop_bias(convolution: ir.Node) -> None:
    """Replace a NhwcConv by one without a bias."""
    old, inputs, attributes = convolution.outputs[0], convolution.inputs[:2], convolution.attributes
    new = insert(convolution, "NhwcConv", inputs, attributes, domain=MICROSOFT, shape=old.shape, dtype=old.dtype)
    replace(old, new)
