"""Reference bodies of the contrib operators, in standard operators of opset 23.

Each function inserts the body before a node and returns one value for each of the node's outputs
(None for one that the body does not give). The sources are the operators' documentation
(onnxruntime/docs/ContribOperators.md) and the papers that it names.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, insert, insert_multi, static_dim

__all__ = [
    "bias_add",
    "bias_split_gelu",
    "fast_gelu",
    "fused_mat_mul",
    "group_norm",
    "multi_head_attention",
    "nhwc_conv",
    "skip_group_norm",
    "skip_layer_normalization",
    "skip_simplified_layer_normalization",
]

_TO_NCHW, _TO_NHWC = [0, 3, 1, 2], [0, 2, 3, 1]


def _graph(node: ir.Node) -> ir.Graph:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    return graph


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _normalized_groups(node: ir.Node, x: ir.Value) -> ir.Value:
    """GroupNormalization of x (B,H,W,C) in float32, then SiLU if `activation`; Wu & He 2018."""
    dtype, float32 = x.dtype, ir.DataType.FLOAT
    assert dtype is not None
    wide = insert(node, "Cast", [x], {"to": float32}, dtype=float32, shape=x.shape)
    planes = insert(node, "Transpose", [wide], {"perm": _TO_NCHW})
    attributes = {
        "num_groups": node.attributes.get_int("groups"),
        "epsilon": node.attributes.get_float("epsilon", 1e-5),
    }
    normal = insert(node, "GroupNormalization", [planes, node.inputs[1], node.inputs[2]], attributes)
    if node.attributes.get_int("activation", 0):
        normal = insert(node, "Mul", [normal, insert(node, "Sigmoid", [normal])])
    last = insert(node, "Transpose", [normal], {"perm": _TO_NHWC})
    return insert(node, "Cast", [last], {"to": dtype}, dtype=dtype, shape=x.shape)


def group_norm(node: ir.Node) -> list[ir.Value | None]:
    """GroupNorm(x (B,H,W,C), gamma, beta) -> (B,H,W,C)."""
    x = node.inputs[0]
    assert x is not None
    return [_normalized_groups(node, x)]


def skip_group_norm(node: ir.Node) -> list[ir.Value | None]:
    """SkipGroupNorm(x, gamma, beta, skip, bias): s = x + skip + bias -> GroupNorm(s), s."""
    x, skip, bias = node.inputs[0], node.inputs[3], _input(node, 4)
    assert x is not None
    assert skip is not None
    if skip.shape is not None and skip.shape.rank() == 2:
        skip = insert(node, "Unsqueeze", [skip, constant(_graph(node), [1, 2], np.int64, "axes_1_2")])
    total = insert(node, "Add", [x, skip], shape=x.shape)
    if bias is not None:
        total = insert(node, "Add", [total, bias], shape=x.shape)
    return [_normalized_groups(node, total), total]


def bias_split_gelu(node: ir.Node) -> list[ir.Value | None]:
    """BiasSplitGelu(x (B,S,2D), bias (2D,)): a, b = split(x + bias) -> a * gelu(b); Shazeer 2020."""
    x, bias = node.inputs
    total = insert(node, "Add", [x, bias])
    value, gate = insert_multi(node, "Split", [total], {"axis": -1, "num_outputs": 2}, 2)
    return [insert(node, "Mul", [value, insert(node, "Gelu", [gate])])]


def bias_add(node: ir.Node) -> list[ir.Value | None]:
    """BiasAdd(x (B,S,C), bias (C,), skip (B,S,C)) -> x + bias + skip."""
    x, bias, skip = node.inputs
    return [insert(node, "Add", [insert(node, "Add", [x, bias]), skip])]


def nhwc_conv(node: ir.Node) -> list[ir.Value | None]:
    """NhwcConv(x (B,H,W,C), w (M,kH,kW,C/group), bias (M,)) -> (B,H,W,M)."""
    planes = insert(node, "Transpose", [node.inputs[0]], {"perm": _TO_NCHW})
    weight = insert(node, "Transpose", [node.inputs[1]], {"perm": _TO_NCHW})
    result = insert(node, "Conv", [planes, weight, _input(node, 2)], node.attributes)
    return [insert(node, "Transpose", [result], {"perm": _TO_NHWC})]


def _skipped(node: ir.Node, x: ir.Value | None, skip: ir.Value | None, bias: ir.Value | None) -> ir.Value:
    """Return x + skip + bias."""
    total = insert(node, "Add", [x, skip])
    return total if bias is None else insert(node, "Add", [total, bias])


def skip_layer_normalization(node: ir.Node) -> list[ir.Value | None]:
    """SkipLayerNormalization(x, skip, gamma, beta, bias): s = x + skip + bias -> LayerNorm(s), -, -, s."""
    x, skip, gamma = node.inputs[:3]
    beta, bias = _input(node, 3), _input(node, 4)
    total = _skipped(node, x, skip, bias)
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-12)}
    return [insert(node, "LayerNormalization", [total, gamma, beta], attributes), None, None, total]


def skip_simplified_layer_normalization(node: ir.Node) -> list[ir.Value | None]:
    """SkipSimplifiedLayerNormalization(x, skip, gamma, bias): s = x + skip + bias -> RMSNorm(s), -, -, s.

    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    x, skip, gamma = node.inputs[:3]
    total = _skipped(node, x, skip, _input(node, 3))
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-12)}
    return [insert(node, "RMSNormalization", [total, gamma], attributes), None, None, total]


