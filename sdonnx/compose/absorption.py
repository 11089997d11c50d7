"""Absorb the projections around attention to a short prompt into its keys and values.

A query is projected, q = x Wq, and the attention's result is projected again: softmax(q K^T) V Wo. The prompt is the
same at every step, and so are Wq K^T and V Wo. With these matmuls, a step multiplies by one column for each head and
token instead of one for each channel: 16 heads of 72 channels have 1152 columns, and with 32 tokens 512. There is no
gain for a prompt with more tokens than a head has channels.

DeepSeek-V2 absorbs its projections in the same way (arXiv:2405.04434, section 2.1.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from sdonnx.compose.graph_builder import INT64, has_subgraph, int64_vector, remove_unused_nodes
from sdonnx.graph.edit import (
    MAX_SPLIT_OUTPUTS,
    MICROSOFT,
    constant,
    dims,
    dtype_of,
    input_of,
    insert,
    insert_multi,
    is_weight,
    known_size,
    replace,
    static_dim,
)
from sdonnx.graph.mask_patterns import MASKED_SCORE, allowed_keys
from sdonnx.graph.match import is_matrix, is_row, producer_of, sole_user

__all__ = ["absorb_projections"]

_BIAS, _LENGTHS, _ADDED = 3, 4, 5  # inputs of MultiHeadAttention
# bfloat16 is missing: not all operators that are needed have kernels for it.
_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


@dataclass(frozen=True)
class _Attention:
    """An attention to the prompt, with the matmuls around it.

    Attributes:
        node: MultiHeadAttention.
        x: (B,S,D), the input of the queries' projection.
        into: the weight of that projection (D,N*H).
        row: the bias of the queries (N*H); None for none.
        keys: (B,L,N*H), computed from the prompt only.
        values: (B,L,N*H), computed from the prompt only.
        mask: the number of keys (B), or a mask of them (B,L).
        out: the matmul with the weight of the output's projection (N*H,E).
        heads: N.
        scale: the factor of the scores.
    """

    node: ir.Node
    x: ir.Value
    into: ir.Value
    row: ir.Value | None
    keys: ir.Value
    values: ir.Value
    mask: ir.Value
    out: ir.Node
    heads: int
    scale: float

    @property
    def outgoing(self) -> ir.Value:
        """The weight of the output's projection."""
        return input_of(self.out, 1)

    @property
    def width(self) -> int:
        """N*H."""
        return known_size(self.keys, 2)

    @property
    def kind(self) -> tuple[object, ...]:
        """The key of attentions that can compute their masks, and their matmuls of rows and keys, together."""
        sizes = tuple(map(str, dims(self.keys) or ()))
        return self.mask, self.keys.dtype, sizes, self.heads, self.scale, self.row is None


def absorb_projections(model: ir.Model, conditioning: Collection[str]) -> int:
    """Absorb the projections of attention to prompts with masked padding, in place.

    The result is the same in exact arithmetic for prompts of any length; the module's docstring has the cost.
    `hoist_step_invariants` then moves the matmuls that depend only on the prompt out of the step.

    Args:
        model: a denoiser.
        conditioning: names of the inputs that are the same at every step.

    Returns:
        The number of attentions that were changed.
    """
    graph = model.graph
    invariant, attended = _computed_from(graph, conditioning), _computed_from_attention(graph)
    found = [attention for node in graph if (attention := _read(node, invariant, attended)) is not None]
    groups: dict[tuple[object, ...], list[_Attention]] = defaultdict(list)
    for each in found:
        groups[each.kind].append(each)
    for group in groups.values():
        for start in range(0, len(group), MAX_SPLIT_OUTPUTS):
            part = group[start : start + MAX_SPLIT_OUTPUTS]
            for attention, added in zip(part, _added_scores(graph, part), strict=True):
                replace(attention.out.outputs[0], _absorbed(graph, attention, added))
    if found:
        graph.sort()  # the biases of all queries are multiplied together, before the first of them is needed
        remove_unused_nodes(graph)
    return len(found)


def _computed_from(graph: ir.Graph, names: Collection[str]) -> set[ir.Value]:
    """Return the values that depend only on these inputs and on constants."""
    computed, fixed = {value for value in graph.inputs if value.name in names}, set[ir.Value]()
    for node in graph:
        if has_subgraph(node):
            continue  # the values that its subgraphs read are not among its inputs
        read = [value for value in node.inputs if value is not None and not is_weight(value) and value not in fixed]
        if node.inputs and not read:
            fixed.update(node.outputs)
        elif read and computed.issuperset(read):
            computed.update(node.outputs)
    return computed


