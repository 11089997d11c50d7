"""The rules of LayerNormRows, SplitGeluRows and SumRows: rows that are quantized as they are computed."""

from __future__ import annotations

import math

import onnx_ir as ir

from sdonnx.fusions.sdonnx_domain.replacement import replace_by, without_absent
from sdonnx.graph.edit import graph_of, input_of, insert, optional_input, replace, required, static_dim
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, Refused, WalkResult, ancestors, has_one_reader
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.operators.sdonnx_domain.eight_bits import EightBits
from sdonnx.operators.sdonnx_domain.matmul_8bit import check_scaled_mat_mul
from sdonnx.operators.sdonnx_domain.quantized_rows import check_rows

__all__ = ["rows_of_source", "rows_of_sum"]

_HALF = ir.DataType.FLOAT16
_MAX_HALF = 65504  # the largest number of float16


def rows_of_source(node: ir.Node, _: object) -> WalkResult:
    """QuantizeRows(LayerNorm(x)) -> LayerNormRows(x); QuantizeRows(BiasSplitGelu(x)) -> SplitGeluRows(x)."""
    source = input_of(node, 0)
    maker, scale = source.producer(), optional_input(node, 1)
    if maker is None or maker.domain != OUR_DOMAIN or not has_one_reader(source):
        return NOT_A_CANDIDATE
    if maker.op_type not in ("LayerNorm", "BiasSplitGelu"):
        return NOT_A_CANDIDATE
    if (reason := check_rows(input_of(maker, 0), static_dim(source, -1))) is not None:
        return Refused(reason)
    norm = maker.op_type == "LayerNorm"
    count = 3 if norm else 1 if _bias_moves(maker) else 2
    inputs = without_absent(*(optional_input(maker, index) for index in range(count)), *[None] * (2 - count), scale)
    attributes: dict[str, int | float] = {"format": node.attributes.get_int("format", 0)}
    if norm:
        attributes["epsilon"] = maker.attributes.get_float("epsilon", 1e-5)
    replace_by(node, node.outputs, "LayerNormRows" if norm else "SplitGeluRows", inputs, attributes)
    return REWRITTEN


def rows_of_sum(node: ir.Node, _: object) -> WalkResult:
    """Rows of x @ w * scales + bias + residual -> SumRows(x @ w * 2^-n, ...), which multiplies by the scales.

    cuBLASLt has faster algorithms for matmuls without scales of rows and columns, and without a residual.
    """
    total = input_of(node, 0)
    matmul = total.producer()
    if matmul is None or (matmul.domain, matmul.op_type) != (OUR_DOMAIN, "ScaledMatMul"):
        return NOT_A_CANDIDATE
    q, x_scales, weight, w_scales, bias, residual = (optional_input(matmul, index) for index in range(6))
    formats = [EightBits(matmul.attributes.get_int(name, 0)) for name in ("x_format", "w_format")]
    if residual is None or x_scales is None or w_scales is None or weight is None or EightBits.INT8 in formats:
        return NOT_A_CANDIDATE
    norm = node.op_type == "LayerNormRows"
    gamma, beta = (optional_input(node, index) if norm else None for index in (1, 2))
    scale = optional_input(node, 3 if norm else 1)
    if any(matmul in ancestors(each) for each in (gamma, beta, scale)):
        return Refused("the weights of the norm, or the scale, depend on the sum")
    largest = required(static_dim(weight, 1)) * math.prod(each.max_value for each in formats)
    exponent = max(0, math.ceil(math.log2(largest / _MAX_HALF)))
    attributes: dict[str, int | float] = {
        **{name: int(each) for name, each in zip(("x_format", "w_format"), formats, strict=True)},
        "exponent": exponent,
    }
    plain = insert(
        matmul, "ScaledMatMul", [q, None, weight], attributes, domain=OUR_DOMAIN, shape=total.shape, dtype=_HALF
    )
    inputs = without_absent(plain, x_scales, w_scales, bias, residual, gamma, beta, scale)
    attributes = {"format": node.attributes.get_int("format", 0), "exponent": exponent}
    if norm:
        attributes["epsilon"] = node.attributes.get_float("epsilon", 1e-5)
    replace_by(node, [*node.outputs, total], "SumRows", inputs, attributes)
    # Other readers of the sum may be before the node that quantizes it.
    graph_of(node).sort()
    return REWRITTEN


def _bias_moves(maker: ir.Node) -> bool:
    """Let the matmul before a BiasSplitGelu add its bias, in the epilogue of cuBLASLt; return whether it does."""
    value, bias = input_of(maker, 0), optional_input(maker, 1)
    matmul = value.producer()
    is_own = matmul is not None and (matmul.domain, matmul.op_type) == (OUR_DOMAIN, "ScaledMatMul")
    if matmul is None or not is_own or bias is None or not has_one_reader(value):
        return False
    attributes = {name: matmul.attributes.get_int(name) for name in ("x_format", "w_format", "gelu")}
    if any(each is not None for each in matmul.inputs[4:]) or attributes["gelu"]:
        return False
    if check_scaled_mat_mul(input_of(matmul, 2), bias) is not None:
        return False
    inputs, domain = [*matmul.inputs[:4], bias], OUR_DOMAIN
    total = insert(matmul, "ScaledMatMul", inputs, attributes, domain=domain, shape=value.shape, dtype=value.dtype)
    replace(value, total)
    return True
