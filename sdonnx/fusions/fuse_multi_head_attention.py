"""Attention -> MultiHeadAttention, in the input layouts that its kernels read, with the number of keys for padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import (
    MICROSOFT,
    constant,
    derived_initializer,
    dims,
    dtype_of,
    insert,
    known_dims,
    known_size,
    producer_node,
    required,
    static_dim,
)
from sdonnx.graph.mask_patterns import MASKED_SCORE, allowed_keys
from sdonnx.graph.match import PassOutcome, Rule, match_failure, same_dims, same_shape
from sdonnx.graph.tensors import read
from sdonnx.operators.multi_head_attention import check_causal

__all__ = [
    "AttentionToMultiHeadAttention",
    "ProjectionsToPackedKeyValue",
    "ProjectionsToPackedQueryKeyValue",
    "count_keys",
]

_HEADS_SECOND = [0, 2, 1, 3]


class AttentionToMultiHeadAttention(Rule):
    """Attention over split heads -> MultiHeadAttention(q, k, v) that splits them itself.

    Shapes: q (B,S,N*H), k and v (B,L,N*H). Splitting and joining heads, a Reshape and a Transpose
    each, disappear into the kernel.
    """

    keeps_nodes = True  # several attentions may share a query: to the prompt, and to image prompts

    def pattern(self, op: Any, q: Any, k: Any, v: Any, q_shape: Any, k_shape: Any, v_shape: Any, shape: Any) -> Any:
        def split(x: Any, sizes: Any, name: str) -> Any:
            reshaped = op.Reshape(x, sizes, _allow_other_attributes=True, _outputs=[name])
            return op.Transpose(reshaped, perm=_HEADS_SECOND)

        attention = op.Attention(
            split(q, q_shape, "q_split"),
            split(k, k_shape, "k_split"),
            split(v, v_shape, "v_split"),
            _allow_other_inputs=True,
            _allow_other_attributes=True,
            _outputs=["attention"],
        )
        joined = op.Transpose(attention, perm=_HEADS_SECOND)
        return op.Reshape(joined, shape, _allow_other_attributes=True, _outputs=["joined"])

    def check(self, attention: ir.Value, **values: Any) -> str | None:
        node = producer_node(attention)
        if len(attention.uses()) > 1 or attention.is_graph_output():
            return "its result has a reader before the heads are joined"
        if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
            return "its keys, values or scores are outputs that are read"
        for name in ("q", "k", "v", "joined"):
            if (sizes := dims(values[name])) is None or len(sizes) != 3:
                return f"{name} does not have 3 dimensions"
        heads = {static_dim(values[name], 2) for name in ("q_split", "k_split", "v_split")}
        head_sizes = {static_dim(values[name], 3) for name in ("q_split", "k_split", "v_split")}
        if len(heads) != 1 or len(head_sizes) != 1 or None in heads | head_sizes:
            return f"heads {heads} of size {head_sizes}: the kernel expects one number and one size for q, k and v"
        for name in ("q", "k", "v"):
            if not _splits_heads(values[name], values[f"{name}_split"]):
                return f"the reshape of {name} does more than split the heads"
        if not same_shape(values["joined"], values["q"]):
            return "the reshape of the result does more than join the heads"
        if len(node.inputs) > 4:
            return "a key-value cache is not supported"
        if node.attributes.get_int("is_causal", 0) and (reason := check_causal(values["q"], values["k"])) is not None:
            return reason
        if node.attributes.get_float("softcap", 0.0) or node.attributes.get_int("qk_matmul_output_mode", 0):
            return "softcap and score outputs are not supported"
        if len(node.inputs) == 4 and (mask := node.inputs[3]) is not None:
            return _mask_refusal(mask, attention, values["q"], values["k"])
        return None

    def rewrite(
        self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, q_split: ir.Value, attention: ir.Value, **_: Any
    ) -> Any:
        node = producer_node(attention)
        attributes: dict[str, Any] = {"num_heads": static_dim(q_split, 2)}
        if scale := node.attributes.get_float("scale", 0.0):
            attributes["scale"] = scale
        if node.attributes.get_int("is_causal", 0):
            attributes["unidirectional"] = 1
        inputs: list[ir.Value | None] = [q, k, v]
        if len(node.inputs) == 4 and (mask := node.inputs[3]) is not None:
            inputs += [None, None, _additive(op, mask, attention)]
        return op.MultiHeadAttention(*inputs, **attributes, _domain=MICROSOFT)


def _splits_heads(x: ir.Value, split: ir.Value) -> bool:
    """Return whether x (B,S,N*H) -> split (B,S,N,H), with N and H static, splits only the last axis."""
    before, after = dims(x), dims(split)
    heads, size = static_dim(split, 2), static_dim(split, 3)
    if before is None or after is None or heads is None or size is None:
        return False
    return same_dims(before, (*after[:2], heads * size))


def _mask_refusal(mask: ir.Value, attention: ir.Value, q: ir.Value, k: ir.Value) -> str | None:
    """Return why the kernel cannot take the mask (B or 1, N or 1, S, L), None if it can."""
    if mask.shape is None or mask.shape.rank() != 4:
        return "the mask does not have 4 dimensions"
    if mask.dtype not in (ir.DataType.BOOL, attention.dtype):
        return f"the mask is {mask.dtype}"
    # multihead_attention_helper.h: the kernels broadcast only the first two axes.
    for axis, x in ((2, q), (3, k)):
        if mask.shape[axis] == 1 and static_dim(x, 1) != 1:
            return f"the mask is broadcast along axis {axis}, the kernel expects it in full there"
    return None


def _additive(op: Any, mask: ir.Value, attention: ir.Value) -> ir.Value:
    """Return the mask as a bias that is added to the scores."""
    if mask.dtype != ir.DataType.BOOL:
        return mask
    dtype = dtype_of(attention)
    allowed, refused = (op.Constant(value=ir.tensor(np.array(value, dtype.numpy()))) for value in (0.0, MASKED_SCORE))
    bias: ir.Value = op.Where(mask, allowed, refused)
    bias.shape, bias.type = mask.shape, ir.TensorType(dtype)
    return bias


def _projection(value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return (x, weight) where value = MatMul(x, weight) has no other reader."""
    node = value.producer()
    if node is None or node.op_type != "MatMul" or len(value.uses()) != 1 or value.is_graph_output():
        return None
    x, weight = node.inputs
    if x is None or weight is None or not weight.is_initializer() or static_dim(weight, 1) is None:
        return None
    return x, weight


