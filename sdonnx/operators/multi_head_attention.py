"""MultiHeadAttention(query, key, value, -, key counts, bias) -> (B,S,N*H); Vaswani et al. 2017.

Layouts: query (B,S,N*H), key and value (B,L,N*H); packed query, key and value (B,S,N,3,H); query (B,S,N*H) with packed
key and value (B,L,N,2,H). Input 4 holds the number of keys of each image (B,), behind which all keys are padding;
input 5 is an additive bias that broadcasts to (B,N,S,L). There is at most one of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, graph_of, input_of, insert, known_size, optional_input
from sdonnx.operators.contract import FLOATS_AND_BFLOAT16, Contract
from sdonnx.operators.kernel_case import Fill, KernelCase

__all__ = ["ATTENTION_BIAS", "KEY_COUNTS", "MULTI_HEAD_ATTENTION", "check_causal", "mask_of_first_keys"]

KEY_COUNTS = 4
"""The index of the input key_padding_mask: how many keys of each image are not padding."""

ATTENTION_BIAS = 5
"""The index of the input attention_bias."""


def check_causal(queries: ir.Value, keys: ir.Value) -> str | None:
    """Return why MultiHeadAttention cannot be causal over queries (B,S,D) and keys (B,L,D), None if it can.

    Where S and L differ, ONNX's Attention lets the first query see only the first key. ONNX Runtime 1.31's CPU kernel
    returns other numbers for S < L (relative error 0.5 for 3 and 6), aligned to neither end.
    """
    lengths = [sizes[1] for value in (queries, keys) if (sizes := dims(value)) is not None and len(sizes) == 3]
    if len(lengths) != 2 or lengths[0] != lengths[1] or getattr(lengths[0], "value", lengths[0]) is None:
        return "a causal mask over numbers of queries and keys that are not known to be equal"
    return None


def _limits(node: ir.Node) -> str | None:
    queries, keys = node.inputs[0], optional_input(node, 1)
    if queries is None or keys is None or not node.attributes.get_int("unidirectional", 0):
        return None
    return check_causal(queries, keys)


def _lower(node: ir.Node) -> list[ir.Value | None]:
    """Insert Attention.

    Raises:
        ValueError: the node has biases, another padding mask or a cache, which no rule emits.
    """
    counts, mask = optional_input(node, KEY_COUNTS), optional_input(node, ATTENTION_BIAS)
    both = counts is not None and mask is not None
    if optional_input(node, 3) is not None or any(value is not None for value in node.inputs[6:]) or both:
        raise ValueError(f"{node.name}: only query, key, value, key counts and attention_bias have a reference body")
    query, key, value = input_of(node, 0), optional_input(node, 1), optional_input(node, 2)
    if key is None:
        query, key, value = _unpacked(node, query, 3)
    elif value is None:
        key, value = _unpacked(node, key, 2)
    if counts is not None:
        if counts.shape is None or counts.shape.rank() != 1:
            raise ValueError(f"{node.name}: a padding mask of {counts.shape}, not one count of keys for each image")
        mask = mask_of_first_keys(node, query, key, counts)
    heads = node.attributes.get_int("num_heads")
    attributes: dict[str, int | float] = {
        "q_num_heads": heads,
        "kv_num_heads": heads,
        "is_causal": node.attributes.get_int("unidirectional", 0),
    }
    if scale := node.attributes.get_float("scale", 0.0):
        attributes["scale"] = scale
    return [insert(node, "Attention", [query, key, value, mask], attributes)]


def mask_of_first_keys(node: ir.Node, query: ir.Value, key: ir.Value, counts: ir.Value) -> ir.Value:
    """Return the mask (B,1,S,L) of the first `counts` (B,) keys of each image."""
    graph, int64, boolean = graph_of(node), ir.DataType.INT64, ir.DataType.BOOL
    size = {name: constant(graph, number, np.int64, f"attention_{name}") for name, number in (("zero", 0), ("one", 1))}
    count = insert(node, "Shape", [key], {"start": 1, "end": 2}, dtype=int64)
    last = insert(node, "Squeeze", [count], dtype=int64)
    places = insert(node, "Range", [size["zero"], last, size["one"]], dtype=int64)
    behind = constant(graph, [1, 2, 3], np.int64, "attention_behind")
    numbers = insert(node, "Unsqueeze", [insert(node, "Cast", [counts], {"to": int64}, dtype=int64), behind])
    row = insert(node, "Less", [places, numbers], dtype=boolean)
    queries = insert(node, "Shape", [query], {"start": 1, "end": 2}, dtype=int64)
    ones = constant(graph, [1, 1], np.int64, "attention_ones")
    shape = insert(node, "Concat", [ones, queries, constant(graph, [1], np.int64, "attention_1")], {"axis": 0})
    return insert(node, "Expand", [row, shape], dtype=boolean)


def _unpacked(node: ir.Node, packed: ir.Value, parts: int) -> list[ir.Value]:
    """Return the tensors (B,S,N*H) that `packed` (B,S,N,parts,H) interleaves."""
    graph = graph_of(node)
    width = known_size(packed, 2) * known_size(packed, 4)
    shape = constant(graph, [0, 0, width], np.int64, f"shape_0_0_{width}")
    tensors = []
    for index in range(parts):
        choice = constant(graph, index, np.int64, f"index_{index}")
        part = insert(node, "Gather", [packed, choice], {"axis": 3})
        tensors.append(insert(node, "Reshape", [part, shape]))
    return tensors


def _case(
    name: str,
    head_size: int,
    sizes: tuple[int, int, int],
    heads: int = 2,
    mask: tuple[int, int] | None = None,
    layout: str = "unpacked",
    has_counts: bool = False,
    **attributes: Any,
) -> KernelCase:
    batch, queries, keys = sizes
    q, k = (batch, queries, heads * head_size), (batch, keys, heads * head_size)
    shapes: tuple[tuple[int, ...] | None, ...] = {
        "unpacked": (q, k, k),
        "packed_kv": (q, (batch, keys, heads, 2, head_size)),
        "packed_qkv": ((batch, queries, heads, 3, head_size),),
    }[layout]
    fills = {}
    if mask is not None:
        shapes = (*shapes, None, None, (*mask, queries, keys))
        fills = {ATTENTION_BIAS: Fill.MASK}
    if has_counts:
        shapes = (*shapes, None, (batch,))
        fills = {KEY_COUNTS: Fill.KEY_COUNTS}
    return KernelCase(
        "MultiHeadAttention",
        f"{name} H={head_size} N={heads} {batch}x{queries}x{keys}",
        shapes,
        {"num_heads": heads} | attributes,
        fills=fills,
        # The body reads heads and head sizes of packed inputs as constants.
        static_axes={index: (2, 3, 4) for index, shape in enumerate(shapes) if shape is not None and len(shape) == 5},
        cuda_only=layout != "unpacked",
        intermediate_size=batch * heads * queries * keys,
    )


def _kernel_cases() -> Iterator[KernelCase]:
    """Head size 160 is where another kernel of ONNX Runtime, flash attention, is silently wrong on sm_90.

    With as many queries as keys, TensorRT's kernel (GPUs below sm_90) also reads the counts of keys as counts of
    queries: the queries behind them see only the padding.
    """
    lengths = [(1, 1, 1), (3, 1, 77), (3, 7, 5), (1, 77, 77), (2, 64, 80), (1, 256, 256)]
    for head_size, sizes in product((8, 40, 64, 72, 80, 128, 160, 256, 512), lengths):
        yield _case("plain", head_size, sizes, 1 if head_size == 512 else 2)
    for head_size in (40, 160):
        yield _case("plain", head_size, (1, 4096, 77))
    yield _case("plain", 40, (1, 4096, 4096), 1)
    for head_size, length in product((40, 64, 160, 512), (1, 7, 77, 1024)):
        yield _case("causal", head_size, (2, length, length), 1 if head_size == 512 else 4, unidirectional=1)
    for head_size, scale in product((40, 160), (0.05, 1.0)):
        yield _case(f"scale={scale}", head_size, (2, 77, 80), scale=scale)
    masks = product((40, 64, 160), ((77, 77), (64, 80), (5, 7)), ((1, 1), (3, 1), (1, 4), (3, 4)))
    for head_size, (queries, keys), mask in masks:
        yield _case(f"mask={mask[0]}x{mask[1]}", head_size, (3, queries, keys), 4, mask)
    yield _case("mask=1x1 causal scale", 64, (2, 77, 77), 4, (1, 1), unidirectional=1, scale=0.2)
    for head_size, layout in product((40, 64, 160), ("packed_kv", "packed_qkv")):
        yield _case(layout, head_size, (2, 80, 80), 4, layout=layout)
        yield _case(f"{layout} scale", head_size, (3, 7, 7), 2, layout=layout, scale=0.3)
    yield _case("packed_kv", 64, (2, 80, 77), 4, layout="packed_kv")
    yield _case("packed_qkv causal", 64, (2, 77, 77), 4, layout="packed_qkv", unidirectional=1)
    for head_size in (40, 64, 72, 80, 160):
        for sizes in ((3, 64, 80), (3, 77, 120), (3, 5, 7), (2, 64, 304), (3, 77, 77)):
            yield _case("lengths", head_size, sizes, has_counts=True)
        yield _case("lengths scale=0.2", head_size, (3, 77, 120), has_counts=True, scale=0.2)
    yield _case("lengths", 72, (1, 4096, 120), has_counts=True)


# Every head size, a prompt's 77 tokens, a causal mask, a mask as an input, and counts of keys.
_FIRST_USE = (
    *(f"plain H={size} N=2 {sizes}" for size in (40, 64, 72, 80, 128, 160) for sizes in ("2x64x80", "1x256x256")),
    *(f"plain H={size} N=2 3x1x77" for size in (40, 64, 160)),
    "plain H=512 N=1 1x256x256",
    "causal H=64 N=4 2x77x77",
    "mask=3x1 H=64 N=4 3x64x80",
    *(f"lengths H={size} N=2 {sizes}" for size, sizes in ((64, "3x64x80"), (72, "3x77x77"), (72, "3x77x120"))),
)

MULTI_HEAD_ATTENTION = Contract(
    "MultiHeadAttention",
    _lower,
    _kernel_cases,
    first_use=_FIRST_USE,
    limits=_limits,
    dtypes=FLOATS_AND_BFLOAT16,
    output_rank=3,
    cpu=True,
    expensive=True,
)
