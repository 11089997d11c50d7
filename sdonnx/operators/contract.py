"""The contract of a contrib operator: the inputs that ONNX Runtime's kernels accept, and the function they compute.

A fusion rule asks for the limits before it emits an operator. `LowerContribOperators` replaces an operator by its
reference body in standard operators, so that a fused graph runs where no such kernel exists. Tests compare the bodies
with torch on the CPU and with the kernels on a GPU.

ONNX Runtime 1.31's CUDA kernels have these limits (onnxruntime/contrib_ops/cuda).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, constant, dims, graph_of, input_of, insert, optional_input
from sdonnx.operators.kernel_case import OUR_DOMAIN, KernelCase

__all__ = [
    "FLOATS",
    "FLOATS_AND_BFLOAT16",
    "TO_NCHW",
    "TO_NHWC",
    "Contract",
    "SdonnxContract",
    "channels_last_conv",
    "copied_rows",
    "on_inputs",
    "sdonnx_case",
]

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})
FLOATS_AND_BFLOAT16 = FLOATS | {ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class Contract:
    """One contrib operator.

    Attributes:
        op_type: the operator.
        lower: insert the reference body before a node and return one value for each of the node's outputs, None for an
            output that the body does not compute. Sources are onnxruntime/docs/ContribOperators.md and the papers that
            it names.
        kernel_cases: make the cases that the kernels are tested with: extreme and odd sizes, every layout and every
            optional input.
        first_use: the names of the cases that are checked at the first use of a GPU, in fp16: sizes of pipelines.
        limits: return why no CUDA kernel accepts a node's sizes or attributes, None if one does.
        domain: the operator's domain.
        dtypes: the data types of the CUDA provider's kernels (onnxruntime/docs/OperatorKernels.md).
        float32_inputs: the inputs that are float32 in every precision.
        unused_outputs: the outputs that no graph reads, such as a norm's mean.
        output_rank: the rank of the outputs; None for the rank of the first input.
        other_outputs: the data type, in every precision, and the rank of the outputs that differ from these.
        cpu: whether the CPU provider has a kernel.
        broadcasts: whether the operator is elementwise but for its last axis, over inputs that broadcast.
        row_inputs: the inputs with a batch as first axis, of an operator that computes each item of the batch by
            itself; its other inputs are weights.
        expensive: whether the result is worth a buffer, instead of computing it at every step.
    """

    op_type: str
    lower: Callable[[ir.Node], list[ir.Value | None]]
    kernel_cases: Callable[[], Iterable[KernelCase]]
    first_use: tuple[str, ...]
    limits: Callable[[ir.Node], str | None] = lambda _: None
    domain: str = MICROSOFT
    dtypes: frozenset[ir.DataType] = FLOATS
    float32_inputs: frozenset[int] = frozenset()
    unused_outputs: frozenset[int] = frozenset()
    output_rank: int | None = None
    other_outputs: Mapping[int, tuple[ir.DataType, int]] = field(default_factory=dict)
    cpu: bool = False
    broadcasts: bool = False
    row_inputs: frozenset[int] = frozenset()
    expensive: bool = False

    def check(self, node: ir.Node) -> str | None:
        """Return why no CUDA kernel accepts a node of this operator, None if one does."""
        return self.limits(node) or (None if 0 in self.float32_inputs else self.check_dtype(input_of(node, 0)))

    def check_dtype(self, x: ir.Value) -> str | None:
        """Return why the kernels do not accept the data type of x, None if they do or it is unknown."""
        if x.dtype is None or x.dtype in self.dtypes:
            return None
        return f"the input is {x.dtype}, the kernel accepts {', '.join(sorted(dtype.name for dtype in self.dtypes))}"

    def check_dtypes(self, *values: ir.Value | None) -> str | None:
        """Return why the kernels do not accept the data types of several inputs, None for an absent one."""
        reasons = (self.check_dtype(value) for value in values if value is not None)
        return next(filter(None, reasons), None)


@dataclass(frozen=True)
class SdonnxContract(Contract):
    """One of our own operators: its kernels compute in float16."""

    domain: str = OUR_DOMAIN
    dtypes: frozenset[ir.DataType] = frozenset({ir.DataType.FLOAT16})


sdonnx_case = partial(KernelCase, domain=OUR_DOMAIN)
"""Make a kernel case of one of our own operators."""


def on_inputs(check: Callable[..., str | None], *indices: int) -> Callable[[ir.Node], str | None]:
    """Return a contract's `limits` that pass the inputs of these indices, None for absent ones, to a check."""
    return lambda node: check(*(optional_input(node, index) for index in indices))


TO_NCHW, TO_NHWC = [0, 3, 1, 2], [0, 2, 3, 1]
"""Permutations between (B,H,W,C) and (B,C,H,W)."""


def channels_last_conv(node: ir.Node, attributes: Mapping[str, Any]) -> ir.Value:
    """Return the convolution of x (B,H,W,C) by w (M,kH,kW,C/group), with a bias (M,) or none, the inputs of a node.

    Args:
        node: the node before which it is inserted.
        attributes: attributes of ONNX's Conv.
    """
    planes = insert(node, "Transpose", [node.inputs[0]], {"perm": TO_NCHW})
    weight = insert(node, "Transpose", [node.inputs[1]], {"perm": TO_NCHW})
    result = insert(node, "Conv", [planes, weight, optional_input(node, 2)], attributes)
    return insert(node, "Transpose", [result], {"perm": TO_NHWC})


def copied_rows(node: ir.Node, value: ir.Value, like: ir.Value) -> ir.Value:
    """Return copies of a value (A,...), one behind another, with as many rows as `like` (B,...), where A divides B.

    The value itself is returned where A = B is known.
    """
    first, other = (sizes[0] if (sizes := dims(each)) else None for each in (value, like))
    if first is not None and first == other and (isinstance(first, int) or first.value is not None):
        return value
    graph, int64 = graph_of(node), ir.DataType.INT64
    one = constant(graph, [1], np.int64, "integers_1")
    rows, wanted = (insert(node, "Shape", [each], {"start": 0, "end": 1}, dtype=int64) for each in (value, like))
    copies = insert(node, "Div", [wanted, insert(node, "Max", [rows, one])])  # no rows have no copies
    whole = insert(node, "Concat", [copies, insert(node, "Shape", [value], dtype=int64)], {"axis": 0})
    rest = insert(node, "Shape", [value], {"start": 1}, dtype=int64)
    flat = insert(node, "Concat", [wanted, rest], {"axis": 0})
    return insert(node, "Reshape", [insert(node, "Expand", [value, whole]), flat], {"allowzero": 1})
