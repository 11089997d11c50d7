"""The rules of Attention, SelfAttention and StackedMatMul.

The matmuls of one sequence by three weights become one, so that queries, keys and values are behind one another. The
weights are not copied: they must be behind one another in the file, as `order_weights` writes them.
"""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.fusions.sdonnx_domain.matmul_8bit_rules import scaled_self_attention
from sdonnx.fusions.sdonnx_domain.repeated_rows import copied_value
from sdonnx.fusions.sdonnx_domain.replacement import DefaultImage, is_read, replace_by, without_absent
from sdonnx.fusions.sdonnx_domain.rounded_matmul import rounded_projections
from sdonnx.graph.edit import (
    MICROSOFT,
    add_initializer,
    dims,
    graph_of,
    input_of,
    insert,
    is_weight,
    known_dims,
    optional_input,
    required,
    static_dim,
    tensor_of,
)
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, Refused, WalkResult, has_one_reader, producer_of, same_dims
from sdonnx.graph.tensors import stacked_tensor
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.operators.multi_head_attention import KEY_COUNTS
from sdonnx.operators.sdonnx_domain.attention import check_attention, check_heads
from sdonnx.operators.sdonnx_domain.matmul import check_stacked_mat_mul

__all__ = ["MAX_TOKENS", "MIN_TOKENS", "attention", "order_weights", "projections_of", "self_attention"]


MIN_TOKENS = {72: 1024}
"""The shortest sequence, in tokens, at which self-attention is replaced, by head size.

On an H200, for two images and 16 heads of 72, this kernel takes 411 us at 4096 tokens, 110 at 2048 and 31 at 1024, and
ONNX Runtime's 446, 111 and 33 (docs/results/attention-h200.json).
"""

MAX_TOKENS = 64
"""The longest sequence at which self-attention is replaced for every head size (docs/decisions/0146)."""


def _other_attention(node: ir.Node) -> str | None:
    """Return why a MultiHeadAttention is not one of queries, keys, values and counts only, None if it is."""
    if any(optional_input(node, index) is None for index in range(3)):
        return "packed layouts stay with ONNX Runtime"
    is_causal = node.attributes.get_int("unidirectional", 0) != 0
    if is_causal or any(each is not None for index, each in enumerate(node.inputs[3:], 3) if index != KEY_COUNTS):
        return "a bias, a mask or a cache stays with ONNX Runtime"
    if is_read(node.outputs[1:]):
        return "keys, values or scores are read"
    return None


def self_attention(node: ir.Node, _: DefaultImage) -> WalkResult:
    """MultiHeadAttention(x @ q, x @ k, x @ v) -> SelfAttention(x @ qkv), but for heads of 72."""
    if optional_input(node, KEY_COUNTS) is not None or _other_attention(node) is not None:
        return NOT_A_CANDIDATE
    heads, scale = node.attributes.get_int("num_heads"), node.attributes.get_float("scale", 0.0)
    width = static_dim(input_of(node, 0), 2)
    if width is None or width // heads in MIN_TOKENS:
        return NOT_A_CANDIDATE
    result = scaled_self_attention(node, heads, scale)
    return _stacked_self_attention(node, heads, scale) if result is NOT_A_CANDIDATE else result


def attention(node: ir.Node, image: DefaultImage) -> WalkResult:
    """MultiHeadAttention(q, k, v, counts) to a caption, or of a sequence to itself where it wins -> Attention."""
    if (reason := _other_attention(node)) is not None:
        return Refused(reason)
    query, key, value = (input_of(node, index) for index in range(3))
    heads, scale = node.attributes.get_int("num_heads"), node.attributes.get_float("scale", 0.0)
    counts = optional_input(node, KEY_COUNTS)
    if (reason := check_attention(query, key, value, counts, heads, scale)) is not None:
        return Refused(reason)
    if not isinstance(keys := known_dims(key)[1], int) and keys.value is None:
        return Refused("the number of keys is not known")
    if same_dims(known_dims(query), known_dims(key)):
        tokens = image.size_of(known_dims(query)[1:2])
        if tokens is None:
            return Refused("the number of tokens is not known")
        shortest = MIN_TOKENS.get(required(static_dim(query, 2)) // heads)
        if tokens > MAX_TOKENS and (shortest is None or tokens < shortest):
            return Refused(f"{tokens} tokens: ONNX Runtime's kernel is faster")
    inputs = without_absent(copied_value(query) or query, key, value, counts)
    replace_by(node, node.outputs[:1], "Attention", inputs, {"num_heads": heads, "scale": scale})
    return REWRITTEN


def projections_of(node: ir.Node) -> tuple[ir.Value, list[ir.Value]] | None:
    """Return the x (B,S,K) and the three weights (K,N) of which MultiHeadAttention reads the matmuls, else None."""
    values = [optional_input(node, index) for index in range(3)]
    matmuls = [producer_of(value, "MatMul") for value in values]
    if not all(map(has_one_reader, values)):
        return None
    found = [(matmul.inputs[0], matmul.inputs[1]) for matmul in matmuls if matmul is not None]
    weights = [weight for _, weight in found if weight is not None and is_weight(weight)]
    x = found[0][0] if found else None
    if x is None or any(other is not x for other, _ in found) or len(weights) != 3:
        return None
    if len({dims(weight) for weight in weights}) != 1 or len(dims(weights[0]) or ()) != 2 or len(dims(x) or ()) != 3:
        return None
    return x, weights


def _stacked_self_attention(node: ir.Node, heads: int, scale: float) -> WalkResult:
    """MultiHeadAttention(x @ q, x @ k, x @ v) -> SelfAttention(StackedMatMul(x, qkv))."""
    found = projections_of(node)
    if found is None:
        return NOT_A_CANDIDATE
    x, weights = found
    old = node.outputs[0]
    if (reason := check_heads(known_dims(weights[0])[1:], heads, scale)) is not None:
        return Refused(reason)
    parts = [tensor_of(weight) for weight in weights]
    tensor = stacked_tensor(parts, [len(parts), *parts[0].shape.numpy()])
    if tensor is None:
        return Refused("the weights of queries, keys and values are not behind one another in the file")
    stack = ir.Value(shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype))
    if (reason := check_stacked_mat_mul(x, stack)) is not None:
        return Refused(reason)
    stack = add_initializer(graph_of(node), f"{weights[0].name}.and_2_more", tensor)
    shape = ir.Shape([3, *known_dims(x)[:2], known_dims(weights[0])[1]])
    qkv = insert(node, "StackedMatMul", [x, stack], domain=OUR_DOMAIN, shape=shape, dtype=old.dtype)
    replace_by(node, [old], "SelfAttention", [qkv], {"num_heads": heads, "scale": scale})
    return REWRITTEN


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
