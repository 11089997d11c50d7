"""The contrib operators: what ONNX Runtime's kernels take, and what they compute.

A rule asks `refusal` before it emits an operator. `lower` replaces an operator by its reference
body in standard operators, so that a fused graph runs where no such kernel exists; the bodies are
compared with torch on the CPU and with the kernels on a GPU.

Limits are those of ONNX Runtime 1.31's CUDA kernels (onnxruntime/contrib_ops/cuda).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.graph import reference
from sdonnx.graph.edit import MICROSOFT, dims, static_dim

__all__ = ["CONTRACTS", "SPLIT_GELU_WIDTHS", "Contract", "contract_of", "group_norm_refusal", "split_gelu_refusal"]

# bias_split_gelu_impl.cu instantiates its kernel for these widths of x (twice the hidden width) alone.
SPLIT_GELU_WIDTHS = frozenset({2560, 5120, 6144, 10240, 12288})


@dataclass(frozen=True)
class Contract:
    """What is known of one operator.

    Attributes:
        op_type: the operator, in the domain com.microsoft.
        lower: inserts the reference body before a node and returns its outputs.
        float32_inputs: inputs that are float32 in every precision.
        cpu: the CPU provider has a kernel.
        bfloat16: the CUDA provider has a kernel for it.
    """

    op_type: str
    lower: Callable[[ir.Node], list[ir.Value | None]]
    float32_inputs: frozenset[int] = frozenset()
    cpu: bool = False
    bfloat16: bool = False


_ALL = (
    Contract("GroupNorm", reference.group_norm, float32_inputs=frozenset({1, 2})),
    Contract("SkipGroupNorm", reference.skip_group_norm, float32_inputs=frozenset({1, 2})),
    Contract("BiasSplitGelu", reference.bias_split_gelu),
    Contract("BiasAdd", reference.bias_add),
    Contract("NhwcConv", reference.nhwc_conv),
    Contract("SkipLayerNormalization", reference.skip_layer_normalization, cpu=True, bfloat16=True),
    Contract("MultiHeadAttention", reference.multi_head_attention, cpu=True, bfloat16=True),
)
CONTRACTS = {contract.op_type: contract for contract in _ALL}


def contract_of(node: ir.Node) -> Contract | None:
    """Return the contract of a node's operator, None for an operator of another domain."""
    return CONTRACTS.get(node.op_type) if node.domain == MICROSOFT else None


def group_norm_refusal(x: ir.Value, channels: int | None, groups: int) -> str | None:
    """Return why GroupNorm cannot take x (B,C,H,W in either order), None if it can.

    group_norm_impl.cu works on pairs of channels: every group must hold an even number of them.
    """
    sizes = dims(x)
    if sizes is None or len(sizes) != 4:
        return f"the input has {'no known' if sizes is None else len(sizes)} dimensions, the kernel takes 4"
    if channels is None:
        return "the number of channels is not known"
    if channels % groups or (channels // groups) % 2:
        return f"{channels} channels in {groups} groups: the kernel takes an even number of channels a group"
    return None


def split_gelu_refusal(x: ir.Value) -> str | None:
    """Return why BiasSplitGelu cannot take x (B,S,2D), None if it can."""
    width = static_dim(x, -1)
    if x.shape is None or x.shape.rank() != 3:
        return "the input does not have 3 dimensions"
    if width not in SPLIT_GELU_WIDTHS:
        return f"the width {width} has no kernel, which exist for {', '.join(map(str, sorted(SPLIT_GELU_WIDTHS)))}"
    return None
