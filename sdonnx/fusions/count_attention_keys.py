"""Padding at the end of the keys, masked by a bias on every score -> the number of keys."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, constant, insert, known_dims, required
from sdonnx.graph.mask_patterns import allowed_keys
from sdonnx.graph.match import PassOutcome, match_failure

__all__ = ["count_keys"]
_NAME = "PaddingToLengths"
_BIAS, _LENGTHS = 5, 4  # inputs of MultiHeadAttention


def count_keys(model: ir.Model) -> PassOutcome:
    """Replace a bias (B,1,S,L) that masks padding by the number of keys (B) in MultiHeadAttention, in place.

    The bias must be 0 for the first keys of each row and a very low number for the rest, and equal for all queries. The
    kernel then neither reads a bias of the size of all scores nor spends time on padding. Masked keys add nothing to a
    softmax in float32, so the result is the same, except for a row without any key, which uses the first one.
    """
    fired, failures = 0, []
    lengths: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if node.op_type != "MultiHeadAttention" or node.domain != MICROSOFT or len(node.inputs) <= _BIAS:
            continue
        bias = node.inputs[_BIAS]
        if bias is None:
            continue
        allowed = None if node.attributes.get_int("unidirectional", 0) else allowed_keys(bias)
        if allowed is None or node.inputs[_LENGTHS] is not None or len(node.inputs) > _BIAS + 1:
            reason = "the bias is more than padding at the end of the keys"
            failures.append(match_failure(_NAME, node, reason))
            continue
        if allowed not in lengths:
            lengths[allowed] = _counted(node, allowed)
        node.replace_input_with(_LENGTHS, lengths[allowed])
        node.replace_input_with(_BIAS, None)
        node.resize_inputs(_LENGTHS + 1)
        fired += 1
    return PassOutcome({_NAME: fired}, tuple(dict.fromkeys(failures)))


def _counted(anchor: ir.Node, allowed: ir.Value) -> ir.Value:
    """Return the number of allowed keys (B,L) of each row, at least one, as int32 (B)."""
    graph = required(anchor.graph)
    kind, shape = ir.DataType.INT32, [known_dims(allowed)[0]]
    numbers = insert(anchor, "Cast", [allowed], {"to": kind}, dtype=kind, shape=allowed.shape, module="")
    last = constant(graph, [1], "int64", "axis_of_keys")
    total = insert(anchor, "ReduceSum", [numbers, last], {"keepdims": 0}, dtype=kind, shape=shape, module="")
    # Kernels divide by the sum of the weights.
    return insert(anchor, "Max", [total, constant(graph, 1, "int32", "one_key")], dtype=kind, shape=shape, module="")
