"""Conv -> NhwcConv, and the bias that no other kernel took."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.fusions.channels_last import ChannelsLastWalk, nhwc_shape, nhwc_weight
from sdonnx.graph.edit import (
    MICROSOFT,
    arranged_initializer,
    constant,
    dims,
    insert,
    is_weight,
    producer_node,
    required,
    static_dim,
    tensor_of,
)
from sdonnx.graph.match import REWRITTEN, Refused, Rule, WalkResult, is_bias
from sdonnx.graph.tensors import transposed

__all__ = ["BiasIntoNhwcConv", "conv_to_nhwc_conv"]


def conv_to_nhwc_conv(walk: ChannelsLastWalk, node: ir.Node) -> WalkResult:
    """Conv(x, w, bias) -> NhwcConv(x, w) + bias, or MatMul(x, w) + bias for a 1x1 convolution.

    Shapes: x (B,C,H,W) -> (B,H,W,C), w (M,C,kH,kW) -> (M,kH,kW,C) or (C,M), bias (M,). Later stages pass the bias to
    the kernel that can add it.
    """
    graph, (x, weight) = required(node.graph), node.inputs[:2]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if x is None or weight is None or len(dims(x) or ()) != 4:
        return Refused("the convolution is not two-dimensional")
    if not is_weight(weight) or (bias is not None and not is_weight(bias)):
        return Refused("the weights are not constant, and NhwcConv needs initializers")
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return Refused("padding is computed at run time (auto_pad)")
    twin = walk.twin(x, node)
    shape = nhwc_shape(node.outputs[0])
    if _is_pointwise(node, weight):
        result = insert(node, "MatMul", [twin, _matrix(graph, weight)], shape=shape)
    else:
        attributes = {
            name: node.attributes[name]
            for name in ("dilations", "group", "kernel_shape", "strides")
            if name in node.attributes
        }
        padded, pads = _padded(graph, node, twin)
        inputs = [padded, nhwc_weight(graph, weight)]
        result = insert(node, "NhwcConv", inputs, attributes | {"pads": pads}, domain=MICROSOFT, shape=shape)
    if bias is not None:
        result = insert(node, "Add", [result, bias], shape=shape)
    walk.set_twin(node, result)
    return REWRITTEN


def _is_pointwise(node: ir.Node, weight: ir.Value) -> bool:
    ones = all(size == 1 for size in node.attributes.get_ints("strides", (1, 1)))
    no_pads = not any(node.attributes.get_ints("pads", (0, 0, 0, 0)))
    kernel = static_dim(weight, 2) == static_dim(weight, 3) == 1
    return kernel and ones and no_pads and node.attributes.get_int("group", 1) == 1


def _padded(graph: ir.Graph, node: ir.Node, twin: ir.Value) -> tuple[ir.Value, list[int]]:
    """Return the image to convolve, and the pads that are left for the kernel.

    cuDNN pads both sides by the same amount. Other pads (0,0,1,1 in the VAE encoder's downsampling) become a Pad.
    """
    top, left, bottom, right = node.attributes.get_ints("pads", (0, 0, 0, 0))
    if (top, left) == (bottom, right):
        return twin, [top, left, bottom, right]
    amounts = constant(graph, [0, top, left, 0, 0, bottom, right, 0], np.int64, f"pads_{node.name}")
    return insert(node, "Pad", [twin, amounts]), [0, 0, 0, 0]


def _matrix(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    """Return the weight (M,C,1,1) of a 1x1 convolution as (C,M)."""
    tensor = tensor_of(weight)
    out, channels, _, _ = tensor.shape.numpy()
    return arranged_initializer(
        graph,
        f"{weight.name}.matrix",
        tensor,
        lambda values: transposed(values.reshape(out, channels), (1, 0)),
        (channels, out),
    )


class BiasIntoNhwcConv(Rule):
    """NhwcConv(x, w) + bias -> NhwcConv(x, w, bias).

    Shapes: x (B,H,W,C), w (M,kH,kW,C), bias (M,). For the biases that no other kernel took.
    """

    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        conv = op.NhwcConv(x, weight, _domain=MICROSOFT, _allow_other_attributes=True, _outputs=["conv"])
        return op.Add(conv, bias)

    def check(self, weight: ir.Value, bias: ir.Value, **_: Any) -> str | None:
        return None if is_bias(bias, static_dim(weight, 0)) else "the addend is not a constant vector"

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, conv: ir.Value) -> Any:
        return op.NhwcConv(x, weight, bias, **producer_node(conv).attributes, _domain=MICROSOFT)
