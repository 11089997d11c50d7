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

__all__ = [
    "CONTRACTS",
    "LARGEST_GROUP",
    "MOST_OUTPUTS",
    "SPLIT_GELU_WIDTHS",
    "Contract",
    "causal_refusal",
    "contract_of",
    "dtype_refusal",
    "fast_gelu_refusal",
    "group_norm_refusal",
    "split_gelu_refusal",
]

# bias_split_gelu_impl.cu instantiates its kernel for these widths of x (twice the hidden width) alone.
SPLIT_GELU_WIDTHS = frozenset({2560, 5120, 6144, 10240, 12288})

# group_norm_common_base.h: a block holds whole groups, and 512 channels (kMaxSize) at most.
LARGEST_GROUP = 512

MOST_OUTPUTS = 32
"""ONNX Runtime's Split passes the addresses of that many outputs as arguments of its kernel.

Those of more it copies from a buffer of the host as it runs (CudaAsyncBuffer in its split.cc), which is another's when
a captured graph is replayed.
"""

_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})
_FLOATS_AND_BFLOAT16 = _FLOATS | {ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class Contract:
    """What is known of one operator.

    Attributes:
        op_type: the operator, in the domain com.microsoft.
        lower: inserts the reference body before a node and returns its outputs.
        dtypes: what the CUDA provider has kernels for (onnxruntime/docs/OperatorKernels.md).
        float32_inputs: inputs that are float32 in every precision.
        cpu: the CPU provider has a kernel.
    """

    op_type: str
    lower: Callable[[ir.Node], list[ir.Value | None]]
    dtypes: frozenset[ir.DataType] = _FLOATS
    float32_inputs: frozenset[int] = frozenset()
    cpu: bool = False

    @property
    def bfloat16(self) -> bool:
        """Whether the CUDA provider has a kernel for bfloat16."""
        return ir.DataType.BFLOAT16 in self.dtypes


_ALL = (
    Contract("GroupNorm", reference.group_norm, float32_inputs=frozenset({1, 2})),
    Contract("SkipGroupNorm", reference.skip_group_norm, float32_inputs=frozenset({1, 2})),
    Contract("BiasSplitGelu", reference.bias_split_gelu),
    Contract("BiasAdd", reference.bias_add),
    Contract("NhwcConv", reference.nhwc_conv),
    Contract("SkipLayerNormalization", reference.skip_layer_normalization, _FLOATS_AND_BFLOAT16, cpu=True),
    Contract(
        "SkipSimplifiedLayerNormalization",
        reference.skip_simplified_layer_normalization,
        _FLOATS_AND_BFLOAT16,
        cpu=True,
    ),
    Contract("FusedMatMul", reference.fused_mat_mul, _FLOATS_AND_BFLOAT16, cpu=True),
    Contract("FastGelu", reference.fast_gelu, _FLOATS_AND_BFLOAT16, cpu=True),
    Contract("MultiHeadAttention", reference.multi_head_attention, _FLOATS_AND_BFLOAT16, cpu=True),
)
CONTRACTS = {contract.op_type: contract for contract in _ALL}


def contract_of(node: ir.Node) -> Contract | None:
    """Return the contract of a node's operator, None for an operator of another domain."""
    return CONTRACTS.get(node.op_type) if node.domain == MICROSOFT else None


def dtype_refusal(op_type: str, x: ir.Value) -> str | None:
    """Return why the operator's kernels cannot take the type of x, None if they can or it is not known."""
    dtypes = CONTRACTS[op_type].dtypes
    if x.dtype is None or x.dtype in dtypes:
        return None
    return f"the input is {x.dtype}, the kernel takes {', '.join(sorted(dtype.name for dtype in dtypes))}"


def group_norm_refusal(x: ir.Value, channels: int | None, groups: int) -> str | None:
    """Return why GroupNorm cannot take x (B,C,H,W in either order), None if it can.

    group_norm_impl.cu works on pairs of channels: every group must hold an even number of them, and
    fit into one block of LARGEST_GROUP channels.
    """
    sizes = dims(x)
    if sizes is None or len(sizes) != 4:
        return f"the input has {'no known' if sizes is None else len(sizes)} dimensions, the kernel takes 4"
    if channels is None:
        return "the number of channels is not known"
    if channels % groups or (channels // groups) % 2:
        return f"{channels} channels in {groups} groups: the kernel takes an even number of channels a group"
    if channels // groups > LARGEST_GROUP:
        return f"{channels} channels in {groups} groups: the kernel takes at most {LARGEST_GROUP} channels a group"
    return dtype_refusal("GroupNorm", x)


def causal_refusal(queries: ir.Value, keys: ir.Value) -> str | None:
    """Return why MultiHeadAttention cannot be causal over queries (B,S,D) and keys (B,L,D), None if it can.

    Where S and L differ, ONNX's Attention lets the first query see the first key alone. ONNX Runtime
    1.31's CPU kernel gives other numbers for S < L (relative error 0.5 for 3 and 6), aligned to neither end.
    """
    lengths = [sizes[1] for value in (queries, keys) if (sizes := dims(value)) is not None and len(sizes) == 3]
    if len(lengths) != 2 or lengths[0] != lengths[1] or getattr(lengths[0], "value", lengths[0]) is None:
        return "a causal mask over numbers of queries and keys that are not known to be equal"
    return None


def split_gelu_refusal(x: ir.Value) -> str | None:
    """Return why BiasSplitGelu cannot take x (B,S,2D), None if it can."""
    width = static_dim(x, -1)
    if x.shape is None or x.shape.rank() != 3:
        return "the input does not have 3 dimensions"
    if width not in SPLIT_GELU_WIDTHS:
        return f"the width {width} has no kernel, which exist for {', '.join(map(str, sorted(SPLIT_GELU_WIDTHS)))}"
    return dtype_refusal("BiasSplitGelu", x)


def fast_gelu_refusal(x: ir.Value) -> str | None:
    """Return why FastGelu cannot take x (..., D), None if it can.

    fast_gelu_impl.cu works on pairs in fp16; without pairs the tanh is taken in fp16 too, with twice the
    error of a rounded result (relative error 4e-3 at a width of 63, H200).
    """
    width = static_dim(x, -1)
    if width is None or width % 2:
        return f"the width {width}: the kernel is exact for even ones alone"
    return dtype_refusal("FastGelu", x)
