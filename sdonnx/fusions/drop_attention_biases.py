"""Biases of keys and values that attention does not need to add."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, derived_initializer, dtype_of, is_weight, required, static_dim
from sdonnx.graph.match import PassOutcome, biased, is_bias, sole_user
from sdonnx.graph.tensors import read

__all__ = ["drop_attention_biases"]


def drop_attention_biases(model: ir.Model) -> PassOutcome:
    """Remove the biases of keys and values from every MultiHeadAttention, in place.

    A bias b of the keys adds q b to all scores of a query, which does not change its softmax. Because a softmax sums to
    1, a bias b of the values is added to every result. The bias c of the output's projection W takes it: c + b W.
    """
    fired = {"BiasOfKeys": 0, "BiasOfValues": 0}
    for node in model.graph:
        # Packed layouts have fewer inputs. Rows that are masked as a whole also sum to 1.
        if node.op_type != "MultiHeadAttention" or node.domain != MICROSOFT or len(node.inputs) < 3:
            continue
        if (keys := biased(node.inputs[1])) is not None:
            node.replace_input_with(1, keys[0])
            fired["BiasOfKeys"] += 1
        if (values := biased(node.inputs[2])) is not None and _into_output(node, values[1]):
            node.replace_input_with(2, values[0])
            fired["BiasOfValues"] += 1
    return PassOutcome(fired)


def _into_output(attention: ir.Node, bias: ir.Value) -> bool:
    """Add the bias of the values to the output projection's bias; return False where there is no such projection."""
    matmul = sole_user(attention.outputs[0], "MatMul")
    addition = None if matmul is None else sole_user(matmul.outputs[0], "Add")
    if matmul is None or addition is None or matmul.inputs[0] is not attention.outputs[0]:
        return False
    weight = matmul.inputs[1]
    index = 1 if addition.inputs[0] is matmul.outputs[0] else 0
    own = addition.inputs[index]
    if weight is None or own is None or not is_weight(weight) or not is_bias(own, static_dim(weight, 1)):
        return False
    if weight.shape is None or weight.shape.rank() != 2 or static_dim(weight, 0) != static_dim(bias, 0):
        return False
    graph, dtype = required(addition.graph), dtype_of(own)
    tensors = [value.const_value for value in (own, bias, weight)]

    def combined() -> npt.NDArray[Any]:
        c, b, w = (read(tensor).astype(np.float64) for tensor in tensors if tensor is not None)
        total: npt.NDArray[Any] = (c + b @ w).astype(dtype.numpy())
        return total

    name = f"{own.name}+{bias.name}@{weight.name}"
    held = derived_initializer(graph, name, combined, dtype, (static_dim(weight, 1) or 0,))
    addition.replace_input_with(index, held)
    return True
