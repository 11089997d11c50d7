"""The rules of BiasSplitGelu, ConcatChannels and UpsampleNearest."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sdonnx.fusions.fuse_bias_add import GegluToBiasSplitGelu
from sdonnx.fusions.sdonnx_domain.convolution_rules import drop_bias, movable_bias
from sdonnx.fusions.sdonnx_domain.repeated_rows import copied_value
from sdonnx.fusions.sdonnx_domain.replacement import replace_by, without_absent
from sdonnx.graph.edit import constant_value, dims, input_of, known_dims, optional_input
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, Refused, WalkResult
from sdonnx.graph.shapes.expressions import expression_of, halved
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.operators.sdonnx_domain.elementwise import (
    check_bias_split_gelu,
    check_concat_channels,
    check_upsample_nearest,
)

__all__ = ["GegluToOwnBiasSplitGelu", "bias_split_gelu", "concat_channels", "upsample_nearest"]


class GegluToOwnBiasSplitGelu(GegluToBiasSplitGelu):
    """a, b = Split(x + bias); a * Gelu(b) -> sdonnx::BiasSplitGelu(x, bias), at widths that ONNX Runtime lacks."""

    def check_kernel(self, x: ir.Value, bias: ir.Value) -> str | None:
        if len(dims(x) or ()) != 3:
            return "x is not known to have three axes"
        return check_bias_split_gelu(x, bias)

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> Any:
        return op.BiasSplitGelu(x, bias, _domain=OUR_DOMAIN)


def bias_split_gelu(node: ir.Node, _: object) -> WalkResult:
    """BiasSplitGelu of ONNX Runtime -> BiasSplitGelu."""
    x, bias = input_of(node, 0), input_of(node, 1)
    if (reason := check_bias_split_gelu(x, bias)) is not None:
        return Refused(reason)
    replace_by(node, node.outputs, "BiasSplitGelu", [x, bias], {})
    return REWRITTEN


def concat_channels(node: ir.Node, _: object) -> WalkResult:
    """Concat(NhwcConv(a, w, bias), y) -> ConcatChannels(NhwcConv(a, w), y, bias), with a bias of either input or none.

    ONNX Runtime adds the bias of these convolutions by a kernel of its own, which reads and writes the image once more.
    """
    rank = len(dims(node.outputs[0]) or ())
    if len(node.inputs) != 2 or rank != 4 or node.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return NOT_A_CANDIDATE
    x, y = input_of(node, 0), input_of(node, 1)
    found = [movable_bias(value) for value in (x, y)]
    biases = [None if each is None else each[1] for each in found]
    if (reason := check_concat_channels(x, y, *biases)) is not None:
        return Refused(reason)
    replace_by(node, node.outputs, "ConcatChannels", without_absent(x, copied_value(y) or y, *biases), {})
    for convolution in dict.fromkeys(each[0] for each in found if each is not None):
        drop_bias(convolution)
    return REWRITTEN


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
    replace_by(node, [old], "UpsampleNearest", without_absent(x, sizes), {})
    return REWRITTEN


def _is_doubled(x: ir.Value, y: ir.Value) -> bool:
    """Return whether H = (H' + 1) // 2 and W = (W' + 1) // 2 for x (B,H,W,C) and y (B,H',W',C) of any sizes."""
    inner, outer = ([expression_of(dim) for dim in known_dims(value)] for value in (x, y))
    if None in inner or None in outer:
        return False
    return [outer[0], *map(halved, outer[1:3]), outer[3]] == inner
