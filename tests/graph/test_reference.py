"""The reference bodies against torch and, where its CPU provider has the operator, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from graphs import Array, graph, normal, relative_error, run

from sdonnx.graph.lowering import LowerContribOperators

TOLERANCE = 1e-5


def keep_all(_: object) -> bool:
    return True


def tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array)


def group_norm(x: torch.Tensor, groups: int, gamma: Array, beta: Array, epsilon: float, silu: bool) -> Array:
    """F.group_norm of x (B,H,W,C)."""
    normalized = F.group_norm(x.permute(0, 3, 1, 2), groups, tensor(gamma), tensor(beta), epsilon)
    return (F.silu(normalized) if silu else normalized).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-1])
def test_group_norm(silu: bool, epsilon: float) -> None:
    x, gamma, beta = normal(2, 4, 7, 12) + 3, normal(12, seed=1), normal(12, seed=2)
    model = graph(
        "float[B,H,W,12] x",
        "float[B,H,W,12] y",
        f"y = com.microsoft.GroupNorm<groups=3, epsilon={epsilon}, activation={int(silu)}, channels_last=1>(x, g, b)",
        g=gamma,
        b=beta,
    )
    expected = group_norm(tensor(x), 3, gamma, beta, epsilon, silu)
    assert relative_error(run(model, {"x": x})["y"], expected) < TOLERANCE


def test_group_norm_sums_in_float32() -> None:
    """The squares of a thousand values of 20 sum to more than fp16 holds."""
    x = (normal(1, 16, 16, 8) + 20).astype(np.float16)
    gamma, beta = normal(8, seed=1), normal(8, seed=2)
    model = graph(
        "float16[1,16,16,8] x",
        "float16[1,16,16,8] y",
        "y = com.microsoft.GroupNorm<groups=2, epsilon=0.00001, activation=1, channels_last=1>(x, g, b)",
        g=gamma,
        b=beta,
    )
    found = run(model, {"x": x})["y"]
    assert found.dtype == np.float16
    # The result is rounded to fp16, which alone is 5e-4.
    assert relative_error(found, group_norm(tensor(x).float(), 2, gamma, beta, 1e-5, True)) < 6e-4


@pytest.mark.parametrize("skip_shape", [(2, 4, 7, 12), (2, 1, 1, 12), (2, 12)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_skip_group_norm(skip_shape: tuple[int, ...], has_bias: bool, silu: bool) -> None:
    x, skip, bias = normal(2, 4, 7, 12), normal(*skip_shape, seed=3), normal(12, seed=4)
    gamma, beta = normal(12, seed=1), normal(12, seed=2)
    model = graph(
        f"float[2,4,7,12] x, float[{','.join(map(str, skip_shape))}] skip",
        "float[2,4,7,12] y, float[2,4,7,12] total",
        "y, total = com.microsoft.SkipGroupNorm<groups=3, epsilon=0.001, channels_last=1, "
        f"activation={int(silu)}>(x, g, b, skip{', bias' if has_bias else ''})",
        g=gamma,
        b=beta,
        **({"bias": bias} if has_bias else {}),
    )
    found = run(model, {"x": x, "skip": skip})
    row = tensor(skip)[:, None, None] if skip.ndim == 2 else tensor(skip)
    total = tensor(x) + row + (tensor(bias) if has_bias else 0)
    assert relative_error(found["total"], total.numpy()) < TOLERANCE
    assert relative_error(found["y"], group_norm(total, 3, gamma, beta, 1e-3, silu)) < TOLERANCE


def test_bias_split_gelu_is_the_exact_gelu() -> None:
    x, bias = normal(2, 5, 2560, scale=2.0), normal(2560, seed=1)
    model = graph("float[B,S,2560] x", "float[B,S,1280] y", "y = com.microsoft.BiasSplitGelu(x, b)", b=bias)
    value, gate = (tensor(x) + tensor(bias)).chunk(2, -1)
    found = run(model, {"x": x})["y"]
    assert relative_error(found, (value * F.gelu(gate)).numpy()) < TOLERANCE
    # The other approximation and the other order would be told apart.
    assert relative_error(found, (value * F.gelu(gate, approximate="tanh")).numpy()) > 10 * TOLERANCE
    assert relative_error(found, (gate * F.gelu(value)).numpy()) > 0.1


def test_bias_add() -> None:
    x, skip, bias = normal(2, 5, 12), normal(2, 5, 12, seed=1), normal(12, seed=2)
    model = graph(
        "float[B,S,12] x, float[B,S,12] skip",
        "float[B,S,12] y",
        "y = com.microsoft.BiasAdd(x, b, skip)",
        b=bias,
    )
    expected = (tensor(x) + tensor(bias) + tensor(skip)).numpy()
    assert relative_error(run(model, {"x": x, "skip": skip})["y"], expected) < TOLERANCE


CONVOLUTIONS = {
    "plain": ("", {}, 1),
    "padded": ("pads=[1,2,1,2]", {"padding": (1, 2)}, 1),
    "strided": ("strides=[2,3], pads=[1,1,1,1]", {"stride": (2, 3), "padding": 1}, 1),
    "dilated": ("dilations=[2,1], pads=[2,1,2,1]", {"dilation": (2, 1), "padding": (2, 1)}, 1),
    "grouped": ("group=4, pads=[1,1,1,1]", {"groups": 4, "padding": 1}, 4),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_nhwc_conv(name: str, has_bias: bool) -> None:
    attributes, arguments, groups = CONVOLUTIONS[name]
    x, weight, bias = normal(2, 9, 8, 8), normal(12, 8 // groups, 3, 3, seed=1), normal(12, seed=2)
    model = graph(
        "float[B,H,W,8] x",
        "float[B,P,Q,12] y",
        f"y = com.microsoft.NhwcConv<kernel_shape=[3,3]{',' + attributes if attributes else ''}>"
        f"(x, w{', bias' if has_bias else ''})",
        w=np.ascontiguousarray(weight.transpose(0, 2, 3, 1)),
        **({"bias": bias} if has_bias else {}),
    )
    result = F.conv2d(tensor(x).permute(0, 3, 1, 2), tensor(weight), tensor(bias) if has_bias else None, **arguments)
    assert relative_error(run(model, {"x": x})["y"], result.permute(0, 2, 3, 1).numpy()) < TOLERANCE


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_beta", [False, True])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-1])
def test_skip_layer_normalization(has_bias: bool, has_beta: bool, epsilon: float) -> None:
    x, skip, bias = normal(2, 5, 12), normal(2, 5, 12, seed=1), normal(12, seed=2)
    gamma, beta = normal(12, seed=3), normal(12, seed=4)
    inputs = "x, skip, g" + (", b" if has_beta else ", " if has_bias else "") + (", bias" if has_bias else "")
    weights = {"g": gamma} | ({"b": beta} if has_beta else {}) | ({"bias": bias} if has_bias else {})
    model = graph(
        "float[B,S,12] x, float[B,S,12] skip",
        "float[B,S,12] y, float[B,S,12] total",
        f"y, , , total = com.microsoft.SkipLayerNormalization<epsilon={epsilon}>({inputs})",
        **weights,
    )
    feeds = {"x": x, "skip": skip}
    found = run(model, feeds)
    total = tensor(x) + tensor(skip) + (tensor(bias) if has_bias else 0)
    expected = F.layer_norm(total, (12,), tensor(gamma), tensor(beta) if has_beta else None, epsilon)
    assert relative_error(found["total"], total.numpy()) < TOLERANCE
    assert relative_error(found["y"], expected.numpy()) < TOLERANCE
    kernel = run(model, feeds, keep_all)
    assert relative_error(kernel["total"], found["total"]) < TOLERANCE
    assert relative_error(kernel["y"], found["y"]) < TOLERANCE


def heads(array: Array, number: int) -> torch.Tensor:
    """(B,S,N*H) -> (B,N,S,H)."""
    return tensor(array).unflatten(-1, (number, -1)).transpose(1, 2)


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
    added = None if mask is None else tensor(mask)
    result = F.scaled_dot_product_attention(
        heads(q, number), heads(k, number), heads(v, number), attn_mask=added, is_causal=causal, scale=scale
    )
    return result.transpose(1, 2).flatten(2).numpy()


@pytest.mark.parametrize("length", [6, 3], ids=["self", "cross"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("mask_shape", [None, (2, 4, 6, -1), (1, 1, 6, -1), (2, 1, 6, -1), (1, 4, 6, -1)])
def test_attention(length: int, scale: float | None, mask_shape: tuple[int, ...] | None) -> None:
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
    assert relative_error(run(model, feeds, keep_all)["y"], found) < TOLERANCE


@pytest.mark.parametrize("scale", [None, 0.3])
def test_causal_attention(scale: float | None) -> None:
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
    assert relative_error(run(model, feeds, keep_all)["y"], found) < TOLERANCE


def test_attention_of_packed_query_key_value() -> None:
    packed = normal(2, 6, 4, 3, 8)
    model = graph(
        "float[B,S,4,3,8] packed",
        "float[B,S,32] y",
        "y = com.microsoft.MultiHeadAttention<num_heads=4>(packed)",
    )
    q, k, v = (np.ascontiguousarray(packed[:, :, :, part]).reshape(2, 6, 32) for part in range(3))
    assert relative_error(run(model, {"packed": packed})["y"], attention(q, k, v, 4)) < TOLERANCE


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        *((extra, "only query, key, value, lengths and") for extra in ("bias", ", lengths, mask", ", , , past, past")),
        (", padding", "not one number for each row"),
    ],
)
def test_what_has_no_body_is_refused(extra: str, told: str) -> None:
    """It is not left out silently."""
    model = graph(
        "float[2,6,32] q, float[96] bias, int32[2] lengths, int32[2,6] padding, float[1,1,6,6] mask, "
        "float[2,4,3,8] past",
        "float[2,6,32] y",
        f"y = com.microsoft.MultiHeadAttention<num_heads=4>(q, q, q, {extra})",
    )
    with pytest.raises(ValueError, match=told):
        LowerContribOperators()(model)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_packed_key_value(masked: bool) -> None:
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
