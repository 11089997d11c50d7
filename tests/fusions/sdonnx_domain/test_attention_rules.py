"""Products for queries, keys and values of one sequence become one, which attention reads in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import graph, normal
from support.replacements import own, swapped

from sdonnx.fusions.sdonnx_domain.attention_rules import order_weights
from sdonnx.fusions.sdonnx_domain.use_kernels import use_kernels
from sdonnx.operators.kernel_case import OUR_DOMAIN

FIRED = {"MultiHeadAttentionToOwnSelfAttention": 1}
PRODUCTS = "q = MatMul(x, a) k = MatMul(x, b) v = MatMul(x, c)"
ATTENTION = "y = com.microsoft.MultiHeadAttention<num_heads=1>(q, k, v)"
BIAS = (normal(64) / 8).astype(np.float16)


def weight(seed: int, inner: int = 64, outer: int = 64) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    return normal(inner, outer, seed=seed).astype(np.float16) / np.float16(np.sqrt(inner))


def block(body: str = f"{PRODUCTS} {ATTENTION}", inner: int = 64, width: int = 64, inputs: str = "") -> ir.Model:
    """Return a graph of the products of x with the weights a, b and c, and their attention."""
    products = ", ".join(f"float16[B,S,{width}] {name}" for name in "qkv")
    weights = {name: weight(seed, inner, width) for seed, name in enumerate("abc")}
    weights |= {"u": BIAS} if " u)" in body else {}
    return graph(f"float16[B,S,{inner}] x{inputs}", f"float16[B,S,{width}] y", body, products, **weights)


@pytest.mark.parametrize(("inner", "width"), [(64, 64), (320, 40), (64, 80), (8, 160)])
@pytest.mark.parametrize("latent_size", [64, None])
def test_products_and_attention(inner: int, width: int, latent_size: int | None) -> None:
    after, fired = swapped(block(inner=inner, width=width), latent_size)
    assert fired == FIRED
    assert own(after) == ["StackedMatMul", "SelfAttention"]
    (stack,) = after.graph.initializers.values()
    assert stack.shape == ir.Shape([3, inner, width])


def test_attributes_stay() -> None:
    body = f"{PRODUCTS} {ATTENTION.replace('num_heads=1', 'num_heads=2, scale=0.2')}"
    after, _ = swapped(block(body, width=80))
    node = after.graph.node(1)
    assert node.attributes.get_int("num_heads") == 2
    assert node.attributes.get_float("scale", 0.0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        (f"{PRODUCTS.replace('v = MatMul(x, c)', 'v = MatMul(z, c)')} {ATTENTION}", ", float16[B,S,64] z"),
        (f"{PRODUCTS} z = com.microsoft.MultiHeadAttention<num_heads=1>(q, k, v) y = Add(z, q)", ""),
        (f"{PRODUCTS.replace('v = MatMul(x, c)', 'w = MatMul(x, c) v = Add(w, u)')} {ATTENTION}", ""),
        (f"{PRODUCTS} {ATTENTION.replace('v)', 'v, , counts)')}", ", int32[B] counts"),
        (f"{PRODUCTS} {ATTENTION.replace('=1', '=1, unidirectional=1')}", ""),
        (f"q = Relu(x) k = MatMul(x, b) v = MatMul(x, c) {ATTENTION}", ""),
    ],
    ids=["other sequence", "product read twice", "bias", "key counts", "causal", "no product"],
)
def test_other_inputs_are_not_joined(body: str, inputs: str) -> None:
    assert FIRED.keys().isdisjoint(use_kernels(block(body, inputs=inputs), 64).fired)


def test_heads_of_72_stay() -> None:
    """PixArt's queries have a bias, and its kernel wins from a length on."""
    assert FIRED.keys().isdisjoint(use_kernels(block(width=72), 64).fired)


@pytest.mark.parametrize(
    ("inner", "width", "reason"),
    [
        (60, 64, "weights of 60 x 64: the kernel accepts multiples of 8"),
        (64, 48, "the kernel accepts heads of 40, 64, 72, 80 or 160"),
    ],
)
def test_refuses(inner: int, width: int, reason: str) -> None:
    outcome = use_kernels(block(inner=inner, width=width), 64)
    assert any(reason in failure.reason for failure in outcome.failures)


def stored(folder: Path, model: ir.Model) -> ir.Model:
    """Write a graph with its weights in a file, and load it."""
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    return ir.load(folder / "model.onnx")


def test_weights_are_read_where_they_are(tmp_path: Path) -> None:
    model = block()
    order_weights(model)
    loaded = stored(tmp_path, model)
    assert use_kernels(loaded, 64).fired == FIRED
    (value,) = loaded.graph.initializers.values()
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    np.testing.assert_array_equal(tensor.numpy(), np.stack([weight(seed) for seed in range(3)]))
    assert (tmp_path / "model.onnx.data").stat().st_size == tensor.nbytes
    ir.save(loaded, tmp_path / "own.onnx")
    (value,) = ir.load(tmp_path / "own.onnx").graph.initializers.values()
    assert isinstance(value.const_value, ir.ExternalTensor)
    assert value.const_value.location == "model.onnx.data"


def scattered() -> ir.Model:
    """Return a graph with weights in the order b, n, a, c."""
    model = block(f"n = Mul(x, u) {PRODUCTS.replace('x', 'n')} {ATTENTION}".replace("(n, u)", "(x, u)"))
    values = dict(model.graph.initializers)
    model.graph.initializers.clear()
    model.graph.initializers.update({name: values[name] for name in "buac"})
    return model


def test_scattered_weights_are_refused_until_they_are_ordered(tmp_path: Path) -> None:
    """Other weights keep their order."""
    reason = "the weights of queries, keys and values are not behind one another in the file"
    assert reason in {each.reason for each in use_kernels(stored(tmp_path, scattered()), 64).failures}
    model = scattered()
    for _ in range(2):
        order_weights(model)
        assert list(model.graph.initializers) == ["a", "b", "c", "u"]
    loaded = stored(tmp_path, model)
    assert use_kernels(loaded, 64).fired == FIRED
    assert {node.op_type for node in loaded.graph if node.domain == OUR_DOMAIN} == {"StackedMatMul", "SelfAttention"}


def test_weights_that_two_attentions_share_are_placed_once() -> None:
    again = ATTENTION.replace("(q, k, v)", "(r, s, t)")
    products = "r = MatMul(z, a) s = MatMul(z, b) t = MatMul(z, c)"
    model = block(f"{PRODUCTS} {ATTENTION.replace('y =', 'z =')} {products} {again}")
    order_weights(model)
    assert list(model.graph.initializers) == ["a", "b", "c"]
