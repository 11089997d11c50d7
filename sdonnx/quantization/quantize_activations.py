"""Round activations to 8 bits in front of matmuls: x -> the values of x in an 8-bit format, times their scale.

The result has the type of x. Standard operators compute it, so that a graph runs everywhere and with the numbers that a
matmul of 8-bit factors has; `sdonnx.fusions.sdonnx_domain.rounded_matmul` finds these operators.

A scale is the largest magnitude divided by the format's largest value, and at least MIN_SCALE.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, dtype_of, insert
from sdonnx.quantization.quantization_types import NumberFormat

__all__ = ["MIN_SCALE", "rounded_along", "rounded_by_rows", "rounded_by_scale"]

MIN_SCALE = 1e-12
"""The smallest scale that is computed at run time, for rows of zeros (torchao's value)."""

_FLOAT = ir.DataType.FLOAT


def rounded_by_rows(anchor: ir.Node, x: ir.Value, number_format: NumberFormat, per_tensor: bool) -> ir.Value:
    """Return x (...,K) in an 8-bit format, restored, with scales that are computed from its values.

    Args:
        anchor: the node before which to insert the nodes.
        x: the activations, float32 or float16.
        number_format: the format.
        per_tensor: whether all of x has one scale; otherwise each row has one.
    """
    rank = len(dims(x) or ())
    return rounded_along(anchor, x, number_format, range(rank) if per_tensor else [rank - 1])


def rounded_along(anchor: ir.Node, x: ir.Value, number_format: NumberFormat, axes: Sequence[int]) -> ir.Value:
    """Return x in an 8-bit format, restored, with a scale for all numbers that differ only in their place along axes.

    Args:
        anchor: the node before which to insert the nodes.
        x: the activations or a weight, float32 or float16.
        number_format: the format.
        axes: the axes.
    """
    graph, dtype, shape = anchor.graph, dtype_of(x), x.shape
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"{anchor.name!r} is not in a graph")
    name = f"quantize_{number_format.name}"
    wide = x if dtype == _FLOAT else insert(anchor, "Cast", [x], {"to": _FLOAT}, dtype=_FLOAT, shape=shape)
    sizes = insert(anchor, "Abs", [wide], shape=shape)
    kept = [1 if axis in axes else size for axis, size in enumerate(dims(x) or ())]
    along = constant(graph, list(axes), np.int64, "integers_" + "_".join(map(str, axes)))
    most = insert(anchor, "ReduceMax", [sizes, along], {"keepdims": 1}, shape=kept)
    factor = constant(graph, 1 / number_format.max_value, np.float32, f"{name}_factor")
    limit = constant(graph, MIN_SCALE, np.float32, "quantize_min_scale")
    scale = insert(anchor, "Max", [insert(anchor, "Mul", [most, factor], shape=kept), limit], shape=kept)
    quotient = insert(anchor, "Div", [wide, scale], shape=shape)
    if number_format.dtype == ir.DataType.INT8:
        narrow = insert(anchor, "Round", [quotient], shape=shape)
    else:
        stored = insert(anchor, "Cast", [quotient], {"to": number_format.dtype}, dtype=number_format.dtype, shape=shape)
        narrow = insert(anchor, "Cast", [stored], {"to": _FLOAT}, dtype=_FLOAT, shape=shape)
    restored = insert(anchor, "Mul", [narrow, scale], shape=shape)
    return restored if dtype == _FLOAT else insert(anchor, "Cast", [restored], {"to": dtype}, dtype=dtype, shape=shape)


def rounded_by_scale(anchor: ir.Node, x: ir.Value, number_format: NumberFormat, scale: float) -> ir.Value:
    """Return x in an 8-bit format, restored, with one constant scale: QuantizeLinear and DequantizeLinear.

    Args:
        anchor: the node before which to insert the nodes.
        x: the activations, float32 or float16.
        number_format: the format.
        scale: the scale, which the type of x can represent.
    """
    graph, dtype = anchor.graph, dtype_of(x)
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"{anchor.name!r} is not in a graph")
    step = constant(graph, scale, dtype.numpy(), f"scale_{scale:.9g}_{dtype.name.lower()}")
    # Some readers of fp8 graphs, TensorRT among them, take the format from the zero point.
    zero = constant(graph, 0, number_format.dtype.numpy(), f"zero_{number_format.name}")
    stored = insert(anchor, "QuantizeLinear", [x, step, zero], dtype=number_format.dtype, shape=x.shape)
    return insert(anchor, "DequantizeLinear", [stored, step, zero], dtype=dtype, shape=x.shape)
