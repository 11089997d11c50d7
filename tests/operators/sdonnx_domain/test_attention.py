"""Attention, SelfAttention: the reference bodies against torch, and the limits of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest, half

from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.sdonnx_domain.attention import (
    ATTENTION,
    HEAD_SIZES,
    SELF_ATTENTION,
    check_attention,
    check_self_attention,
)


def attention(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    q, k, v = (x.unflatten(2, (attributes["num_heads"], -1)).transpose(1, 2) for x in inputs[:3])
    q = q.repeat(len(k) // len(q), 1, 1, 1)
    mask = torch.arange(k.shape[2]) < inputs[3].reshape(-1, 1, 1, 1) if len(inputs) > 3 else None
    found = F.scaled_dot_product_attention(q, k, v, mask, scale=attributes.get("scale"))
    return [found.transpose(1, 2).flatten(2)]


def refused_attention(name: str, *shapes: tuple[int, ...], heads: int = 2, scale: float = 0.0) -> KernelCase:
    return KernelCase("Attention", name, shapes, {"num_heads": heads, "scale": scale}, domain="sdonnx")


ATTENTION_TEST = OperatorTest(
    torch=attention,
    refused=(
        refused_attention("head size 48", (2, 3, 96), (2, 5, 96), (2, 5, 96)),
        refused_attention("head size 144", (2, 3, 144), (2, 5, 144), (2, 5, 144), heads=1),
        refused_attention("no heads", (2, 3, 144), (2, 5, 144), (2, 5, 144), heads=0),
        refused_attention("another width of keys", (2, 3, 144), (2, 5, 72), (2, 5, 72)),
        refused_attention("packed keys and values", (2, 3, 144), (2, 5, 2, 2, 72), (2, 5, 2, 2, 72)),
        refused_attention("negative scale", (2, 3, 144), (2, 5, 144), (2, 5, 144), scale=-0.5),
    ),
)


def test_attention_cases_have_heads_and_batches_of_pixart() -> None:
    cases = list(ATTENTION.kernel_cases())
    assert {case.attributes["num_heads"] for case in cases} >= {1, 2, 16}
    assert {shape[0] for case in cases if (shape := case.shapes[0])} >= {1, 2, 3, 4}


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_attention_cases_and_first_use_have_all_head_sizes(head_size: int) -> None:
    """Each head size has kernels of its own."""
    assert any(name.startswith(f"H={head_size} ") for name in ATTENTION.first_use)
    cases = [case for case in ATTENTION.kernel_cases() if case.name.startswith(f"H={head_size} ")]
    assert {len(case.shapes) for case in cases} == {3, 4}
    keys = {shape[1] for case in cases if (shape := case.shapes[1])}
    assert min(keys) <= 80 < max(keys)
    assert max(keys) > 128


def test_attention_first_use_has_tiles_of_both_kernels() -> None:
    """kernels/src/attention_wgmma.cuh starts at 128 queries and 128 keys."""
    cases = {case.name: case for case in ATTENTION.kernel_cases()}
    lengths = [[shape[1] for shape in cases[name].shapes[:2] if shape] for name in ATTENTION.first_use]
    assert {min(each) >= 128 for each in lengths} == {True, False}


Q, KV = half("B", "S", 144), half("B", "L", 144)


@pytest.mark.parametrize(
    ("q", "k", "v", "heads", "scale", "reason"),
    [
        (half("B", "S", 2, 3, 72), KV, KV, 2, 0.0, "query, key and value are not known to have three axes"),
        (ir.Value(name="q"), KV, KV, 2, 0.0, "query, key and value are not known to have three axes"),
        (Q, KV, KV, 0, 0.0, "0 heads"),
        (Q, KV, KV, 1, 0.0, "a width of 144 in 1 heads: the kernel accepts heads of 40, 64, 72, 80 or 160"),
        (Q, half("B", "L", 72), KV, 2, 0.0, "a width of 144, 72 in 2 heads"),
        (half("B", "S", "D"), KV, KV, 2, 0.0, "a width of 144, D in 2 heads"),
        (Q, KV, KV, 2, -1.0, "a scale of -1.0"),
        (Q, KV, half("B", "L", 144, dtype=ir.DataType.FLOAT), 2, 0.0, "the input is FLOAT, the kernel accepts FLOAT16"),
    ],
)
def test_attention_refuses(q: ir.Value, k: ir.Value, v: ir.Value, heads: int, scale: float, reason: str) -> None:
    assert reason in (check_attention(q, k, v, None, heads, scale) or "")


@pytest.mark.parametrize(
    "counts",
    [
        ir.Value(name="c", shape=ir.Shape(["B"]), type=ir.TensorType(ir.DataType.INT64)),
        ir.Value(name="c", shape=ir.Shape(["B", "L"]), type=ir.TensorType(ir.DataType.INT32)),
    ],
)
def test_attention_refuses_other_masks(counts: ir.Value) -> None:
    reason = check_attention(Q, KV, KV, counts, 2, 0.0)
    assert reason == "the padding mask is not one count of keys for each image"


def test_attention_accepts() -> None:
    counts = ir.Value(name="c", shape=ir.Shape(["B"]), type=ir.TensorType(ir.DataType.INT32))
    assert check_attention(Q, KV, KV, counts, 2, 0.0) is None
    assert check_attention(Q, KV, KV, None, 2, 0.0) is None
    assert check_attention(Q, Q, Q, None, 2, 0.5) is None


def self_attention(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    parts = inputs[0].chunk(3, -1) if inputs[0].ndim == 3 else inputs[0]
    q, k, v = (x.unflatten(2, (attributes["num_heads"], -1)).transpose(1, 2) for x in parts)
    return [F.scaled_dot_product_attention(q, k, v, scale=attributes.get("scale")).transpose(1, 2).flatten(2)]


def refused_self_attention(name: str, shape: tuple[int, ...], heads: int = 2, scale: float = 0.0) -> KernelCase:
    return KernelCase("SelfAttention", name, (shape,), {"num_heads": heads, "scale": scale}, domain="sdonnx")


SELF_ATTENTION_TEST = OperatorTest(
    torch=self_attention,
    refused=(
        refused_self_attention("head size 48", (3, 2, 5, 96)),
        refused_self_attention("two parts", (2, 2, 5, 144)),
        refused_self_attention("no heads", (3, 2, 5, 144), heads=0),
        refused_self_attention("negative scale", (3, 2, 5, 144), scale=-0.5),
        refused_self_attention("packed head size 48", (2, 5, 288)),
    ),
)


@pytest.mark.parametrize(
    ("qkv", "heads", "scale", "reason"),
    [
        (half("B", "S", 145), 2, 0.0, "queries, keys and values are not known to be a stack of three, or packed"),
        (half("B", "S", "D"), 2, 0.0, "queries, keys and values are not known to be a stack of three, or packed"),
        (half("B", "S", 144), 2, 0.0, "a width of 48 in 2 heads"),
        (half("G", "B", "S", 144), 2, 0.0, "queries, keys and values are not known to be a stack of three"),
        (ir.Value(name="qkv"), 2, 0.0, "queries, keys and values are not known to be a stack of three"),
        (half(3, "B", "S", "D"), 2, 0.0, "a width of D in 2 heads"),
        (
            half(3, "B", "S", 144),
            1,
            0.0,
            "a width of 144 in 1 heads: the kernel accepts heads of 40, 64, 72, 80 or 160",
        ),
        (half(3, "B", "S", 144), 2, -1.0, "a scale of -1.0"),
        (half(3, "B", "S", 144, dtype=ir.DataType.FLOAT), 2, 0.0, "the input is FLOAT, the kernel accepts FLOAT16"),
    ],
)
def test_self_attention_refuses(qkv: ir.Value, heads: int, scale: float, reason: str) -> None:
    assert reason in (check_self_attention(qkv, heads, scale) or "")


def test_self_attention_cases_have_all_head_sizes_and_kernels() -> None:
    """cuDNN computes attention from 129 keys on (kernels/src/attention_cudnn.cuh, kMinTokens)."""
    cases = list(SELF_ATTENTION.kernel_cases())
    for head_size in HEAD_SIZES:
        tokens = {shape[2] for case in cases if case.name.startswith(f"H={head_size} ") and (shape := case.shapes[0])}
        assert {128, 129} <= tokens
    lengths = {shape[2] for case in cases if case.name in SELF_ATTENTION.first_use and (shape := case.shapes[0])}
    assert min(lengths) < 129 <= max(lengths)


OPERATOR_TESTS = {"Attention": ATTENTION_TEST, "SelfAttention": SELF_ATTENTION_TEST}
