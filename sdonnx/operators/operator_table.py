"""The tables of contracts: the contrib operators that the fusions emit, and our own operators."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.operators.bias_add import BIAS_ADD
from sdonnx.operators.bias_split_gelu import BIAS_SPLIT_GELU
from sdonnx.operators.contract import Contract
from sdonnx.operators.fast_gelu import FAST_GELU
from sdonnx.operators.fused_mat_mul import FUSED_MAT_MUL
from sdonnx.operators.group_norm import GROUP_NORM
from sdonnx.operators.kernel_case import OWN_DOMAIN, KernelCase
from sdonnx.operators.multi_head_attention import MULTI_HEAD_ATTENTION
from sdonnx.operators.nhwc_conv import NHWC_CONV
from sdonnx.operators.own_attention import OWN_ATTENTION
from sdonnx.operators.own_bias_split_gelu import OWN_BIAS_SPLIT_GELU
from sdonnx.operators.own_channels_last_conv import OWN_CHANNELS_LAST_CONV
from sdonnx.operators.own_concat_channels import OWN_CONCAT_CHANNELS
from sdonnx.operators.own_group_norm import OWN_GROUP_NORM
from sdonnx.operators.own_layer_norm import OWN_LAYER_NORM
from sdonnx.operators.own_mat_mul import OWN_MAT_MUL
from sdonnx.operators.own_rows import OWN_LAYER_NORM_ROWS, OWN_QUANTIZE_ROWS, OWN_SPLIT_GELU_ROWS, OWN_SUM_ROWS
from sdonnx.operators.own_sampler_input import OWN_SAMPLER_INPUT
from sdonnx.operators.own_sampler_step import OWN_SAMPLER_STEP
from sdonnx.operators.own_scaled_mat_mul import OWN_SCALED_MAT_MUL
from sdonnx.operators.own_self_attention import OWN_SELF_ATTENTION
from sdonnx.operators.own_skip_layer_norm import OWN_SKIP_LAYER_NORM
from sdonnx.operators.own_stacked_mat_mul import OWN_STACKED_MAT_MUL
from sdonnx.operators.own_upsample_nearest import OWN_UPSAMPLE_NEAREST
from sdonnx.operators.quick_gelu import QUICK_GELU
from sdonnx.operators.skip_group_norm import SKIP_GROUP_NORM
from sdonnx.operators.skip_layer_normalization import SKIP_LAYER_NORMALIZATION
from sdonnx.operators.skip_simplified_layer_normalization import SKIP_SIMPLIFIED_LAYER_NORMALIZATION

__all__ = [
    "CONTRACTS",
    "DTYPES",
    "KERNEL_CASES",
    "OWN_CONTRACTS",
    "OWN_KERNEL_CASES",
    "contract_of",
    "contract_of_case",
    "dtypes_of",
]

CONTRACTS = {
    contract.op_type: contract
    for contract in (
        GROUP_NORM,
        SKIP_GROUP_NORM,
        BIAS_SPLIT_GELU,
        BIAS_ADD,
        SKIP_LAYER_NORMALIZATION,
        SKIP_SIMPLIFIED_LAYER_NORMALIZATION,
        FAST_GELU,
        QUICK_GELU,
        FUSED_MAT_MUL,
        NHWC_CONV,
        MULTI_HEAD_ATTENTION,
    )
}
"""The contracts of ONNX Runtime's operators, by operator."""

OWN_CONTRACTS = {
    contract.op_type: contract
    for contract in (
        OWN_LAYER_NORM,
        OWN_SKIP_LAYER_NORM,
        OWN_BIAS_SPLIT_GELU,
        OWN_GROUP_NORM,
        OWN_MAT_MUL,
        OWN_STACKED_MAT_MUL,
        OWN_ATTENTION,
        OWN_SELF_ATTENTION,
        OWN_CONCAT_CHANNELS,
        OWN_UPSAMPLE_NEAREST,
        OWN_CHANNELS_LAST_CONV,
        OWN_SAMPLER_INPUT,
        OWN_SAMPLER_STEP,
        OWN_QUANTIZE_ROWS,
        OWN_LAYER_NORM_ROWS,
        OWN_SPLIT_GELU_ROWS,
        OWN_SUM_ROWS,
        OWN_SCALED_MAT_MUL,
    )
}
"""The contracts of our own operators, of the domain OWN_DOMAIN, by operator."""

KERNEL_CASES = tuple(case for contract in CONTRACTS.values() for case in contract.kernel_cases())
"""Every kernel case of every contract.

The tests compare them with torch and with the kernels; `sdonnx.doctor` compares the small ones with the kernels of the
machine that it runs on.
"""

OWN_KERNEL_CASES = tuple(case for contract in OWN_CONTRACTS.values() for case in contract.kernel_cases())
"""Every kernel case of our own operators.

They are in a second file, which GPUs that are not trusted read.
"""

DTYPES = {"float16": ir.DataType.FLOAT16, "float32": ir.DataType.FLOAT, "bfloat16": ir.DataType.BFLOAT16}


def contract_of(node: ir.Node) -> Contract | None:
    """Return the contract of a node's operator, None for an operator without one."""
    contract = _table(node.domain).get(node.op_type)
    return contract if contract is not None and contract.domain == node.domain else None


def contract_of_case(case: KernelCase) -> Contract:
    """Return the contract of a case's operator."""
    return _table(case.domain)[case.op_type]


def dtypes_of(case: KernelCase) -> list[str]:
    """Return the data types that the contract of a case names."""
    return [name for name, dtype in DTYPES.items() if dtype in contract_of_case(case).dtypes]


def _table(domain: str) -> dict[str, Contract]:
    return OWN_CONTRACTS if domain == OWN_DOMAIN else CONTRACTS