def _packed(op: Any, attention: ir.Value, x: ir.Value, weights: list[ir.Value]) -> ir.Value:
    """Return MatMul(x, weights) as (B,S,N,len(weights),H), which the kernel unpacks itself."""
    node = producer_node(attention)
    heads = node.attributes.get_int("num_heads")
    rows, columns = known_size(weights[0], 0), known_size(weights[0], 1)
    head_size, parts = columns // heads, len(weights)
    tensors = [weight.const_value for weight in weights]

    def interleave() -> Any:
        arrays = [read(tensor).reshape(rows, heads, 1, head_size) for tensor in tensors if tensor is not None]
        return np.concatenate(arrays, axis=2).reshape(rows, parts * columns)

    # Named after all its parts: two attentions may share one of the weights and not another.
    name = f"{'+'.join(weight.name or '' for weight in weights)}.packed{heads}"
    weight = derived_initializer(required(node.graph), name, interleave, dtype_of(weights[0]), (rows, parts * columns))
    matmul = op.MatMul(x, weight)
    sizes = known_dims(x)
    matmul.shape, matmul.type = ir.Shape([sizes[0], sizes[1], parts * columns]), x.type
    packed: ir.Value = op.Reshape(matmul, op.Constant(value_ints=[0, 0, heads, parts, head_size]))
    packed.shape, packed.type = ir.Shape([sizes[0], sizes[1], heads, parts, head_size]), x.type
    return packed


class _Packing(Rule):
    """The base of the rules for packed layouts."""

    def pattern(self, op: Any, q: Any, k: Any, v: Any) -> Any:
        return op.MultiHeadAttention(q, k, v, _domain=MICROSOFT, _allow_other_attributes=True, _outputs=["attention"])

    keeps_nodes = True

    @staticmethod
    def _attributes(attention: ir.Value) -> dict[str, Any]:
        node = producer_node(attention)
        return dict(node.attributes)


class ProjectionsToPackedQueryKeyValue(_Packing):
    """MultiHeadAttention(x@Wq, x@Wk, x@Wv) -> MultiHeadAttention(x @ [Wq|Wk|Wv interleaved by head]).

    Shapes: x (B,S,D), packed (B,S,N,3,H).
    """

    def check(self, q: ir.Value, k: ir.Value, v: ir.Value, **_: Any) -> str | None:
        found = [_projection(value) for value in (q, k, v)]
        if any(projection is None for projection in found):
            return "q, k and v are not three projections without bias"
        if len({id(projection[0]) for projection in found if projection}) != 1:
            return "q, k and v are projections of different values"
        if len({static_dim(value, 2) for value in (q, k, v)}) != 1:
            return "q, k and v differ in width"
        return None

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, attention: ir.Value) -> Any:
        projections = [found for value in (q, k, v) if (found := _projection(value))]
        packed = _packed(op, attention, projections[0][0], [weight for _, weight in projections])
        return op.MultiHeadAttention(packed, **self._attributes(attention), _domain=MICROSOFT)


class ProjectionsToPackedKeyValue(_Packing):
    """MultiHeadAttention(q, x@Wk, x@Wv) -> MultiHeadAttention(q, x @ [Wk|Wv interleaved by head]).

    Shapes: q (B,S,D), x (B,L,D'), packed (B,L,N,2,H).
    """

    def check(self, k: ir.Value, v: ir.Value, **_: Any) -> str | None:
        found = [_projection(value) for value in (k, v)]
        if any(projection is None for projection in found):
            return "k and v are not two projections without bias"
        if len({id(projection[0]) for projection in found if projection}) != 1:
            return "k and v are projections of different values"
        if static_dim(k, 2) != static_dim(v, 2):
            return "k and v differ in width"
        return None

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, attention: ir.Value) -> Any:
        projections = [found for value in (k, v) if (found := _projection(value))]
        packed = _packed(op, attention, projections[0][0], [weight for _, weight in projections])
        return op.MultiHeadAttention(q, packed, **self._attributes(attention), _domain=MICROSOFT)


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
