"""Find matmuls of factors that are rounded to 8 bits, as `sdonnx.quantization` writes them.

Both factors are values in 8 bits that are restored: activations by rows or by a constant scale, the weight by
DequantizeLinear and a Transpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.fusions.sdonnx_domain.replacement import both_orders
from sdonnx.graph.edit import constant_value, dims, dtype_of, is_weight, optional_input
from sdonnx.graph.match import producer_of
from sdonnx.operators.sdonnx_domain.matmul_8bit import EightBits

__all__ = ["RoundedMatMul", "RoundedRows", "rounded_matmul", "rounded_projections"]

_FORMATS = {each.dtype: each for each in EightBits}


@dataclass(frozen=True)
class RoundedRows:
    """Activations that are rounded to 8 bits.

    Attributes:
        source: the activations.
        number_format: their format.
        scale: their scale, float16; None for a scale of each row.
    """

    source: ir.Value
    number_format: EightBits
    scale: ir.Value | None


@dataclass(frozen=True)
class RoundedMatMul:
    """The factors of a matmul that are rounded to 8 bits.

    Attributes:
        rows: the activations (...,K).
        weight: the weight (N,K) in 8 bits, a constant.
        number_format: the weight's format.
        scales: its scales (N,).
        gate: (N,), multiplied to the weight; None for none.
    """

    rows: RoundedRows
    weight: ir.Value
    number_format: EightBits
    scales: ir.Value
    gate: ir.Value | None = None


def rounded_matmul(x: ir.Value | None, weight: ir.Value | None) -> RoundedMatMul | None:
    """Return the factors of x @ weight if both are rounded to 8 bits, None otherwise."""
    rows = _rounded_rows(x)
    weight, gate = _gated(weight)
    turned = producer_of(weight, "Transpose")
    restored = producer_of(weight if turned is None else turned.inputs[0], "DequantizeLinear")
    if rows is None or restored is None or turned is None or tuple(turned.attributes.get_ints("perm", [])) != (1, 0):
        return None
    stored, scales = restored.inputs[:2]
    number_format = None if stored is None or stored.dtype is None else _FORMATS.get(stored.dtype)
    if stored is None or not is_weight(stored) or number_format is None:
        return None
    if scales is None or len(dims(scales) or ()) != 1:
        return None
    return RoundedMatMul(rows, stored, number_format, scales, gate)


def rounded_projections(node: ir.Node) -> list[RoundedMatMul]:
    """Return the matmuls of one sequence that MultiHeadAttention reads, if all three are rounded alike; else none."""
    matmuls = [producer_of(optional_input(node, index), "MatMul") for index in range(3)]
    found = [None if each is None else rounded_matmul(each.inputs[0], each.inputs[1]) for each in matmuls]
    parts = [each for each in found if each is not None and each.gate is None]
    kinds = {(each.rows, each.number_format, dims(each.weight)) for each in parts}
    return parts if len(parts) == 3 and len(kinds) == 1 else []


def _gated(weight: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """Return a weight and the gate that is multiplied to it, (weight, None) without one."""
    product = producer_of(weight, "Mul")
    if product is None:
        return weight, None
    for factor, gate in both_orders(product):
        sizes = dims(factor) if producer_of(factor, "Transpose") is not None and factor is not None else None
        if gate is not None and sizes is not None and dims(gate) == sizes[1:]:
            return factor, gate
    return weight, None


def _rounded_rows(value: ir.Value | None) -> RoundedRows | None:
    """Return the activations that a value restores from 8 bits, as `sdonnx.quantization` writes them."""
    return _rounded_by_scale(value) or _rounded_by_rows(value)


def _rounded_by_scale(value: ir.Value | None) -> RoundedRows | None:
    restored = producer_of(value, "DequantizeLinear")
    stored = _before(restored, "QuantizeLinear")
    if restored is None or stored is None or list(restored.inputs[1:]) != list(stored.inputs[1:]):
        return None
    source, scale = stored.inputs[:2]
    number_format = _FORMATS.get(dtype_of(stored.outputs[0]))
    if source is None or scale is None or number_format is None or not is_weight(scale) or dims(scale) != ():
        return None
    return RoundedRows(source, number_format, scale)


def _rounded_by_rows(value: ir.Value | None) -> RoundedRows | None:
    """Cast(round(x / scale) * scale), where a scale is the largest magnitude of its row times a constant."""
    cast = producer_of(value, "Cast")
    product = _before(cast, "Mul")
    if product is None:
        return None
    narrow, scale = product.inputs
    rounding, number_format = producer_of(narrow, "Round"), EightBits.INT8
    if rounding is None:
        stored = _before(producer_of(narrow, "Cast"), "Cast")
        found = None if stored is None else _FORMATS.get(dtype_of(stored.outputs[0]))
        if stored is None or found is None:
            return None
        rounding, number_format = stored, found
    quotient = _before(rounding, "Div")
    limited = producer_of(scale, "Max")
    scaled = _before(limited, "Mul")
    most = _before(scaled, "ReduceMax")
    sizes = _before(most, "Abs")
    if quotient is None or most is None or sizes is None or quotient.inputs[1] is not scale:
        return None
    wide = producer_of(quotient.inputs[0], "Cast")
    source = None if wide is None else wide.inputs[0]
    axes, rank = constant_value(optional_input(most, 1)), len(dims(sizes.outputs[0]) or ())
    if wide is None or source is None or sizes.inputs[0] is not wide.outputs[0] or axes is None:
        return None
    return RoundedRows(source, number_format, None) if axes.tolist() == [rank - 1] else None


def _before(node: ir.Node | None, op_type: str) -> ir.Node | None:
    """Return the node that computes the first input of another, if it is this standard operator."""
    return None if node is None else producer_of(node.inputs[0], op_type)
