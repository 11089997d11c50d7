"""Padding that is last, masked by a bias on every score -> how many keys there are, which kernels skip the rest by."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.fusions.masks import allows, is_counted, refuses
from sdonnx.graph.edit import MICROSOFT, constant, dims, insert
from sdonnx.graph.match import Refusal, producer_of, same_dims
from sdonnx.graph.modules import module_path

__all__ = ["allowed_keys", "count_keys"]

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


def allowed_keys(bias: ir.Value) -> ir.Value | None:
    """Return the booleans (B,L) of which the bias (B,1,S,L) is made, true at the first places of each row."""
    row: ir.Value | None = bias
    while (node := producer_of(row, "Unsqueeze", "Expand", "Cast")) is not None:
        source, before = node.inputs[0], dims(node.outputs[0])
        after = None if source is None else dims(source)
        # Batch and keys stay the first and the last axis, at their size.
        if before is None or after is None or len(after) < 2:
            return None
        if not same_dims((before[0], before[-1]), (after[0], after[-1])):
            return None
        row = source
    choice = producer_of(row, "Where")
    if choice is None or row is None or len(dims(row) or ()) != 2:
        return None
    condition, yes, no = choice.inputs
    if condition is None or not allows(yes) or not refuses(no):
        return None
    sizes, wanted = dims(condition), dims(row)
    if sizes is None or wanted is None or len(sizes) != 2 or not same_dims(sizes, wanted):
        return None
    return condition if _is_prefix(condition) else None


def _is_prefix(condition: ir.Value) -> bool:
    """Tell whether booleans (B,L) are 0, 1, 2 ... < a number of each row."""
    node = producer_of(condition, "Less", "Greater")
    if node is None:
        return False
    place, count = node.inputs if node.op_type == "Less" else tuple(reversed(node.inputs))
    sizes = None if count is None else dims(count)
    whole = dims(condition)
    if place is None or sizes is None or whole is None or len(sizes) != 2 or sizes[-1] != 1:
        return False
    return is_counted(place, whole[-1])
