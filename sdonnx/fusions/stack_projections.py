"""Replacements of the attention of a sequence to itself, with the products before it.

The products of one sequence with three weights become one, so that queries, keys and values are behind one another. The
weights are not copied: they must be behind one another in the file, as `order_weights` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from sdonnx.fusions.own_nodes import has_one_reader, put_own
from sdonnx.fusions.rounded_products import rounded_projections
from sdonnx.graph.edit import (
    MICROSOFT,
    add_initializer,
    dims,
    graph_of,
    insert,
    is_weight,
    known_dims,
    optional_input,
    tensor_of,
)
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, Refused, WalkResult, producer_of
from sdonnx.operators.kernel_case import SDONNX_DOMAIN
from sdonnx.operators.sdonnx_domain.attention import check_heads
from sdonnx.operators.sdonnx_domain.matmul import check_stacked_mat_mul

__all__ = ["order_weights", "projections_of", "self_attention", "stacked"]


def projections_of(node: ir.Node) -> tuple[ir.Value, list[ir.Value]] | None:
    """Return the x (B,S,K) and the three weights (K,N) of which MultiHeadAttention reads the products, else None."""
    values = [optional_input(node, index) for index in range(3)]
    products = [producer_of(value, "MatMul") for value in values]
    if any(value is None or not has_one_reader(value) for value in values):
        return None
    found = [(product.inputs[0], product.inputs[1]) for product in products if product is not None]
    weights = [weight for _, weight in found if weight is not None and is_weight(weight)]
    x = found[0][0] if found else None
    if x is None or any(other is not x for other, _ in found) or len(weights) != 3:
        return None
    if len({dims(weight) for weight in weights}) != 1 or len(dims(weights[0]) or ()) != 2 or len(dims(x) or ()) != 3:
        return None
    return x, weights


def self_attention(node: ir.Node, heads: int, scale: float) -> WalkResult:
    """MultiHeadAttention(x @ q, x @ k, x @ v) -> SelfAttention(StackedMatMul(x, qkv))."""
    found = projections_of(node)
    if found is None:
        return NOT_A_CANDIDATE
    x, weights = found
    old = node.outputs[0]
    if (reason := check_heads(known_dims(weights[0])[1:], heads, scale)) is not None:
        return Refused(reason)
    parts = [tensor_of(weight) for weight in weights]
    tensor = stacked(parts, [len(parts), *parts[0].shape.numpy()])
    if tensor is None:
        return Refused("the weights of queries, keys and values are not behind one another in the file")
    stack = ir.Value(shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype))
    if (reason := check_stacked_mat_mul(x, stack)) is not None:
        return Refused(reason)
    stack = add_initializer(graph_of(node), f"{weights[0].name}.and_2_more", tensor)
    shape = ir.Shape([3, *known_dims(x)[:2], known_dims(weights[0])[1]])
    qkv = insert(node, "StackedMatMul", [x, stack], domain=SDONNX_DOMAIN, shape=shape, dtype=old.dtype)
    put_own(node, old, "SelfAttention", [qkv], {"num_heads": heads, "scale": scale})
    return REWRITTEN


def stacked(parts: Sequence[ir.TensorProtocol], shape: Sequence[int]) -> ir.TensorProtocol | None:
    """Return a tensor of the bytes of several, which follow one another in a file; None if they do not.

    Parts that are not in a file are copied.

    Args:
        parts: tensors of one shape and type.
        shape: the shape of the result.
    """
    stored = [part for part in parts if isinstance(part, ir.ExternalTensor)]
    if not stored:
        return ir.Tensor(np.stack([part.numpy() for part in parts]).reshape(tuple(shape)), dtype=parts[0].dtype)
    first = stored[0]
    for index, part in enumerate(stored):
        is_next = (part.offset or 0) == (first.offset or 0) + index * first.nbytes
        if not is_next or (part.path, part.dtype) != (first.path, first.dtype):
            return None
    if len(stored) != len(parts):
        return None
    return ir.ExternalTensor(
        first.location,
        first.offset,
        len(parts) * first.nbytes,
        first.dtype,
        shape=ir.Shape(shape),
        name=first.name or "",
        base_dir=first.base_dir,
    )


def order_weights(model: ir.Model) -> None:
    """Place the weights of queries, keys and values of one sequence behind one another, in place.

    Initializers are written to the file in the order of the graph.
    """
    initializers = model.graph.initializers
    behind: dict[str, list[ir.Value]] = {}
    for node in model.graph:
        if (node.domain, node.op_type) != (MICROSOFT, "MultiHeadAttention"):
            continue
        found = projections_of(node)
        weights = [each.weight for each in rounded_projections(node)] if found is None else found[1]
        if weights and len({id(weight) for weight in weights}) == 3 and not {w.name for w in weights} & behind.keys():
            behind.update({weight.name or "": weights for weight in weights})
    ordered: dict[str, ir.Value] = {}
    for name, value in initializers.items():
        ordered.update({each.name or "": each for each in behind.get(name, [value])})
    initializers.clear()
    initializers.update(ordered)
