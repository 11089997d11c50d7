"""Padding that is last, masked by a bias on every score -> how many keys there are, which kernels skip the rest by."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, constant, insert
from sdonnx.graph.masks import allowed_keys
from sdonnx.graph.match import Refusal
from sdonnx.graph.modules import module_path

__all__ = ["count_keys"]

_NAME = "PaddingToLengths"
_BIAS, _LENGTHS = 5, 4  # inputs of MultiHeadAttention


def count_keys(model: ir.Model) -> tuple[dict[str, int], list[Refusal]]:
    """Give MultiHeadAttention the number of keys (B) in place of a bias (B,1,S,L) that masks padding, in place.

    The bias must be 0 at the first keys of each row and a very low number behind them, the same for all queries. Then
    no bias of the size of all scores is written and read, and no time is spent on padding. What is masked adds nothing
    to a softmax in float32, so that the result is the same; but for a row without any key, where the first is taken.

    Returns:
        How often it was done, and where a bias is left.
    """
    fired, refusals = 0, []
    lengths: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if node.op_type != "MultiHeadAttention" or node.domain != MICROSOFT or len(node.inputs) <= _BIAS:
            continue
        bias = node.inputs[_BIAS]
        if bias is None:
            continue
        allowed = None if node.attributes.get_int("unidirectional", 0) else allowed_keys(bias)
        if allowed is None or node.inputs[_LENGTHS] is not None or len(node.inputs) > _BIAS + 1:
            reason = "the bias is more than padding behind the keys"
            refusals.append(Refusal(_NAME, node.name or node.op_type, module_path(node), reason))
            continue
        if allowed not in lengths:
            lengths[allowed] = _counted(node, allowed)
        node.replace_input_with(_LENGTHS, lengths[allowed])
        node.replace_input_with(_BIAS, None)
        node.resize_inputs(_LENGTHS + 1)
        fired += 1
    return {_NAME: fired}, list(dict.fromkeys(refusals))


def _counted(anchor: ir.Node, allowed: ir.Value) -> ir.Value:
    """Return how many places (B,L) of each row are allowed, one at least, as int32 (B)."""
    graph = anchor.graph
    assert isinstance(graph, ir.Graph)
    assert allowed.shape is not None
    kind, shape = ir.DataType.INT32, [allowed.shape[0]]
    numbers = insert(anchor, "Cast", [allowed], {"to": kind}, dtype=kind, shape=allowed.shape, module="")
    last = constant(graph, [1], "int64", "axis_of_keys")
    total = insert(anchor, "ReduceSum", [numbers, last], {"keepdims": 0}, dtype=kind, shape=shape, module="")
    # Kernels divide by the sum of the weights.
    return insert(anchor, "Max", [total, constant(graph, 1, "int32", "one_key")], dtype=kind, shape=shape, module="")
