"""MultiHeadAttention: the reference body against torch and the CPU provider's kernel, and the kernel's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.graphs import Array, copied, graph, normal, operators, relative_error, run
from support.operator_tests import OperatorTest, attention_feeds, attention_graph

from sdonnx.fusions.fusion_table import fuse
from sdonnx.operators.multi_head_attention import ATTENTION_BIAS, KEY_COUNTS, check_causal
from sdonnx.operators.operator_table import LowerContribOperators

TOLERANCE = 1e-5


def multi_head_attention(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    """Packed layouts hold the rows of q, k and v of each head one after the other."""
    first, *others = inputs[:3]
    heads = attributes["num_heads"]
    mask = inputs[ATTENTION_BIAS] if len(inputs) > ATTENTION_BIAS else None
    lengths = inputs[KEY_COUNTS] if len(inputs) > KEY_COUNTS else None
    if first.ndim == 5:
        q, k, v = first.unbind(3)
    elif others[0].ndim == 5:
        q, (k, v) = first.unflatten(-1, (heads, -1)), others[0].unbind(3)
    else:
        q, k, v = (x.unflatten(-1, (heads, -1)) for x in (first, *others))
    if lengths is not None:
        mask = (torch.arange(k.shape[1]) < lengths[:, None])[:, None, None]
    if attributes.get("unidirectional"):
        allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
        mask = (0 if mask is None else mask) + torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attributes.get("scale"))
    return [result.transpose(1, 2).flatten(2)]


OPERATOR_TEST = OperatorTest(torch=multi_head_attention)


def heads(array: Array, number: int) -> torch.Tensor:
    """(B,S,N*H) -> (B,N,S,H)."""
    tensor: torch.Tensor = torch.from_numpy(array).unflatten(-1, (number, -1)).transpose(1, 2)
    return tensor


def attention(
    q: Array,
    k: Array,
    v: Array,
    number: int,
    mask: Array | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Array:
    """F.scaled_dot_product_attention of (B,S,N*H)."""
    added = None if mask is None else torch.from_numpy(mask)
    result = F.scaled_dot_product_attention(
        heads(q, number), heads(k, number), heads(v, number), attn_mask=added, is_causal=causal, scale=scale
    )
    return result.transpose(1, 2).flatten(2).numpy()


@pytest.mark.parametrize("length", [6, 3], ids=["self", "cross"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("mask_shape", [None, (2, 4, 6, -1), (1, 1, 6, -1), (2, 1, 6, -1), (1, 4, 6, -1)])
def test_agrees_with_torch_and_the_cpu_kernel(
    length: int, scale: float | None, mask_shape: tuple[int, ...] | None
) -> None:
    q, k, v = normal(2, 6, 32), normal(2, length, 32, seed=1), normal(2, length, 32, seed=2)
    shape = None if mask_shape is None else tuple(length if size < 0 else size for size in mask_shape)
    mask = None if shape is None else normal(*shape, seed=3, scale=3.0)
    model = graph(
        f"float[2,6,32] q, float[2,L,32] k, float[2,L,32] v{f', float{list(shape)} mask' if shape else ''}",
        "float[2,6,32] y",
        f"y = com.microsoft.MultiHeadAttention<num_heads=4{f', scale={scale}' if scale else ''}>"
        f"(q, k, v{', , , mask' if shape else ''})",
    )
    feeds = {"q": q, "k": k, "v": v} | ({} if mask is None else {"mask": mask})
    found = run(model, feeds)["y"]
    assert relative_error(found, attention(q, k, v, 4, mask, scale=scale)) < TOLERANCE
    assert relative_error(run(model, feeds, keep=lambda _: True)["y"], found) < TOLERANCE


@pytest.mark.parametrize("scale", [None, 0.3])
def test_causal_attention_agrees_with_torch_and_the_cpu_kernel(scale: float | None) -> None:
    q, k, v = normal(2, 6, 32), normal(2, 6, 32, seed=1), normal(2, 6, 32, seed=2)
    model = graph(
        "float[B,S,32] q, float[B,S,32] k, float[B,S,32] v",
        "float[B,S,32] y",
        f"y = com.microsoft.MultiHeadAttention<num_heads=4, unidirectional=1{f', scale={scale}' if scale else ''}>"
        "(q, k, v)",
    )
    feeds = {"q": q, "k": k, "v": v}
    found = run(model, feeds)["y"]
    assert relative_error(found, attention(q, k, v, 4, causal=True, scale=scale)) < TOLERANCE
    assert relative_error(run(model, feeds, keep=lambda _: True)["y"], found) < TOLERANCE


def test_packed_query_key_value() -> None:
    packed = normal(2, 6, 4, 3, 8)
    model = graph(
        "float[B,S,4,3,8] packed",
        "float[B,S,32] y",
        "y = com.microsoft.MultiHeadAttention<num_heads=4>(packed)",
    )
    q, k, v = (np.ascontiguousarray(packed[:, :, :, part]).reshape(2, 6, 32) for part in range(3))
    assert relative_error(run(model, {"packed": packed})["y"], attention(q, k, v, 4)) < TOLERANCE


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        *(
            (extra, "only query, key, value, key counts and")
            for extra in ("bias", ", lengths, mask", ", , , past, past")
        ),
        (", padding", "not one count of keys for each image"),
    ],
)
def test_inputs_without_a_reference_body_are_an_error(extra: str, message: str) -> None:
    model = graph(
        "float[2,6,32] q, float[96] bias, int32[2] lengths, int32[2,6] padding, float[1,1,6,6] mask, "
        "float[2,4,3,8] past",
        "float[2,6,32] y",
        f"y = com.microsoft.MultiHeadAttention<num_heads=4>(q, q, q, {extra})",
    )
    with pytest.raises(ValueError, match=message):
        LowerContribOperators()(model)


@pytest.mark.parametrize("masked", [False, True])
def test_packed_key_value(masked: bool) -> None:
    q, packed, mask = normal(2, 6, 32), normal(2, 3, 4, 2, 8, seed=1), normal(2, 1, 6, 3, seed=2)
    model = graph(
        f"float[B,S,32] q, float[B,L,4,2,8] packed{', float[B,1,S,L] mask' if masked else ''}",
        "float[B,S,32] y",
        f"y = com.microsoft.MultiHeadAttention<num_heads=4>(q, packed{', , , , mask' if masked else ''})",
    )
    k, v = (np.ascontiguousarray(packed[:, :, :, part]).reshape(2, 3, 32) for part in range(2))
    feeds = {"q": q, "packed": packed} | ({"mask": mask} if masked else {})
    expected = attention(q, k, v, 4, mask if masked else None)
    assert relative_error(run(model, feeds)["y"], expected) < TOLERANCE


def value(*shape: int | str | None) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (value("B", 3, 64), value("B", 6, 64)),
        (value("B", 6, 64), value("B", 3, 64)),
        (value("B", "S", 64), value("B", "L", 64)),
        (value("B", "S", 64), value("B", 77, 64)),
        (value("B", None, 64), value("B", None, 64)),
        (value("B", 6, 64), ir.Value(name="x")),
    ],
)
def test_causal_attention_refuses_numbers_that_may_differ(queries: ir.Value, keys: ir.Value) -> None:
    assert "numbers of queries and keys that are not known to be equal" in (check_causal(queries, keys) or "")


@pytest.mark.parametrize("size", [77, "S"])
def test_causal_attention_over_as_many_keys_as_queries_is_accepted(size: int | str) -> None:
    assert check_causal(value("B", size, 64), value("B", size, 64)) is None


@pytest.mark.parametrize("disabled", [(), ("attention",)], ids=["fused", "unfused"])
def test_attention_of_head_size_160_is_fused_or_spelled_out(disabled: tuple[str, ...]) -> None:
    """No node of ONNX's own operator stays: its kernel is wrong at this size; tests/gpu runs the result."""
    model = attention_graph(160, 8, "float32")
    fused = copied(model)
    fuse(fused, "cuda", disabled=disabled)
    expected = {"Attention": 0, "MultiHeadAttention": 0 if disabled else 1, "Softmax": 1 if disabled else 0}
    assert operators(fused, *expected) == expected
    feeds = attention_feeds(160, 8, 6, 5)
    assert relative_error(run(fused, feeds)["y"], attended(feeds, 8)) < 2e-5
    onnx.checker.check_model(ir.to_proto(attention_graph(160, 8, "float16")), full_check=True)


def attended(feeds: Mapping[str, Array], heads: int) -> Array:
    q, k, v = (torch.from_numpy(feeds[x]).unflatten(-1, (heads, -1)).transpose(1, 2) for x in ("q", "k", "v"))
    result: Array = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).numpy()
    return np.ascontiguousarray(result)
