"""Replacements of products whose factors are rounded to 8 bits by products of 8-bit factors.

`sdonnx.quantization` writes both factors as values in 8 bits that are restored: activations by rows or by a constant
scale, the weight by DequantizeLinear and a Transpose. Here the factors stay in 8 bits, and the product is scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.fusions.own_nodes import has_one_reader
from sdonnx.graph.edit import (
    add_initializer,
    constant_value,
    dims,
    dtype_of,
    input_of,
    insert,
    insert_multi,
    is_weight,
    replace,
    static_dim,
    tensor_of,
)
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, Refused, WalkResult, producer_of
from sdonnx.operators.case import OWN_DOMAIN
from sdonnx.operators.eight_bits import EightBits
from sdonnx.operators.own_rows import check_rows
from sdonnx.operators.own_scaled_mat_mul import check_own_scaled_mat_mul
from sdonnx.operators.reference_body import graph_of, optional_input

__all__ = ["RoundedProduct", "rounded_product", "rows_of_source", "scaled_product"]

_FLOAT, _UINT8 = ir.DataType.FLOAT, ir.DataType.UINT8
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
class RoundedProduct:
    """The factors of a product that are rounded to 8 bits.

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


def rounded_product(x: ir.Value | None, weight: ir.Value | None) -> RoundedProduct | None:
    """Return the factors of x @ weight if both are rounded to 8 bits, None otherwise."""
    rows = _rounded_rows(x)
    weight, gate = _gated(weight)
    turned = producer_of(weight, "Transpose")
    restored = producer_of(weight if turned is None else turned.inputs[0], "DequantizeLinear")
    if rows is None or restored is None or turned is None or tuple(turned.attributes.get_ints("perm", [])) != (1, 0):
        return None
    stored, scales = restored.inputs[:2]
    number_format = None if stored is None or stored.dtype is None else _FORMATS.get(stored.dtype)
    if stored is None or scales is None or number_format is None or len(dims(scales) or ()) != 1:
        return None
    return RoundedProduct(rows, stored, number_format, scales, gate)


