"""sdonnx::SelfAttention: the reference body against torch, and the kernels' limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.operator_tests import OperatorTest

from sdonnx.operators.kernel_case import KernelCase
from sdonnx.operators.own_attention import HEAD_SIZES
from sdonnx.operators.own_self_attention import OWN_SELF_ATTENTION, check_own_self_attention


def self_attention(inputs: Any, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    parts = inputs[0].chunk(3, -1) if inputs[0].ndim == 3 else inputs[0]
    q, k, v = (x.unflatten(2, (attributes["num_heads"], -1)).transpose(1, 2) for x in parts)
    return [F.scaled_dot_product_attention(q, k, v, scale=attributes.get("scale")).transpose(1, 2).flatten(2)]


def refused(name: str, shape: tuple[int, ...], heads: int = 2, scale: float = 0.0) -> KernelCase:
    return KernelCase("SelfAttention", name, (shape,), {"num_heads": heads, "scale": scale}, domain="sdonnx")


OPERATOR_TEST = OperatorTest(
    torch=self_attention,
    refused=(
        refused("head size 48", (3, 2, 5, 96)),
        refused("two parts", (2, 2, 5, 144)),
        refused("no heads", (3, 2, 5, 144), heads=0),
        refused("negative scale", (3, 2, 5, 144), scale=-0.5),
        refused("packed head size 48", (2, 5, 288)),
    ),
)


def value(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


@pytest.mark.parametrize(
    ("qkv", "heads", "scale", "reason"),
    [
        (value("B", "S", 145), 2, 0.0, "queries, keys and values are not known to be a stack of three, or packed"),
        (value("B", "S", "D"), 2, 0.0, "queries, keys and values are not known to be a stack of three, or packed"),
        (value("B", "S", 144), 2, 0.0, "a width of 48 in 2 heads"),
        (value("G", "B", "S", 144), 2, 0.0, "queries, keys and values are not known to be a stack of three"),
        (ir.Value(name="qkv"), 2, 0.0, "queries, keys and values are not known to be a stack of three"),
        (value(3, "B", "S", "D"), 2, 0.0, "a width of D in 2 heads"),
        (
            value(3, "B", "S", 144),
            1,
            0.0,
            "a width of 144 in 1 heads: the kernel accepts heads of 40, 64, 72, 80 or 160",
        ),
        (value(3, "B", "S", 144), 2, -1.0, "a scale of -1.0"),
        (value(3, "B", "S", 144, dtype=ir.DataType.FLOAT), 2, 0.0, "the input is FLOAT, the kernel accepts FLOAT16"),
    ],
)
def test_refuses(qkv: ir.Value, heads: int, scale: float, reason: str) -> None:
    assert reason in (check_own_self_attention(qkv, heads, scale) or "")


def test_cases_have_all_head_sizes_and_kernels() -> None:
    """cuDNN computes attention from 129 keys on (kernels/src/attention_cudnn.cuh, kMinTokens)."""
    cases = list(OWN_SELF_ATTENTION.kernel_cases())
    for head_size in HEAD_SIZES:
        tokens = {shape[2] for case in cases if case.name.startswith(f"H={head_size} ") and (shape := case.shapes[0])}
        assert {128, 129} <= tokens
    lengths = {shape[2] for case in cases if case.name in OWN_SELF_ATTENTION.first_use and (shape := case.shapes[0])}
    assert min(lengths) < 129 <= max(lengths)
