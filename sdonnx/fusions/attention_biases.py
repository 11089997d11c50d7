"""Biases of keys and values, which attention need not add."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, derived_initializer, is_weight, static_dim
from sdonnx.graph.match import biased, is_bias, sole_user
from sdonnx.graph.tensors import read

__all__ = ["drop_attention_biases"]


def drop_attention_biases(model: ir.Model) -> dict[str, int]:
    """Take the biases of keys and values out of every MultiHeadAttention, in place; return how many of each.

    A bias b of the keys adds q b to all scores of a query, which leaves its softmax as it is. One of the values is
    added to what every query gets, for a softmax sums to 1, and goes with the output's projection W into its bias c,
    as c + b W.
    """
    fired = {"BiasOfKeys": 0, "BiasOfValues": 0}
    for node in model.graph:
        # Packed layouts have fewer inputs, and rows that are masked as a whole sum to 1 too.
        if node.op_type != "MultiHeadAttention" or node.domain != MICROSOFT or len(node.inputs) < 3:
            continue
        if (keys := biased(node.inputs[1])) is not None:
            node.replace_input_with(1, keys[0])
            fired["BiasOfKeys"] += 1
        if (values := biased(node.inputs[2])) is not None and _into_output(node, values[1]):
            node.replace_input_with(2, values[0])
            fired["BiasOfValues"] += 1
    return fired


def _into_output(attention: ir.Node, bias: ir.Value) -> bool:
    """Let the bias of the output's projection hold that of the values; False where there is no such projection."""
    product = sole_user(attention.outputs[0], "MatMul")
    addition = None if product is None else sole_user(product.outputs[0], "Add")
    if product is None or addition is None or product.inputs[0] is not attention.outputs[0]:
        return False
    weight = product.inputs[1]
    index = 1 if addition.inputs[0] is product.outputs[0] else 0
    own = addition.inputs[index]
    if weight is None or own is None or not is_weight(weight) or not is_bias(own, static_dim(weight, 1)):
        return False
    if weight.shape is None or weight.shape.rank() != 2 or static_dim(weight, 0) != static_dim(bias, 0):
        return False
    graph, dtype = addition.graph, own.dtype
    assert isinstance(graph, ir.Graph)
    assert dtype is not None
    tensors = [value.const_value for value in (own, bias, weight)]

    def combined() -> npt.NDArray[Any]:
        c, b, w = (read(tensor).astype(np.float64) for tensor in tensors if tensor is not None)
        total: npt.NDArray[Any] = (c + b @ w).astype(dtype.numpy())
        return total

    name = f"{own.name}+{bias.name}@{weight.name}"
    held = derived_initializer(graph, name, combined, dtype, (static_dim(weight, 1) or 0,))
    addition.replace_input_with(index, held)
    return True