def _gated(weight: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """Return a weight and the gate that is multiplied to it, (weight, None) without one."""
    product = producer_of(weight, "Mul")
    if product is None:
        return weight, None
    for factor, gate in (tuple(product.inputs), tuple(reversed(product.inputs))):
        if producer_of(factor, "Transpose") is not None and gate is not None and len(dims(gate) or ()) == 1:
            return factor, gate
    return weight, None


def scaled_product(
    node: ir.Node,
    like: ir.Value,
    product: RoundedProduct,
    bias: ir.Value | None,
    residual: ir.Value | None,
    gelu: int,
) -> ir.Value | str:
    """Return the result of ScaledMatMul, which is inserted before `node`, or why the kernel does not accept it.

    Args:
        node: the node before which to insert nodes.
        like: a value of the shape and type of the result.
        product: the factors.
        bias: (N,); None for none.
        residual: of the shape of the product; None for none.
        gelu: 1 to apply gelu (tanh), 0 not to.
    """
    rows, graph = product.rows, graph_of(node)
    reason = check_rows(rows.source, static_dim(rows.source, -1)) or check_own_scaled_mat_mul(product.weight, bias)
    if reason is not None:
        return reason
    q, scales = _quantized(node, rows)
    stored, name = product.weight, f"{product.weight.name}.bits"
    bits = graph.initializers.get(name) or add_initializer(graph, name, _as_bits(tensor_of(stored)))
    factors = insert(node, "Cast", [product.scales], {"to": _FLOAT}, dtype=_FLOAT, shape=product.scales.shape)
    if product.gate is not None:
        gate = insert(node, "Cast", [product.gate], {"to": _FLOAT}, dtype=_FLOAT, shape=product.gate.shape)
        factors = insert(node, "Mul", [factors, gate], shape=factors.shape)
    inputs = [q, scales, bits, factors, bias, residual]
    while inputs[-1] is None:
        inputs.pop()
    attributes = {"x_format": int(rows.number_format), "w_format": int(product.number_format), "gelu": gelu}
    return insert(node, "ScaledMatMul", inputs, attributes, domain=OWN_DOMAIN, shape=like.shape, dtype=like.dtype)


def rows_of_source(node: ir.Node, _: object) -> WalkResult:
    """QuantizeRows(LayerNorm(x)) -> LayerNormRows(x); QuantizeRows(BiasSplitGelu(x)) -> SplitGeluRows(x)."""
    source = input_of(node, 0)
    maker, scale = source.producer(), optional_input(node, 1)
    if maker is None or maker.domain != OWN_DOMAIN or not has_one_reader(source):
        return NOT_A_CANDIDATE
    if maker.op_type not in ("LayerNorm", "BiasSplitGelu"):
        return NOT_A_CANDIDATE
    if (reason := check_rows(input_of(maker, 0), static_dim(source, -1))) is not None:
        return Refused(reason)
    norm = maker.op_type == "LayerNorm"
    count = 3 if norm else 2
    inputs = [optional_input(maker, index) for index in range(count)] + [scale]
    while inputs[-1] is None:
        inputs.pop()
    attributes: dict[str, int | float] = {"format": node.attributes.get_int("format", 0)}
    if norm:
        attributes["epsilon"] = maker.attributes.get_float("epsilon", 1e-5)
    made = insert_multi(
        node, "LayerNormRows" if norm else "SplitGeluRows", inputs, attributes, 2, domain=OWN_DOMAIN,
        shapes=[output.shape for output in node.outputs],
    )  # fmt: skip
    for old, new in zip(node.outputs, made, strict=True):
        new.type = old.type
        replace(old, new)
    return REWRITTEN


def _quantized(node: ir.Node, rows: RoundedRows) -> tuple[ir.Value, ir.Value]:
    """Return the bits and the scales of activations, of one node for all products that read them."""
    scales = [] if rows.scale is None else [rows.scale]
    for use in rows.source.uses():
        other = use.node
        is_same = (other.domain, other.op_type, use.idx) == (OWN_DOMAIN, "QuantizeRows", 0)
        if is_same and other.attributes.get_int("format") == rows.number_format and list(other.inputs[1:]) == scales:
            return other.outputs[0], other.outputs[1]
    shape = dims(rows.source) or ()
    attributes = {"format": int(rows.number_format)}
    q, factors = insert_multi(
        node, "QuantizeRows", [rows.source, *scales], attributes, 2, domain=OWN_DOMAIN, shapes=[shape, [*shape[:-1], 1]]
    )
    q.type, factors.type = ir.TensorType(_UINT8), ir.TensorType(_FLOAT)
    return q, factors


def _as_bits(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return the bytes of a tensor in 8 bits as uint8, without a copy of those in a file."""
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            tensor.location, tensor.offset, tensor.length, _UINT8, shape=tensor.shape, name=tensor.name or "",
            base_dir=tensor.base_dir,
        )  # fmt: skip
    return ir.Tensor(tensor.numpy().view("uint8"))


def _rounded_rows(value: ir.Value | None) -> RoundedRows | None:
    """Return the activations that a value restores from 8 bits, as `sdonnx.quantization` writes them."""
    return _rounded_by_scale(value) or _rounded_by_rows(value)


def _rounded_by_scale(value: ir.Value | None) -> RoundedRows | None:
    restored = producer_of(value, "DequantizeLinear")
    stored = producer_of(None if restored is None else restored.inputs[0], "QuantizeLinear")
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
    product = producer_of(None if cast is None else cast.inputs[0], "Mul")
    if product is None:
        return None
    narrow, scale = product.inputs
    rounding, number_format = producer_of(narrow, "Round"), EightBits.INT8
    if rounding is None:
        stored = producer_of(_source_of(producer_of(narrow, "Cast")), "Cast")
        found = None if stored is None else _FORMATS.get(dtype_of(stored.outputs[0]))
        if stored is None or found is None:
            return None
        rounding, number_format = stored, found
    quotient = producer_of(_source_of(rounding), "Div")
    limited = producer_of(scale, "Max")
    scaled = producer_of(_source_of(limited), "Mul")
    most = producer_of(_source_of(scaled), "ReduceMax")
    sizes = producer_of(_source_of(most), "Abs")
    if quotient is None or most is None or sizes is None or quotient.inputs[1] is not scale:
        return None
    wide = producer_of(quotient.inputs[0], "Cast")
    source = _source_of(wide)
    axes, rank = constant_value(optional_input(most, 1)), len(dims(sizes.outputs[0]) or ())
    if wide is None or source is None or sizes.inputs[0] is not wide.outputs[0] or axes is None:
        return None
    return RoundedRows(source, number_format, None) if axes.tolist() == [rank - 1] else None


def _source_of(node: ir.Node | None) -> ir.Value | None:
    return None if node is None else node.inputs[0]