def _computed_from_attention(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that depend on the output of an attention."""
    computed = set[ir.Value]()
    for node in graph:
        if node.op_type == "MultiHeadAttention" or has_subgraph(node) or not computed.isdisjoint(node.inputs):
            computed.update(node.outputs)
    return computed


def _read(node: ir.Node, invariant: Set[ir.Value], attended: Set[ir.Value]) -> _Attention | None:
    """Return the attention at a node; None for other nodes and where its projections cannot be absorbed.

    Args:
        node: any node.
        invariant: values that are the same at every step.
        attended: values that depend on an attention. The biases of queries must not be among them, because the
            biases of all attentions are multiplied together.
    """
    if node.op_type != "MultiHeadAttention" or node.domain != MICROSOFT or len(node.inputs) <= _LENGTHS:
        return None
    query, keys, values = node.inputs[:3]
    mask = _mask_of(node)
    out = sole_user(node.outputs[0], "MatMul")
    if query is None or keys is None or values is None or mask is None or out is None:
        return None
    if not {keys, values, mask} <= invariant or node.inputs[_BIAS] is not None or keys.dtype not in _TYPES:
        return None
    if node.attributes.get_int("unidirectional", 0) or any(output.uses() for output in node.outputs[1:]):
        return None
    heads, width = node.attributes.get_int("num_heads"), static_dim(keys, 2)
    matmul, row = _projected(query)
    if matmul is None or width is None or len(dims(keys) or ()) != 3 or static_dim(values, 2) != width:
        return None
    x, into = matmul.inputs
    if x is None or len(dims(x) or ()) != 3 or into is None or not is_matrix(into) or not is_matrix(out.inputs[1]):
        return None
    if row is not None and row in attended:
        return None
    scale = node.attributes.get_float("scale", 0.0) or (width // heads) ** -0.5
    return _Attention(node, x, into, row, keys, values, mask, out, heads, scale)


def _mask_of(node: ir.Node) -> ir.Value | None:
    """Return the number of keys (B) or the mask of keys (B,L), None where there is none or other scores are masked."""
    lengths, added = node.inputs[_LENGTHS], node.inputs[_ADDED] if len(node.inputs) > _ADDED else None
    if len(node.inputs) > _ADDED + 1 or (lengths is None) == (added is None):
        return None
    if added is not None:
        return allowed_keys(added)
    return lengths if lengths is not None and len(dims(lengths) or ()) == 1 else None


def _projected(query: ir.Value) -> tuple[ir.Node | None, ir.Value | None]:
    """Return the matmul of a query's projection and its bias, (None, None) for other values."""
    if (matmul := producer_of(query, "MatMul")) is not None:
        return matmul, None
    if (addition := producer_of(query, "Add")) is not None:
        for projected, row in (addition.inputs, reversed(addition.inputs)):
            matmul = producer_of(projected, "MatMul")
            if matmul is not None and row is not None and is_row(row, static_dim(query, -1)):
                return matmul, row
    return None, None


def _absorbed(graph: ir.Graph, attention: _Attention, added: ir.Value) -> ir.Value:
    """Return the result of the output's projection; `added` (B,1,N,L) is added to the scores."""
    node, heads, width = attention.node, attention.heads, attention.width
    dtype = dtype_of(attention.keys)
    batch, tokens, _ = dims(attention.keys) or ()
    rows, unnamed = (dims(attention.x) or ())[:2], ir.SymbolicDim(None)
    inner, outer = known_size(attention.into, 0), known_size(attention.outgoing, 1)
    # 1 where a channel belongs to the head. The matmul runs over all channels, so weights need no split by heads.
    own = np.kron(np.eye(heads), np.ones(width // heads)).reshape(heads, 1, width)
    blocks = constant(graph, own, dtype.numpy(), f"channels_of_{heads}_heads_{dtype.name.lower()}")

    def by_head(value: ir.Value) -> ir.Value:
        single = insert(node, "Unsqueeze", [value, int64_vector(graph, 1)], shape=[batch, 1, tokens, width])
        return insert(node, "Mul", [single, blocks], shape=[batch, heads, tokens, width])

    of_keys = by_head(attention.keys)
    measured = insert(node, "Shape", [of_keys], {"end": 3}, shape=[3], dtype=INT64)
    sizes = insert(node, "Concat", [measured, int64_vector(graph, inner)], {"axis": 0}, shape=[4])
    flat = insert(node, "Reshape", [of_keys, int64_vector(graph, -1, width)], shape=[unnamed, width])
    matmul = insert(
        node, "Gemm", [flat, attention.into], {"transB": 1, "alpha": attention.scale}, shape=[unnamed, inner]
    )
    whole = insert(node, "Reshape", [matmul, sizes], shape=[batch, heads, tokens, inner])
    turned = insert(node, "Transpose", [whole], {"perm": [0, 3, 1, 2]}, shape=[batch, inner, heads, tokens])
    keys = insert(node, "Reshape", [turned, int64_vector(graph, 0, inner, -1)], shape=[batch, inner, unnamed])
    whole = insert(node, "MatMul", [by_head(attention.values), attention.outgoing],
                   shape=[batch, heads, tokens, outer])  # fmt: skip
    values = insert(node, "Reshape", [whole, int64_vector(graph, 0, -1, outer)], shape=[batch, unnamed, outer])
    matmuls = insert(node, "MatMul", [attention.x, keys], shape=[*rows, unnamed])
    split = insert(node, "Reshape", [matmuls, int64_vector(graph, 0, 0, heads, -1)], shape=[*rows, heads, tokens])
    scores = insert(node, "Add", [split, added], shape=[*rows, heads, tokens])
    weights = insert(node, "Softmax", [scores], {"axis": -1}, shape=[*rows, heads, tokens])
    columns = insert(node, "Reshape", [weights, int64_vector(graph, 0, 0, -1)], shape=[*rows, unnamed])
    return insert(node, "MatMul", [columns, values], shape=attention.out.outputs[0].shape)


def _added_scores(graph: ir.Graph, group: Sequence[_Attention]) -> list[ir.Value]:
    """Return the tensor (B,1,N,L) to add to the scores of each attention: the mask, and the matmul of bias and keys.

    Bias times keys is a matmul of one row; the matmuls of all attentions in a group are one batched matmul.
    """
    first = group[0]
    anchor, heads, size, count = first.node, first.heads, first.width // first.heads, len(group)
    batch, tokens, _ = dims(first.keys) or ()
    masked = _masked_scores(graph, first)
    mask = insert(anchor, "Reshape", [masked, int64_vector(graph, 0, 1, 1, -1)], shape=[batch, 1, 1, tokens])
    if first.row is None:
        return [mask] * count
    layers = int64_vector(graph, 0)
    keys, rows = [], []
    for attention in group:
        split = insert(anchor, "Reshape", [attention.keys, int64_vector(graph, 0, 0, heads, size)])
        turned = insert(anchor, "Transpose", [split], {"perm": [0, 2, 3, 1]}, shape=[batch, heads, size, tokens])
        keys.append(insert(anchor, "Unsqueeze", [turned, layers], shape=[1, batch, heads, size, tokens]))
        rows.append(insert(anchor, "Reshape", [attention.row, int64_vector(graph, 1, 1, heads, 1, size)]))
    shape = [count, batch, heads, size, tokens]
    all_keys = insert(anchor, "Concat", keys, {"axis": 0}, shape=shape)
    scale = constant(graph, first.scale, dtype_of(first.keys).numpy(), f"scale_of_{heads}_heads_{size}")
    all_keys = insert(anchor, "Mul", [all_keys, scale], shape=shape)
    all_rows = insert(anchor, "Concat", rows, {"axis": 0}, shape=[count, 1, heads, 1, size])
    # As many rows as keys: where a matmul broadcasts a factor, ONNX Runtime's kernel reads addresses that are copied
    # from the host. A captured graph would copy them again at each replay, from memory that is no longer theirs.
    number = insert(anchor, "Shape", [first.keys], {"start": 0, "end": 1}, shape=[1], dtype=INT64)
    parts = [int64_vector(graph, count), number, int64_vector(graph, heads, 1, size)]
    wanted = insert(anchor, "Concat", parts, {"axis": 0}, shape=[5])
    repeated = insert(anchor, "Expand", [all_rows, wanted], shape=[count, batch, heads, 1, size])
    total_shape = (count, batch, heads, 1, tokens)
    matmuls = insert(anchor, "MatMul", [repeated, all_keys], shape=total_shape)
    total = insert(anchor, "Add", [matmuls, mask], shape=total_shape)
    split_up = insert_multi(
        anchor, "Split", [total], {"axis": 0, "num_outputs": count}, count, shapes=[(1, *total_shape[1:])] * count
    )
    lone = [insert(anchor, "Squeeze", [part, layers], shape=total_shape[1:]) for part in split_up]
    turned_to = int64_vector(graph, 0, 1, heads, -1)
    return [insert(anchor, "Reshape", [part, turned_to], shape=[batch, 1, heads, tokens]) for part in lone]


def _masked_scores(graph: ir.Graph, attention: _Attention) -> ir.Value:
    """Return the tensor (B,L) that the mask adds to the scores of each token."""
    anchor, mask, keys = attention.node, attention.mask, attention.keys
    batch, tokens, _ = dims(keys) or ()
    if len(dims(mask) or ()) == 1:
        measured = insert(anchor, "Shape", [keys], {"start": 1, "end": 2}, shape=[1], dtype=INT64)
        number = insert(anchor, "Squeeze", [measured], shape=[])
        zero, one = (constant(graph, value, np.int64, f"index_{value}") for value in (0, 1))
        places = insert(anchor, "Range", [zero, number, one], shape=[tokens])
        counts = insert(anchor, "Cast", [mask], {"to": INT64}, shape=[batch], dtype=INT64)
        counts = insert(anchor, "Unsqueeze", [counts, int64_vector(graph, 1)], shape=[batch, 1])
        mask = insert(anchor, "Less", [places, counts], shape=[batch, tokens], dtype=ir.DataType.BOOL)
    dtype = dtype_of(keys)
    name = dtype.name.lower()
    kept, masked = (
        constant(graph, v, dtype.numpy(), f"{n}_{name}") for v, n in ((0, "kept"), (MASKED_SCORE, "refused"))
    )
    return insert(anchor, "Where", [mask, kept, masked], shape=[batch, tokens], dtype=dtype)
