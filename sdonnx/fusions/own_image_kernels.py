"""Replacements of nodes that move channels-last images: Concat along the channels, with a convolution's bias."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, dims, input_of, insert, is_weight, replace
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, Refused, WalkResult
from sdonnx.operators.case import OWN_DOMAIN
from sdonnx.operators.own_concat_channels import check_own_concat_channels
from sdonnx.operators.reference_body import optional_input

__all__ = ["concat_channels"]


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

    cuDNN adds the bias of these convolutions by a kernel of its own, which reads and writes the image once more.
    """
    rank = len(dims(node.outputs[0]) or ())
    if len(node.inputs) != 2 or rank != 4 or node.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return NOT_A_CANDIDATE
    parts = [_part(input_of(node, index)) for index in range(2)]
    inputs = [*(part.value for part in parts), *(part.bias for part in parts)]
    if (reason := check_own_concat_channels(parts[0].value, parts[1].value, *inputs[2:])) is not None:
        return Refused(reason)
    while inputs[-1] is None:
        inputs.pop()
    old = node.outputs[0]
    new = insert(node, "ConcatChannels", inputs, domain=OWN_DOMAIN, shape=old.shape, dtype=old.dtype)
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
