"""sdonnx::Attention(q (B,S,N*72), k (B,L,N*72), v (B,L,N*72)) -> softmax(scale q k^T) v (B,S,N*72).

Vaswani et al. 2017, without a mask. N is the attribute num_heads. Without a scale it is 1 / sqrt(72). The kernels are
kernels/src/attention_wgmma.cuh for compute capability 9.0, and kernels/src/attention_portable.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from sdonnx.graph.edit import dims, input_of, insert
from sdonnx.operators.case import OWN_DOMAIN, KernelCase
from sdonnx.operators.contract import Contract

__all__ = ["HEAD_SIZE", "OWN_ATTENTION", "check_own_attention"]

HEAD_SIZE = 72
"""The only head size of the kernels (kernels/src/attention_args.h, kHeadSize)."""

# attention.cuh: images times heads are an axis of the grid. The run-time's batches are far smaller.
_MAX_HEADS = 65535


def check_own_attention(query: ir.Value, key: ir.Value, value: ir.Value, num_heads: int, scale: float) -> str | None:
    """Return why the kernels do not accept queries (B,S,D), keys and values (B,L,D), None if they do."""
    sizes = [dims(each) for each in (query, key, value)]
    if any(each is None or len(each) != 3 for each in sizes):
        return "query, key and value are not known to have three axes"
    if not 0 < num_heads <= _MAX_HEADS:
        return f"{num_heads} heads"
    widths = {each[2] for each in sizes if each is not None}
    if widths != {num_heads * HEAD_SIZE}:
        shown = ", ".join(sorted(map(str, widths)))
        return f"a width of {shown} in {num_heads} heads: the kernel accepts heads of {HEAD_SIZE}"
    if scale < 0:
        return f"a scale of {scale}"
    failures = (OWN_ATTENTION.check_dtype(each) for each in (query, key, value))
    return next(filter(None, failures), None)


def _limits(node: ir.Node) -> str | None:
    heads, scale = node.attributes.get_int("num_heads", 0), node.attributes.get_float("scale", 0.0)
    return check_own_attention(input_of(node, 0), input_of(node, 1), input_of(node, 2), heads, scale)


def _lower(node: ir.Node) -> list[ir.Value | None]:
    heads = node.attributes.get_int("num_heads")
    attributes: dict[str, int | float] = {"q_num_heads": heads, "kv_num_heads": heads}
    if scale := node.attributes.get_float("scale", 0.0):
        attributes["scale"] = scale
    return [insert(node, "Attention", node.inputs[:3], attributes)]


def _case(heads: int, batch: int, queries: int, keys: int, scale: float = 0.0) -> KernelCase:
    width = heads * HEAD_SIZE
    attributes: dict[str, int | float] = {"num_heads": heads}
    return KernelCase(
        "Attention",
        f"N={heads} {batch}x{queries}x{keys}" + (f" scale={scale}" if scale else ""),
        ((batch, queries, width), (batch, keys, width), (batch, keys, width)),
        attributes | ({"scale": scale} if scale else {}),
        # The limits, and so the doctor's graphs, need the width.
        static_axes=dict.fromkeys(range(3), (2,)),
        intermediate_size=batch * heads * queries * keys,
        domain=OWN_DOMAIN,
    )


def _kernel_cases() -> Iterator[KernelCase]:
    """Both kernels, at the edges of their tiles.

    Tiles have 128 queries and 64 (portable) or 128 (wgmma) keys; wgmma starts at 128 queries and 128 keys. A third
    block of keys is the first that reuses memory, and a fifth the first that waits for the second use of it. No case
    is empty: ONNX Runtime's CPU kernel of the reference body refuses to compute nothing.
    """
    yield from (
        _case(2, *sizes) for sizes in ((1, 1, 1), (3, 1, 77), (3, 7, 5), (1, 77, 77), (2, 64, 64), (2, 127, 200))
    )
    yield from (_case(1, 1, 100, keys) for keys in (63, 65, 127, 129, 192, 321))
    yield from (_case(1, 1, queries, 128) for queries in (127, 128, 129, 192, 255, 257))
    yield from (_case(1, 1, 130, keys) for keys in (127, 129, 256, 257, 384, 385, 513, 640))
    yield from (_case(3, 2, *sizes) for sizes in ((200, 333), (333, 200), (128, 128)))
    yield from (_case(16, batch, *sizes) for batch in (1, 2, 4) for sizes in ((7, 9), (129, 130)))
    yield from (_case(1, batch, 150, 140) for batch in (1, 2, 3, 4))
    yield from (_case(1, 1, *sizes) for sizes in ((1024, 1024), (128, 4096), (4096, 128)))
    yield from (_case(2, 2, *sizes, scale) for sizes in ((77, 80), (140, 150)) for scale in (0.05, 1.0))


OWN_ATTENTION = Contract(
    "Attention",
    _lower,
    _kernel_cases,
    first_use=("N=2 3x7x5", "N=1 1x100x321", "N=3 2x200x333"),
    limits=_limits,
    domain=OWN_DOMAIN,
    dtypes=frozenset({ir.DataType.FLOAT16}),
    expensive=True,
)
