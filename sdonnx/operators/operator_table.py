"""The tables of contracts: the contrib operators that the fusions emit, and our own operators."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from sdonnx.graph.edit import replace
from sdonnx.operators import contrib_elementwise, contrib_linear, contrib_norms, multi_head_attention
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import OUR_DOMAIN, KernelCase
from sdonnx.operators.sdonnx_domain import (
    attention,
    convolution,
    elementwise,
    matmul,
    matmul_8bit,
    norms,
    quantized_rows,
    sampler,
)

__all__ = [
    "CONTRACTS",
    "DTYPES",
    "KERNEL_CASES",
    "OUR_CONTRACTS",
    "OUR_KERNEL_CASES",
    "LowerContribOperators",
    "contract_of",
    "contract_of_case",
    "dtypes_of",
]

CONTRACTS = {
    contract.op_type: contract
    for contract in (
        contrib_norms.GROUP_NORM,
        contrib_norms.SKIP_GROUP_NORM,
        contrib_elementwise.BIAS_SPLIT_GELU,
        contrib_elementwise.BIAS_ADD,
        contrib_norms.SKIP_LAYER_NORMALIZATION,
        contrib_norms.SKIP_SIMPLIFIED_LAYER_NORMALIZATION,
        contrib_elementwise.FAST_GELU,
        contrib_elementwise.QUICK_GELU,
        contrib_linear.FUSED_MAT_MUL,
        contrib_linear.NHWC_CONV,
        multi_head_attention.MULTI_HEAD_ATTENTION,
    )
}
"""The contracts of ONNX Runtime's operators, by operator."""

OUR_CONTRACTS: dict[str, Contract] = {
    contract.op_type: contract
    for contract in (
        norms.LAYER_NORM,
        norms.SKIP_LAYER_NORM,
        elementwise.BIAS_SPLIT_GELU,
        norms.GROUP_NORM,
        matmul.MAT_MUL,
        matmul.STACKED_MAT_MUL,
        attention.ATTENTION,
        attention.SELF_ATTENTION,
        elementwise.CONCAT_CHANNELS,
        elementwise.UPSAMPLE_NEAREST,
        convolution.CHANNELS_LAST_CONV,
        sampler.SAMPLER_INPUT,
        sampler.SAMPLER_STEP,
        quantized_rows.QUANTIZE_ROWS,
        quantized_rows.LAYER_NORM_ROWS,
        quantized_rows.SPLIT_GELU_ROWS,
        quantized_rows.SUM_ROWS,
        matmul_8bit.SCALED_MAT_MUL,
    )
}
"""The contracts of our own operators, of the domain OUR_DOMAIN, by operator."""

KERNEL_CASES = tuple(case for contract in CONTRACTS.values() for case in contract.kernel_cases())
"""Every kernel case of every contract.

The tests compare them with torch and with the kernels; `sdonnx.doctor` compares the small ones with the kernels of the
machine that it runs on.
"""

OUR_KERNEL_CASES = tuple(case for contract in OUR_CONTRACTS.values() for case in contract.kernel_cases())
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
    return OUR_CONTRACTS if domain == OUR_DOMAIN else CONTRACTS


class LowerContribOperators(InPlacePass):
    """com.microsoft operator -> reference body, in standard operators.

    The result runs everywhere, including ONNX Runtime's CPU provider and onnx.reference. This is how graphs that were
    fused for CUDA are checked where there is no GPU.

    Args:
        keep: return whether a node stays as it is. The default keeps no node.
    """

    def __init__(self, keep: Callable[[ir.Node], bool] = lambda _: False) -> None:
        super().__init__()
        self._keep = keep

    def call(self, model: ir.Model) -> PassResult:
        """Replace every contrib operator that has a contract."""
        modified = False
        for node in list(model.graph):
            contract = contract_of(node)
            if contract is None or self._keep(node):
                continue
            for old, new in zip(node.outputs, contract.lower(node), strict=False):
                if new is not None:
                    new.shape, new.type = old.shape, old.type
                    replace(old, new)
            model.graph.remove(node, safe=True)
            modified = True
        return PassResult(model, modified)
