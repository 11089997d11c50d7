"""sdonnx::QuantizeRows, LayerNormRows, SplitGeluRows and SumRows: rows in 8 bits, with a scale for each.

QuantizeRows(x (...,K), scale ()) -> (q (...,K) uint8, scales (...,1) float32). A scale is the largest magnitude of its
row divided by the format's largest value, and at least 1e-12; with `scale`, all rows have that one. LayerNormRows(x,
gamma, beta, scale) and SplitGeluRows(x (...,2D), bias, scale) quantize a layer norm, and a * gelu(b) with
a, b = split(x + bias), which are not rounded to fp16 before. SumRows(x, x_scales (...,1) float32, w_scales (C,)
float32, bias, residual, gamma, beta, scale) has a third output in fp16:
sum = x * x_scales * w_scales * 2^exponent + bias + residual. It quantizes the layer norm of the sum, or the sum if
there is no gamma; neither is rounded to fp16 before. beta, bias, gamma and scale are optional. The kernels are in
kernels/src/rows.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, graph_of, input_of, insert, insert_multi, optional_input, static_dim
from sdonnx.operators.contract import SdonnxContract, sdonnx_case
from sdonnx.operators.kernel_case import Fill, KernelCase
from sdonnx.operators.sdonnx_domain.matmul_8bit import EightBits, encoded

__all__ = ["LAYER_NORM_ROWS", "QUANTIZE_ROWS", "SPLIT_GELU_ROWS", "SUM_ROWS", "check_rows"]

_FLOAT = ir.DataType.FLOAT
_MIN_SCALE = 1e-12
_MAX_WIDTH = 5120  # kMaxRowWidth


def check_rows(x: ir.Value, width: int | None) -> str | None:
    """Return why the kernels do not accept rows of x, of which `width` numbers are quantized, None if they do."""
    if width is None or width % 16 or not 0 < width <= _MAX_WIDTH:
        return f"rows of {width} numbers: the kernel accepts multiples of 16 up to {_MAX_WIDTH}"
    return QUANTIZE_ROWS.check_dtype(x)


def _quantized(node: ir.Node, wide: ir.Value, scale: ir.Value | None) -> list[ir.Value | None]:
    """Return the patterns and the scales of the rows of a value in float32."""
    graph, number_format = graph_of(node), EightBits(node.attributes.get_int("format", 0))
    last = constant(graph, [-1], np.int64, "integers_m1")
    most = insert(node, "ReduceMax", [insert(node, "Abs", [wide], shape=wide.shape), last], {"keepdims": 1})
    factor = constant(graph, 1 / number_format.max_value, np.float32, f"factor_{number_format.name.lower()}")
    limit = constant(graph, _MIN_SCALE, np.float32, "min_scale")
    scales = insert(node, "Max", [insert(node, "Mul", [most, factor]), limit])
    if scale is not None:
        given = _wide(node, scale)
        scales = insert(node, "Add", [insert(node, "Sub", [scales, scales]), given])
    return [encoded(node, insert(node, "Div", [wide, scales]), number_format), scales]


def _wide(node: ir.Node, value: ir.Value) -> ir.Value:
    return insert(node, "Cast", [value], {"to": _FLOAT}, dtype=_FLOAT, shape=value.shape)


def _lower_plain(node: ir.Node) -> list[ir.Value | None]:
    return _quantized(node, _wide(node, input_of(node, 0)), optional_input(node, 1))


def _lower_norm(node: ir.Node) -> list[ir.Value | None]:
    weights = [None if value is None else _wide(node, value) for value in node.inputs[1:3]]
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    wide = insert(node, "LayerNormalization", [_wide(node, input_of(node, 0)), *weights], attributes)
    return _quantized(node, wide, optional_input(node, 3))


def _lower_split_gelu(node: ir.Node) -> list[ir.Value | None]:
    total = _wide(node, input_of(node, 0))
    if (bias := optional_input(node, 1)) is not None:
        total = insert(node, "Add", [total, _wide(node, bias)])
    values, gates = insert_multi(node, "Split", [total], {"axis": -1, "num_outputs": 2}, 2)
    wide = insert(node, "Mul", [values, insert(node, "Gelu", [gates])])
    return _quantized(node, wide, optional_input(node, 2))


def _lower_sum(node: ir.Node) -> list[ir.Value | None]:
    graph, dtype = graph_of(node), node.outputs[2].dtype or ir.DataType.FLOAT16
    exponent = node.attributes.get_int("exponent", 0)
    power = constant(graph, 2.0**exponent, np.float32, f"two_to_{exponent}")
    total = _wide(node, input_of(node, 0))
    for factor in (input_of(node, 1), power, input_of(node, 2)):
        total = insert(node, "Mul", [total, factor])
    for index in (3, 4):
        if (term := optional_input(node, index)) is not None:
            total = insert(node, "Add", [total, _wide(node, term)])
    wide = total
    if optional_input(node, 5) is not None:
        weights = [None if value is None else _wide(node, value) for value in node.inputs[5:7]]
        attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
        wide = insert(node, "LayerNormalization", [total, *weights], attributes)
    rounded = insert(node, "Cast", [total], {"to": dtype}, dtype=dtype, shape=input_of(node, 0).shape)
    return [*_quantized(node, wide, optional_input(node, 7)), rounded]


def _plain_limits(node: ir.Node) -> str | None:
    x = input_of(node, 0)
    return check_rows(x, static_dim(x, -1))


def _sum_limits(node: ir.Node) -> str | None:
    if optional_input(node, 5) is None and optional_input(node, 6) is not None:
        return "a beta needs a gamma"
    return _plain_limits(node)


def _split_limits(node: ir.Node) -> str | None:
    width = static_dim(input_of(node, 0), -1)
    return check_rows(input_of(node, 0), None if width is None else width // 2)


_SIZES = ((3, 7, 320), (1, 1, 16), (2, 5, 1152), (2, 5, 2560), (1, 13, 2560), (1, 3, 5120), (2, 65, 64))


def _cases(op_type: str, weights: int, doubled: bool) -> Callable[[], Iterator[KernelCase]]:
    def cases() -> Iterator[KernelCase]:
        forms = [(size, EightBits.E4M3, False) for size in _SIZES]
        forms += [((3, 7, 320), number_format, True) for number_format in EightBits]
        forms += [((3, 7, 320), EightBits.INT8, False), ((3, 7, 320), EightBits.E5M2, False)]
        for (batch, rows, width), number_format, has_scale in forms:
            columns = 2 * width if doubled else width
            yield sdonnx_case(
                op_type,
                f"{batch}x{rows}x{width} {number_format.name.lower()} scale={has_scale}",
                ((batch, rows, columns), *(((columns,),) * weights), () if has_scale else None),
                {"format": int(number_format)},
                outputs=2,
                fills={1 + weights: Fill.SCALES} if has_scale else {},
            )

    return cases


def _sum_cases() -> Iterator[KernelCase]:
    e4m3 = EightBits.E4M3
    # bias, norm, beta, scale
    forms = [(size, e4m3, (True, True, True, False)) for size in _SIZES]
    forms += [((3, 7, 320), number_format, (True, True, True, True)) for number_format in EightBits]
    for parts in ((False, True, True), (True, True, False), (True, False, False), (False, False, False)):
        forms.append(((3, 7, 320), e4m3, (*parts, False)))
    forms += [(size, e4m3, (True, False, False, False)) for size in ((2, 5, 1152), (1, 3, 5120))]
    for (batch, rows, width), number_format, (has_bias, has_norm, has_beta, has_scale) in forms:
        sizes = f"{batch}x{rows}x{width} {number_format.name.lower()}"
        columns = (width,)
        yield sdonnx_case(
            "SumRows",
            f"{sizes} bias={has_bias} norm={has_norm} beta={has_beta} scale={has_scale}",
            (
                (batch, rows, width),
                (batch, rows, 1),
                columns,
                columns if has_bias else None,
                (batch, rows, width),
                columns if has_norm else None,
                columns if has_beta else None,
                () if has_scale else None,
            ),
            {"format": int(number_format), "exponent": 14},
            outputs=3,
            fills={1: Fill.SCALES, 2: Fill.SCALES, **({7: Fill.SCALES} if has_scale else {})},
        )


def _contract(
    op_type: str,
    lower: Callable[[ir.Node], list[ir.Value | None]],
    limits: Callable[[ir.Node], str | None],
    weights: int,
    *,
    doubled: bool = False,
) -> SdonnxContract:
    return SdonnxContract(
        op_type,
        lower,
        _cases(op_type, weights, doubled),
        first_use=("3x7x320 e4m3 scale=False", "3x7x320 e4m3 scale=True", "2x5x2560 e4m3 scale=False"),
        limits=limits,
        other_outputs=_OUTPUTS,
    )


_OUTPUTS = {0: (ir.DataType.UINT8, 3), 1: (_FLOAT, 3)}


QUANTIZE_ROWS = _contract("QuantizeRows", _lower_plain, _plain_limits, 0)
LAYER_NORM_ROWS = _contract("LayerNormRows", _lower_norm, _plain_limits, 2)
SPLIT_GELU_ROWS = _contract("SplitGeluRows", _lower_split_gelu, _split_limits, 1, doubled=True)
SUM_ROWS = SdonnxContract(
    "SumRows",
    _lower_sum,
    _sum_cases,
    first_use=(
        "3x7x320 e4m3 bias=True norm=True beta=True scale=False",
        "3x7x320 e4m3 bias=True norm=False beta=False scale=False",
    ),
    limits=_sum_limits,
    float32_inputs=frozenset({1, 2}),
    other_outputs=_OUTPUTS,
    row_inputs=frozenset({0, 1, 4}),
)
