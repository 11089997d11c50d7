"""sdonnx::SelfAttention(qkv) -> softmax(scale q k^T) v (B,S,N*H), with q, k and v in one tensor.

The layout is (3,B,S,N*H), all of q, then k, then v; or (B,S,3*N*H), q, k and v of each token. Vaswani et al. 2017. N
is the attribute num_heads. Without a scale it is 1 / sqrt(H). The operator shares kernels with
`sdonnx.operators.own_attention`, and uses cuDNN's by kernels/src/attention_cudnn.cuh from 129 tokens on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, graph_of, input_of, insert, insert_multi, required, static_dim
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import OWN_DOMAIN, KernelCase
from sdonnx.operators.own_attention import HEAD_SIZES, check_heads

__all__ = ["OWN_SELF_ATTENTION", "check_own_self_attention"]


def check_own_self_attention(qkv: ir.Value, num_heads: int, scale: float) -> str | None:
    """Return why the kernels do not accept queries, keys and values (3,B,S,D) or (B,S,3*D), None if they do."""
    sizes = dims(qkv) or ()
    is_packed = len(sizes) == 3 and isinstance(sizes[2], int) and sizes[2] % 3 == 0
    if not is_packed and (len(sizes) != 4 or sizes[0] != 3):
        return "queries, keys and values are not known to be a stack of three, or packed"
    width = required(static_dim(qkv, 2)) // 3 if is_packed else sizes[-1]
    return check_heads([width], num_heads, scale) or OWN_SELF_ATTENTION.check_dtype(qkv)


def _limits(node: ir.Node) -> str | None:
    heads, scale = node.attributes.get_int("num_heads", 0), node.attributes.get_float("scale", 0.0)
    return check_own_self_attention(input_of(node, 0), heads, scale)


def _lower(node: ir.Node) -> list[ir.Value | None]:
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


def _kernel_cases() -> Iterator[KernelCase]:
    """Tokens at the edges of the kernels: 64, 80 and 128 keys, and the first that cuDNN computes."""
    yield from (_case(head_size, 2, 2, tokens) for head_size in HEAD_SIZES for tokens in (17, 128, 129, 150))
    yield from (_case(64, 1, 1, tokens) for tokens in (1, 64, 81, 256, 321))
    yield from (_case(72, 2, 3, tokens) for tokens in (64, 130))
    yield from (_case(40, 8, 1, 200, scale) for scale in (0.05, 1.0))
    yield from (_case(80, 4, 3, 130), _case(160, 3, 1, 192))
    yield from (_case(head_size, 2, 2, tokens, packed=True) for head_size in HEAD_SIZES for tokens in (17, 128, 150))
    yield from (_case(64, 3, 1, tokens, packed=True) for tokens in (1, 64, 81, 256))


def _case(
    head_size: int, heads: int, batch: int, tokens: int, scale: float = 0.0, *, packed: bool = False
) -> KernelCase:
    width = heads * head_size
    name = f"H={head_size} N={heads} {batch}x{tokens}" + (f" scale={scale}" if scale else "")
    return KernelCase(
        "SelfAttention",
        name + (" packed" if packed else ""),
        ((batch, tokens, 3 * width) if packed else (3, batch, tokens, width),),
        {"num_heads": heads} | ({"scale": scale} if scale else {}),
        static_axes={0: (2,) if packed else (0, 3)},
        intermediate_size=batch * heads * tokens * tokens,
        domain=OWN_DOMAIN,
    )


OWN_SELF_ATTENTION = Contract(
    "SelfAttention",
    _lower,
    _kernel_cases,
    first_use=("H=64 N=2 2x150", "H=72 N=2 3x130", "H=40 N=2 2x17", "H=64 N=2 2x150 packed"),
    limits=_limits,
    domain=OWN_DOMAIN,
    dtypes=frozenset({ir.DataType.FLOAT16}),
    output_rank=3,
    expensive=True,
)
