"""The rules of ScaledMatMul, QuantizeRows, LayerNormRows, SplitGeluRows and SumRows.

They replace matmuls of factors that are rounded to 8 bits (`rounded_matmul`).

The factors stay in 8 bits, and the result is scaled. `matmul_rules` calls `scaled_matmul` for single matmuls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from sdonnx.fusions.sdonnx_domain.norm_rules import STATISTICS_ARE_READ
from sdonnx.fusions.sdonnx_domain.replacement import is_read, replace_by, without_absent
from sdonnx.fusions.sdonnx_domain.rounded_matmul import RoundedMatMul, RoundedRows, rounded_matmul, rounded_projections
from sdonnx.graph.edit import (
    add_initializer,
    dims,
    graph_of,
    input_of,
    insert,
    insert_multi,
    is_weight,
    known_dims,
    optional_input,
    replace,
    required,
    static_dim,
    tensor_of,
)
from sdonnx.graph.match import (
    NOT_A_CANDIDATE,
    REWRITTEN,
    Refused,
    WalkResult,
    ancestors,
    has_one_reader,
    producer_of,
    same_shape,
)
from sdonnx.graph.tensors import read, stacked_tensor
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.operators.sdonnx_domain.attention import check_heads
from sdonnx.operators.sdonnx_domain.matmul_8bit import EightBits, check_scaled_mat_mul
from sdonnx.operators.sdonnx_domain.quantized_rows import check_rows

__all__ = ["rows_of_source", "rows_of_sum", "scaled_matmul", "scaled_self_attention", "scaled_skip_layer_norm"]

_FLOAT, _UINT8 = ir.DataType.FLOAT, ir.DataType.UINT8


def scaled_matmul(
    node: ir.Node,
    like: ir.Value,
    matmul: RoundedMatMul,
    bias: ir.Value | None,
    residual: ir.Value | None,
    gelu: int,
) -> ir.Value | str:
    """Return the result of ScaledMatMul, which is inserted before `node`, or why the kernel does not accept it.

    Args:
        node: the node before which to insert nodes.
        like: a value of the shape and type of the result.
        matmul: the factors.
        bias: (N,); None for none.
        residual: of the shape of the matmul; None for none.
        gelu: 1 to apply gelu (tanh), 0 not to.
    """
    rows, graph = matmul.rows, graph_of(node)
    reason = check_rows(rows.source, static_dim(rows.source, -1)) or check_scaled_mat_mul(matmul.weight, bias)
    if reason is not None:
        return reason
    q, scales = _quantized(node, rows)
    stored, name = matmul.weight, f"{matmul.weight.name}.bits"
    bits = graph.initializers.get(name) or add_initializer(graph, name, _as_bits(tensor_of(stored)))
    inputs = without_absent(q, scales, bits, _column_scales(node, matmul), bias, residual)
    attributes = {"x_format": int(rows.number_format), "w_format": int(matmul.number_format), "gelu": gelu}
    return insert(node, "ScaledMatMul", inputs, attributes, domain=OUR_DOMAIN, shape=like.shape, dtype=like.dtype)


def scaled_skip_layer_norm(node: ir.Node, _: object) -> WalkResult:
    """SkipLayerNormalization(x @ w, skip, ...) -> a scaled matmul with a bias and a residual, and LayerNormalization.

    The norm can then write 8 bits, which the kernels of SkipLayerNormalization cannot.
    """
    for value, skip in ((input_of(node, 0), input_of(node, 1)), (input_of(node, 1), input_of(node, 0))):
        matmul = producer_of(value, "MatMul")
        if matmul is None or not has_one_reader(value):
            continue
        rounded = rounded_matmul(matmul.inputs[0], matmul.inputs[1])
        if rounded is None:
            continue
        if is_read(node.outputs[1:3]):
            return Refused(STATISTICS_ARE_READ)
        if not same_shape(value, skip):
            return Refused("the skip is not known to have the shape of the matmul")
        total = scaled_matmul(node, value, rounded, optional_input(node, 4), skip, gelu=0)
        if isinstance(total, str):
            return Refused(total)
        inputs = [total, input_of(node, 2), optional_input(node, 3)]
        attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-12)}
        replace(node.outputs[0], insert(node, "LayerNormalization", inputs, attributes, shape=total.shape))
        if len(node.outputs) > 3:
            replace(node.outputs[3], total)
        return REWRITTEN
    return NOT_A_CANDIDATE


def scaled_self_attention(node: ir.Node, heads: int, scale: float) -> WalkResult:
    """MultiHeadAttention(x @ q, x @ k, x @ v) of factors in 8 bits -> SelfAttention(x @ qkv), by one matmul.

    The weights are stored as (N,K), so that three of them behind one another are one of (3N,K).
    """
    values = [optional_input(node, index) for index in range(3)]
    parts = rounded_projections(node)
    if not parts or not all(map(has_one_reader, values)):
        return NOT_A_CANDIDATE
    first, result = parts[0], input_of(node, 0)
    width, inner = (static_dim(first.weight, axis) for axis in range(2))
    if width is None or inner is None or len(dims(result) or ()) != 3:
        return NOT_A_CANDIDATE
    reason = check_heads([width], heads, scale) or check_rows(first.rows.source, inner)
    if reason is not None or (reason := check_scaled_mat_mul(first.weight, None)) is not None:
        return Refused(reason)
    tensor = stacked_tensor([tensor_of(each.weight) for each in parts], [3 * width, inner])
    if tensor is None:
        return Refused("the weights of queries, keys and values are not behind one another in the file")
    weight = add_initializer(graph_of(node), f"{first.weight.name}.and_2_more", tensor)
    factors = _joined_scales(node, [each.scales for each in parts])
    like = ir.Value(shape=ir.Shape([*known_dims(result)[:2], 3 * width]), type=result.type)
    together = RoundedMatMul(first.rows, weight, first.number_format, factors)
    qkv = scaled_matmul(node, like, together, None, None, gelu=0)
    if isinstance(qkv, str):
        return Refused(qkv)
    replace_by(node, node.outputs[:1], "SelfAttention", [qkv], {"num_heads": heads, "scale": scale})
    return REWRITTEN


def _quantized(node: ir.Node, rows: RoundedRows) -> tuple[ir.Value, ir.Value]:
    """Return the bits and the scales of activations, of one node for all matmuls that read them."""
    scales = [] if rows.scale is None else [rows.scale]
    for use in rows.source.uses():
        other = use.node
        is_same = (other.domain, other.op_type, use.idx) == (OUR_DOMAIN, "QuantizeRows", 0)
        if is_same and other.attributes.get_int("format") == rows.number_format and list(other.inputs[1:]) == scales:
            return other.outputs[0], other.outputs[1]
    shape = dims(rows.source) or ()
    attributes = {"format": int(rows.number_format)}
    q, factors = insert_multi(
        node,
        "QuantizeRows",
        [rows.source, *scales],
        attributes,
        2,
        domain=OUR_DOMAIN,
        shapes=[shape, [*shape[:-1], 1]],
    )
    q.type, factors.type = ir.TensorType(_UINT8), ir.TensorType(_FLOAT)
    return q, factors


def _column_scales(node: ir.Node, matmul: RoundedMatMul) -> ir.Value:
    """Return the scales of columns in float32, times the gate if there is one.

    Without a gate they are an initializer: ONNX Runtime would fold a Cast, and another adapter could not replace the
    result in a loaded session.
    """
    if matmul.gate is None and is_weight(matmul.scales):
        graph, name = graph_of(node), f"{matmul.scales.name}.float32"
        values = read(tensor_of(matmul.scales)).astype("float32")
        return graph.initializers.get(name) or add_initializer(graph, name, ir.Tensor(values))
    factors = insert(node, "Cast", [matmul.scales], {"to": _FLOAT}, dtype=_FLOAT, shape=matmul.scales.shape)
    if matmul.gate is None:
        return factors
    gate = insert(node, "Cast", [matmul.gate], {"to": _FLOAT}, dtype=_FLOAT, shape=matmul.gate.shape)
    return insert(node, "Mul", [factors, gate], shape=factors.shape)


def _joined_scales(node: ir.Node, parts: Sequence[ir.Value]) -> ir.Value:
    """Return scales behind one another."""
    if not all(is_weight(part) for part in parts):
        return insert(node, "Concat", parts, {"axis": 0}, shape=[sum(required(static_dim(part, 0)) for part in parts)])
    values = np.concatenate([read(tensor_of(part)) for part in parts])
    return add_initializer(graph_of(node), f"{parts[0].name}.and_{len(parts) - 1}_more", ir.Tensor(values))


def _as_bits(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return the bytes of a tensor in 8 bits as uint8, without a copy of those in a file."""
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            tensor.location, tensor.offset, tensor.length, _UINT8, shape=tensor.shape, name=tensor.name or "",
            base_dir=tensor.base_dir,
        )  # fmt: skip
    return ir.Tensor(tensor.numpy().view("uint8"))


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
