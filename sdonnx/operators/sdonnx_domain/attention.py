"""Attention and SelfAttention of the domain sdonnx.

Attention(q (A,S,N*H), k (B,L,N*H), v (B,L,N*H), counts (B,)) -> softmax(scale q k^T) v (B,S,N*H).

A divides B: image b has the query b % A, as where prompts of one image share the query. Vaswani et al. 2017. N is the
attribute num_heads. Without a scale it is 1 / sqrt(H). `counts` is optional: int32, how many keys of each image are not
padding, at least one. The kernels are kernels/src/attention_wgmma.cuh for long sequences of heads of 72 on compute
capability 9.0, attention_short.cuh for at most 128 keys, cuDNN's by attention_cudnn.cuh for more keys without counts,
and attention_portable.cuh.

SelfAttention(qkv) -> softmax(scale q k^T) v (B,S,N*H), with q, k and v in one tensor.

The layout is (3,B,S,N*H), all of q, then k, then v; or (B,S,3*N*H), q, k and v of each token. Vaswani et al. 2017. N
is the attribute num_heads. Without a scale it is 1 / sqrt(H). The operator shares kernels with
`sdonnx.operators.sdonnx_domain.attention`, and uses cuDNN's by kernels/src/attention_cudnn.cuh from 129 tokens on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import (
    Dim,
    constant,
    dims,
    graph_of,
    input_of,
    insert,
    insert_multi,
    optional_input,
    required,
    static_dim,
)
from sdonnx.operators.contract import SdonnxContract, copied_rows, sdonnx_case
from sdonnx.operators.kernel_case import Fill, KernelCase
from sdonnx.operators.multi_head_attention import mask_of_first_keys

__all__ = ["ATTENTION", "HEAD_SIZES", "SELF_ATTENTION", "check_attention", "check_heads", "check_self_attention"]

HEAD_SIZES = (40, 64, 72, 80, 160)
"""The head sizes of the kernels (kernels/src/attention.cuh, launcher_of)."""

_COUNTS = 3  # the index of the input `counts`

# attention.cuh: images times heads are an axis of the grid. The run-time's batches are far smaller.
_MAX_HEADS = 65535


def check_attention(
    query: ir.Value, key: ir.Value, value: ir.Value, counts: ir.Value | None, num_heads: int, scale: float
) -> str | None:
    """Return why the kernels do not accept queries (A,S,D), keys and values (B,L,D), and counts (B,); else None."""
    sizes = [dims(each) for each in (query, key, value)]
    if any(each is None or len(each) != 3 for each in sizes):
        return "query, key and value are not known to have three axes"
    if counts is not None and (counts.dtype != ir.DataType.INT32 or len(dims(counts) or ()) != 1):
        return "the padding mask is not one count of keys for each image"
    widths = [each[2] for each in sizes if each is not None]
    return check_heads(widths, num_heads, scale) or ATTENTION.check_dtypes(query, key, value)


def check_heads(sizes: Iterable[Dim], num_heads: int, scale: float) -> str | None:
    """Return why the kernels do not accept tensors of these widths, which must be one, None if they do."""
    if not 0 < num_heads <= _MAX_HEADS:
        return f"{num_heads} heads"
    widths = set(sizes)
    if not any(widths == {num_heads * size} for size in HEAD_SIZES):
        shown = ", ".join(sorted(map(str, widths)))
        *sizes_but_last, last = HEAD_SIZES
        accepted = f"{', '.join(map(str, sizes_but_last))} or {last}"
        return f"a width of {shown} in {num_heads} heads: the kernel accepts heads of {accepted}"
    return f"a scale of {scale}" if scale < 0 else None


def _attention_limits(node: ir.Node) -> str | None:
    heads, scale = node.attributes.get_int("num_heads", 0), node.attributes.get_float("scale", 0.0)
    query, key, value = (input_of(node, index) for index in range(3))
    return check_attention(query, key, value, optional_input(node, _COUNTS), heads, scale)


def _lower_attention(node: ir.Node) -> list[ir.Value | None]:
    heads, counts = node.attributes.get_int("num_heads"), optional_input(node, _COUNTS)
    mask = None if counts is None else mask_of_first_keys(node, input_of(node, 0), input_of(node, 1), counts)
    attributes: dict[str, int | float] = {"q_num_heads": heads, "kv_num_heads": heads}
    if scale := node.attributes.get_float("scale", 0.0):
        attributes["scale"] = scale
    query = copied_rows(node, input_of(node, 0), input_of(node, 1))
    return [insert(node, "Attention", [query, *node.inputs[1:3], *([] if mask is None else [mask])], attributes)]


def _case(
    head_size: int,
    heads: int,
    batch: int,
    queries: int,
    keys: int,
    scale: float = 0.0,
    has_counts: bool = False,
    images: int | None = None,
) -> KernelCase:
    width = heads * head_size
    attributes: dict[str, int | float] = {"num_heads": heads}
    shapes: tuple[tuple[int, ...], ...]
    shapes = ((images or batch, queries, width), (batch, keys, width), (batch, keys, width))
    return sdonnx_case(
        "Attention",
        f"H={head_size} N={heads} {batch}x{queries}x{keys}"
        + (f" scale={scale}" if scale else "")
        + (" counts" if has_counts else "")
        + (f" A={images}" if images else ""),
        (*shapes, (batch,)) if has_counts else shapes,
        attributes | ({"scale": scale} if scale else {}),
        fills={_COUNTS: Fill.KEY_COUNTS} if has_counts else {},
        # The limits, and so the doctor's graphs, need the width.
        static_axes=dict.fromkeys(range(3), (2,)),
        intermediate_size=batch * heads * queries * keys,
    )


def _attention_cases() -> Iterator[KernelCase]:
    """All kernels, at the edges of their tiles.

    Tiles have 16 queries of a warp, and 64, 80 or 128 keys; wgmma starts at 128 queries and 128 keys, and has tiles of
    128. A third block of keys is the first that reuses memory, and a fifth the first that waits for the second use of
    it. No case is empty: ONNX Runtime's CPU kernel of the reference body refuses to compute nothing.
    """
    yield from (
        _case(72, 2, *sizes) for sizes in ((1, 1, 1), (3, 1, 77), (3, 7, 5), (1, 77, 77), (2, 64, 64), (2, 127, 200))
    )
    yield from (_case(72, 1, 1, 100, keys) for keys in (63, 65, 80, 81, 127, 129, 192, 321))
    yield from (_case(72, 1, 1, queries, 128) for queries in (127, 128, 129, 192, 255, 257))
    yield from (_case(72, 1, 1, 130, keys) for keys in (127, 129, 256, 257, 384, 385, 513, 640))
    yield from (_case(72, 3, 2, *sizes) for sizes in ((200, 333), (333, 200), (128, 128)))
    yield from (_case(72, 16, batch, *sizes) for batch in (1, 2, 4) for sizes in ((7, 9), (129, 130)))
    yield from (_case(72, 1, batch, 150, 140) for batch in (1, 2, 3, 4))
    yield from (_case(72, 1, 1, *sizes) for sizes in ((1024, 1024), (128, 4096), (4096, 128)))
    yield from (_case(72, 2, 2, *sizes, scale) for sizes in ((77, 80), (140, 150)) for scale in (0.05, 1.0))
    for head_size in HEAD_SIZES:
        yield from (_case(head_size, 2, 2, *sizes) for sizes in ((33, 77), (17, 128), (140, 150)) if head_size != 72)
        yield from (_case(head_size, 2, 3, *sizes, has_counts=True) for sizes in ((20, 77), (20, 120), (20, 200)))
        yield _case(head_size, 4, 2, 150, 16)
        # Queries of fewer images, of each kernel.
        yield _case(head_size, 2, 4, 20, 77, images=2)
        yield from (_case(head_size, 2, 4, 140, 150, images=images) for images in (1, 2))
        yield _case(head_size, 2, 3, 20, 120, has_counts=True, images=1)


ATTENTION = SdonnxContract(
    "Attention",
    _lower_attention,
    _attention_cases,
    first_use=(
        "H=72 N=2 3x7x5",
        "H=72 N=1 1x100x321",
        "H=72 N=3 2x200x333",
        "H=40 N=2 2x33x77",
        "H=64 N=4 2x150x16",
        "H=80 N=2 2x33x77",
        "H=160 N=2 2x33x77",
        "H=64 N=2 3x20x120 counts",
        "H=40 N=2 4x20x77 A=2",
        "H=72 N=2 4x140x150 A=2",
    ),
    limits=_attention_limits,
    expensive=True,
)


def check_self_attention(qkv: ir.Value, num_heads: int, scale: float) -> str | None:
    """Return why the kernels do not accept queries, keys and values (3,B,S,D) or (B,S,3*D), None if they do."""
    sizes = dims(qkv) or ()
    is_packed = len(sizes) == 3 and isinstance(sizes[2], int) and sizes[2] % 3 == 0
    if not is_packed and (len(sizes) != 4 or sizes[0] != 3):
        return "queries, keys and values are not known to be a stack of three, or packed"
    width = required(static_dim(qkv, 2)) // 3 if is_packed else sizes[-1]
    return check_heads([width], num_heads, scale) or SELF_ATTENTION.check_dtype(qkv)


def _self_attention_limits(node: ir.Node) -> str | None:
    heads, scale = node.attributes.get_int("num_heads", 0), node.attributes.get_float("scale", 0.0)
    return check_self_attention(input_of(node, 0), heads, scale)


def _lower_self_attention(node: ir.Node) -> list[ir.Value | None]:
    heads = node.attributes.get_int("num_heads")
    attributes: dict[str, int | float] = {"q_num_heads": heads, "kv_num_heads": heads}
    if scale := node.attributes.get_float("scale", 0.0):
        attributes["scale"] = scale
    qkv = input_of(node, 0)
    if len(dims(qkv) or ()) == 3:
        return [
            insert(node, "Attention", insert_multi(node, "Split", [qkv], {"axis": 2, "num_outputs": 3}, 3), attributes)
        ]
    axes = constant(graph_of(node), [0], np.int64, "integers_0")
    parts = insert_multi(node, "Split", [qkv], {"axis": 0, "num_outputs": 3}, 3)
    return [insert(node, "Attention", [insert(node, "Squeeze", [part, axes]) for part in parts], attributes)]


def _self_attention_cases() -> Iterator[KernelCase]:
    """Tokens at the edges of the kernels: 64, 80 and 128 keys, and the first that cuDNN computes."""
    yield from (_self_case(head_size, 2, 2, tokens) for head_size in HEAD_SIZES for tokens in (17, 128, 129, 150))
    yield from (_self_case(64, 1, 1, tokens) for tokens in (1, 64, 81, 256, 321))
    yield from (_self_case(72, 2, 3, tokens) for tokens in (64, 130))
    yield from (_self_case(40, 8, 1, 200, scale) for scale in (0.05, 1.0))
    yield from (_self_case(80, 4, 3, 130), _self_case(160, 3, 1, 192))
    yield from (
        _self_case(head_size, 2, 2, tokens, packed=True) for head_size in HEAD_SIZES for tokens in (17, 128, 150)
    )
    yield from (_self_case(64, 3, 1, tokens, packed=True) for tokens in (1, 64, 81, 256))


def _self_case(
    head_size: int, heads: int, batch: int, tokens: int, scale: float = 0.0, *, packed: bool = False
) -> KernelCase:
    width = heads * head_size
    name = f"H={head_size} N={heads} {batch}x{tokens}" + (f" scale={scale}" if scale else "")
    return sdonnx_case(
        "SelfAttention",
        name + (" packed" if packed else ""),
        ((batch, tokens, 3 * width) if packed else (3, batch, tokens, width),),
        {"num_heads": heads} | ({"scale": scale} if scale else {}),
        static_axes={0: (2,) if packed else (0, 3)},
        intermediate_size=batch * heads * tokens * tokens,
    )


SELF_ATTENTION = SdonnxContract(
    "SelfAttention",
    _lower_self_attention,
    _self_attention_cases,
    first_use=("H=64 N=2 2x150", "H=72 N=2 3x130", "H=40 N=2 2x17", "H=64 N=2 2x150 packed"),
    limits=_self_attention_limits,
    output_rank=3,
    expensive=True,
)