def fast_gelu(node: ir.Node) -> list[ir.Value | None]:
    """FastGelu(x (...,D), bias (D,)) -> gelu(x + bias) with tanh; Hendrycks and Gimpel 2016."""
    x, bias = node.inputs[0], _input(node, 1)
    total = x if bias is None else insert(node, "Add", [x, bias])
    return [insert(node, "Gelu", [total], {"approximate": "tanh"})]


def fused_mat_mul(node: ir.Node) -> list[ir.Value | None]:
    """FusedMatMul(a, b) -> alpha * (a @ b); no rule emits its transpositions."""
    product = insert(node, "MatMul", [node.inputs[0], node.inputs[1]], shape=node.outputs[0].shape)
    dtype = product.dtype
    assert dtype is not None
    alpha = node.attributes.get_float("alpha", 1.0)
    factor = constant(_graph(node), alpha, dtype.numpy(), f"alpha_{alpha:g}_{dtype.name.lower()}")
    return [insert(node, "Mul", [product, factor])]


def multi_head_attention(node: ir.Node) -> list[ir.Value | None]:
    """MultiHeadAttention -> Attention; Vaswani et al. 2017.

    Layouts: Q, K, V (B,S,D); packed QKV (B,S,N,3,H); Q (B,S,D) with packed KV (B,L,N,2,H). In place of a bias there may
    be numbers (B) of the keys that are there, behind which all are padding.

    Raises:
        ValueError: the node has biases, another padding mask or a cache, which no rule emits.
    """
    lengths, mask = _input(node, 4), _input(node, 5)
    both = lengths is not None and mask is not None
    if _input(node, 3) is not None or any(value is not None for value in node.inputs[6:]) or both:
        raise ValueError(f"{node.name}: only query, key, value, lengths and attention_bias have a reference body")
    query, key, value = (_input(node, index) for index in range(3))
    assert query is not None
    if key is None:
        query, key, value = _unpacked(node, query, 3)
    elif value is None:
        key, value = _unpacked(node, key, 2)
    if lengths is not None:
        if lengths.shape is None or lengths.shape.rank() != 1:
            raise ValueError(f"{node.name}: a padding mask of {lengths.shape}, not one number for each row")
        mask = _first_keys(node, query, key, lengths)
    heads = node.attributes.get_int("num_heads")
    attributes: dict[str, int | float] = {
        "q_num_heads": heads,
        "kv_num_heads": heads,
        "is_causal": node.attributes.get_int("unidirectional", 0),
    }
    if scale := node.attributes.get_float("scale", 0.0):
        attributes["scale"] = scale
    return [insert(node, "Attention", [query, key, value, mask], attributes)]


def _first_keys(node: ir.Node, query: ir.Value, key: ir.Value, lengths: ir.Value) -> ir.Value:
    """Return the mask (B,1,S,L) of the first `lengths` (B) keys of each row."""
    graph, int64, boolean = _graph(node), ir.DataType.INT64, ir.DataType.BOOL
    size = {name: constant(graph, number, np.int64, f"attention_{name}") for name, number in (("zero", 0), ("one", 1))}
    count = insert(node, "Shape", [key], {"start": 1, "end": 2}, dtype=int64)
    last = insert(node, "Squeeze", [count], dtype=int64)
    places = insert(node, "Range", [size["zero"], last, size["one"]], dtype=int64)
    behind = constant(graph, [1, 2, 3], np.int64, "attention_behind")
    numbers = insert(node, "Unsqueeze", [insert(node, "Cast", [lengths], {"to": int64}, dtype=int64), behind])
    row = insert(node, "Less", [places, numbers], dtype=boolean)
    queries = insert(node, "Shape", [query], {"start": 1, "end": 2}, dtype=int64)
    ones = constant(graph, [1, 1], np.int64, "attention_ones")
    shape = insert(node, "Concat", [ones, queries, constant(graph, [1], np.int64, "attention_1")], {"axis": 0})
    return insert(node, "Expand", [row, shape], dtype=boolean)


def _unpacked(node: ir.Node, packed: ir.Value, parts: int) -> list[ir.Value]:
    """Return the tensors (B,S,N*H) that `packed` (B,S,N,parts,H) interleaves."""
    graph = _graph(node)
    heads, head_size = static_dim(packed, 2), static_dim(packed, 4)
    assert heads is not None
    assert head_size is not None
    shape = constant(graph, [0, 0, heads * head_size], np.int64, f"shape_0_0_{heads * head_size}")
    tensors = []
    for index in range(parts):
        choice = constant(graph, index, np.int64, f"index_{index}")
        part = insert(node, "Gather", [packed, choice], {"axis": 3})
        tensors.append(insert(node, "Reshape", [part, shape]))
    return tensors
