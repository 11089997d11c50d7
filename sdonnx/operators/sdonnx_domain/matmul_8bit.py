"""sdonnx::ScaledMatMul(q (...,K), scales (...,1), w (N,K), w_scales (N,), bias (N,), residual (...,N)), 8-bit factors.

It returns (q @ w^T) * scales * w_scales + bias + residual in fp16, or gelu(... + bias) by the tanh approximation, which
excludes a residual. q and w are patterns of the formats `x_format` and `w_format` (`EightBits`); int8 is multiplied by
int8 only, and e5m2 not by e5m2. bias and residual are optional. Both scales may be absent: the result is then
(q @ w^T) * 2^-exponent, which SumRows scales. The kernel is cuBLASLt's, by kernels/src/scaled_mat_mul.cuh.

Our operators pass 8-bit numbers as uint8 tensors. ONNX's opset 23 cannot reinterpret bits, so reference bodies look
values up in tables of all 256 patterns.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.graph.edit import constant, graph_of, input_of, insert, optional_input
from sdonnx.operators.contract import SdonnxContract, sdonnx_case
from sdonnx.operators.kernel_case import Fill, KernelCase
from sdonnx.operators.sdonnx_domain.matmul import check_weight

__all__ = ["SCALED_MAT_MUL", "EightBits", "check_scaled_mat_mul", "decoded", "encoded"]

_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_INT64, _UINT8 = ir.DataType.INT64, ir.DataType.UINT8


class EightBits(enum.IntEnum):
    """The formats of our own operators, with the numbers that their attributes have."""

    E4M3 = 0
    E5M2 = 1
    INT8 = 2

    @property
    def dtype(self) -> ir.DataType:
        """The ONNX type."""
        return (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2, ir.DataType.INT8)[self]

    @property
    def max_value(self) -> float:
        """The largest magnitude that is used."""
        return (448.0, 57344.0, 127.0)[self]

    def values(self) -> npt.NDArray[np.float32]:
        """Return the numbers of all 256 patterns, in their order; NaN for those that are no numbers."""
        patterns = np.arange(256, dtype=np.uint8).view(self.dtype.numpy()).astype(np.float32)
        return np.where(np.isfinite(patterns), patterns, np.float32(np.nan))


def decoded(node: ir.Node, bits: ir.Value, number_format: EightBits) -> ir.Value:
    """Return the numbers float32 of patterns, inserted before a node."""
    table = constant(graph_of(node), number_format.values(), np.float32, f"patterns_{number_format.name.lower()}")
    indexes = insert(node, "Cast", [bits], {"to": _INT64}, dtype=_INT64, shape=bits.shape)
    return insert(node, "Gather", [table, indexes], {"axis": 0}, shape=bits.shape)


def encoded(node: ir.Node, quotients: ir.Value, number_format: EightBits) -> ir.Value:
    """Return the patterns of numbers float32, rounded to nearest with ties to even and saturated."""
    graph, name = graph_of(node), number_format.name.lower()
    most = number_format.max_value
    low = constant(graph, -most, np.float32, f"low_{name}")
    high = constant(graph, most, np.float32, f"high_{name}")
    limited = insert(node, "Clip", [quotients, low, high], shape=quotients.shape)
    zero = constant(graph, 0, np.float32, "zero_float32")
    is_negative = insert(node, "Less", [limited, zero], dtype=ir.DataType.BOOL, shape=quotients.shape)
    if number_format is EightBits.INT8:
        whole = insert(node, "Round", [limited], shape=quotients.shape)
        turned = insert(node, "Add", [whole, constant(graph, 256, np.float32, "int8_patterns")])
        # A number that rounds to zero from below is not turned.
        is_below = insert(node, "Less", [whole, zero], dtype=ir.DataType.BOOL)
        codes = insert(node, "Where", [is_below, turned, whole], dtype=_FLOAT)
        return insert(node, "Cast", [codes], {"to": _UINT8}, dtype=_UINT8, shape=quotients.shape)
    narrow = insert(node, "Cast", [limited], {"to": number_format.dtype}, dtype=number_format.dtype)
    sizes = insert(node, "Abs", [insert(node, "Cast", [narrow], {"to": _FLOAT}, dtype=_FLOAT)])
    # The patterns of positive numbers are in the order of the numbers: a pattern is the count of those up to it.
    values = number_format.values()[1:128]
    steps = constant(graph, values[np.isfinite(values)], np.float32, f"steps_{name}")
    last = constant(graph, [-1], np.int64, "integers_m1")
    reached = insert(node, "GreaterOrEqual", [insert(node, "Unsqueeze", [sizes, last]), steps], dtype=ir.DataType.BOOL)
    counted = insert(node, "Cast", [reached], {"to": _FLOAT}, dtype=_FLOAT)
    count = insert(node, "ReduceSum", [counted, last], {"keepdims": 0})
    sign = insert(node, "Where", [is_negative, constant(graph, 128, np.float32, "sign_pattern"), zero], dtype=_FLOAT)
    total = insert(node, "Add", [count, sign])
    return insert(node, "Cast", [total], {"to": _UINT8}, dtype=_UINT8, shape=quotients.shape)


def check_scaled_mat_mul(weight: ir.Value, bias: ir.Value | None) -> str | None:
    """Return why the kernel does not accept matmuls by a weight (N,K), None if it does."""
    if reason := check_weight(weight, bias, columns=0, multiple=16):
        return reason
    if bias is not None and bias.dtype not in (None, _HALF):
        return f"the bias is {bias.dtype}, the kernel accepts FLOAT16"
    return None


def _limits(node: ir.Node) -> str | None:
    if node.attributes.get_int("gelu", 0) and optional_input(node, 5) is not None:
        return "gelu excludes a residual"
    formats = {node.attributes.get_int(name, 0) for name in ("x_format", "w_format")}
    if len(formats) == 2 and EightBits.INT8 in formats:
        return "int8 is multiplied by int8 only"
    if formats == {EightBits.E5M2}:
        return "no GPU multiplies e5m2 by e5m2"
    has_scales = [optional_input(node, index) is not None for index in (1, 3)]
    finishes = any(value is not None for value in node.inputs[4:]) or node.attributes.get_int("gelu", 0) != 0
    if finishes and not any(has_scales):
        return "a matmul without scales has no bias, residual or gelu"
    if len(set(has_scales)) > 1:
        return "only one of the factors has scales"
    return check_scaled_mat_mul(input_of(node, 2), optional_input(node, 4))


def _lower(node: ir.Node) -> list[ir.Value | None]:
    q, w = input_of(node, 0), input_of(node, 2)
    left, right = (
        decoded(node, bits, EightBits(node.attributes.get_int(name, 0)))
        for bits, name in ((q, "x_format"), (w, "w_format"))
    )
    matmul = insert(node, "MatMul", [left, insert(node, "Transpose", [right], {"perm": [1, 0]})])
    exponent = node.attributes.get_int("exponent", 0)
    scales = [value for index in (1, 3) if (value := optional_input(node, index)) is not None]
    if exponent:
        scales.append(constant(graph_of(node), 2.0**-exponent, np.float32, f"two_to_minus_{exponent}"))
    total = matmul
    for scale in scales:
        total = insert(node, "Mul", [total, scale])
    for index in (4, 5):
        if (term := optional_input(node, index)) is not None:
            total = insert(node, "Add", [total, insert(node, "Cast", [term], {"to": _FLOAT}, dtype=_FLOAT)])
    if node.attributes.get_int("gelu", 0):
        total = insert(node, "Gelu", [total], {"approximate": "tanh"})
    dtype = node.outputs[0].dtype or _HALF
    return [insert(node, "Cast", [total], {"to": dtype}, dtype=dtype, shape=node.outputs[0].shape)]


def _kernel_cases() -> Iterator[KernelCase]:
    e4m3, e5m2, int8 = EightBits
    forms = [
        (False, False, 0),
        (True, False, 0),
        (False, True, 0),
        (True, True, 0),
        (False, False, 1),
        (True, False, 1),
    ]
    cases = [(64, 320, (3, 7), e4m3, e4m3, *form) for form in forms]
    cases += [(64, 320, (3, 7), int8, int8, *form) for form in forms]
    cases += [(320, 64, (2, 5), *formats, True, True, 0) for formats in ((e4m3, e5m2), (e5m2, e4m3))]
    cases += [(*sizes, (2, 13), e4m3, e4m3, True, False, 0) for sizes in ((16, 16), (48, 80), (1152, 4608), (5120, 64))]
    cases += [(320, 320, rows, e4m3, e4m3, True, True, 0) for rows in ((1, 1), (1, 304), (32, 3))]
    for inner, outer, rows, x_format, w_format, has_bias, has_residual, gelu in cases:
        names = f"{x_format.name.lower()}x{w_format.name.lower()}"
        yield sdonnx_case(
            "ScaledMatMul",
            f"{'x'.join(map(str, rows))} {inner}x{outer} {names} bias={has_bias} residual={has_residual} gelu={gelu}",
            (
                (*rows, inner),
                (*rows, 1),
                (outer, inner),
                (outer,),
                (outer,) if has_bias else None,
                (*rows, outer) if has_residual else None,
            ),
            {"x_format": int(x_format), "w_format": int(w_format), "gelu": gelu},
            fills={0: _BITS[x_format], 1: Fill.SCALES, 2: _BITS[w_format], 3: Fill.SCALES},
        )
    plain = [(64, 320, (3, 7), *formats) for formats in ((e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3), (int8, int8))]
    plain += [(*sizes, (2, 13), e4m3, e4m3) for sizes in ((16, 16), (1152, 4608), (5120, 64))]
    for inner, outer, rows, x_format, w_format in plain:
        yield sdonnx_case(
            "ScaledMatMul",
            f"{'x'.join(map(str, rows))} {inner}x{outer} {x_format.name.lower()}x{w_format.name.lower()} no scales",
            ((*rows, inner), None, (outer, inner)),
            {"x_format": int(x_format), "w_format": int(w_format), "exponent": 12},
            fills={0: _BITS[x_format], 2: _BITS[w_format]},
        )


_BITS = {EightBits.E4M3: Fill.E4M3_BITS, EightBits.E5M2: Fill.E5M2_BITS, EightBits.INT8: Fill.INT8_BITS}

SCALED_MAT_MUL = SdonnxContract(
    "ScaledMatMul",
    _lower,
    _kernel_cases,
    first_use=(
        "3x7 64x320 e4m3xe4m3 bias=True residual=True gelu=0",
        "3x7 64x320 e4m3xe4m3 bias=True residual=False gelu=1",
        "3x7 64x320 int8xint8 bias=True residual=True gelu=0",
        "3x7 64x320 e4m3xe4m3 no scales",
    ),
    limits=_limits,
    dtypes=frozenset({_HALF, ir.DataType.UINT8}),
    float32_inputs=frozenset({1, 3}),
    row_inputs=frozenset({0, 1, 5}),
    expensive=True,
)
