"""BiasSplitGelu, ConcatChannels and UpsampleNearest of the domain sdonnx: elementwise, or copies of elements.

BiasSplitGelu(x (...,2D), bias (2D,)): a, b = split(x + bias) -> a * gelu(b) (...,D); Shazeer 2020.

ONNX Runtime's operator of this name has kernels for five widths (`bias_split_gelu.py`); this one has no list of widths,
and the bias is optional. The kernel is kernels/src/bias_split_gelu.cuh.

ConcatChannels(x (...,A), y (...,B), bias_x (A,), bias_y (B,)): concat(x + bias_x, y + bias_y) (...,A+B).

The first axis of y divides x's: y is appended to each copy. The biases are optional. A sum is computed in float32
and rounded once to fp16; numbers without a bias are copied bit by bit. The kernel is kernels/src/concat_channels.cuh.

UpsampleNearest(x (B,H,W,C), sizes (4,)): y (B,H',W',C) with y[b,i,j] = x[b,i/2,j/2].

H' is 2H or 2H - 1, and W' is 2W or 2W - 1: sizes that a convolution with a stride of 2 halves to H and W. `sizes`,
int64, is the shape of y; without it, both are doubled. Numbers are copied bit by bit.

Resize with the mode nearest, asymmetric coordinates and floor computes the same: with H' = 2H - 1 it reads the row
floor(i H / (2H - 1)) = floor(i/2 + i / (4H - 2)); the last term is less than 1/2. The kernel is
kernels/src/upsample_nearest.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, graph_of, input_of, insert, insert_multi, optional_input, static_dim
from sdonnx.operators.contract import SdonnxContract, copied_rows, on_inputs, sdonnx_case
from sdonnx.operators.kernel_case import Fill, KernelCase

__all__ = [
    "BIAS_SPLIT_GELU",
    "CONCAT_CHANNELS",
    "UPSAMPLE_NEAREST",
    "check_bias_split_gelu",
    "check_concat_channels",
    "check_upsample_nearest",
]


def check_bias_split_gelu(x: ir.Value, bias: ir.Value | None) -> str | None:
    """Return why the kernel does not accept x (...,2D) and a bias (2D,), None if it does.

    A thread computes eight columns, so D is a multiple of 8.
    """
    width = static_dim(x, -1) if bias is None else static_dim(bias, 0)
    if width is None or width % 16:
        return f"the width {width}: the kernel accepts multiples of 16"
    if bias is not None and bias.shape is not None and bias.shape.rank() != 1:
        return "the bias is not a vector"
    return BIAS_SPLIT_GELU.check_dtypes(x, bias)


def _lower_bias_split_gelu(node: ir.Node) -> list[ir.Value | None]:
    x, bias = input_of(node, 0), optional_input(node, 1)
    total = x if bias is None else insert(node, "Add", [x, bias])
    value, gate = insert_multi(node, "Split", [total], {"axis": -1, "num_outputs": 2}, 2)
    return [insert(node, "Mul", [value, insert(node, "Gelu", [gate])])]


def _bias_split_gelu_cases() -> Iterator[KernelCase]:
    # One vector; blocks of 128, 160 and 256 threads, whole and not; widths with and without a kernel of ONNX Runtime.
    widths = (16, 80, 512, 2048, 2560, 3072, 4096, 5120, 10240)
    cases = [*product(widths, ((3, 7),), (True,)), *product((80, 2560), ((1, 1), (2, 3, 5)), (False, True))]
    cases += [(64, rows, True) for rows in ((1, 1023), (1, 1024), (1, 1027), (32, 33))]
    for width, rows, has_bias in cases:
        name = f"D={width} {'x'.join(map(str, rows))} bias={has_bias}"
        shapes = ((*rows, width), (width,) if has_bias else None)
        yield sdonnx_case("BiasSplitGelu", name, shapes)
    yield sdonnx_case("BiasSplitGelu", "D=2560 0 rows", ((2, 0, 2560), (2560,)))


BIAS_SPLIT_GELU = SdonnxContract(
    "BiasSplitGelu",
    _lower_bias_split_gelu,
    _bias_split_gelu_cases,
    first_use=("D=2560 3x7 bias=True", "D=64 1x1027 bias=True"),
    limits=on_inputs(check_bias_split_gelu, 0, 1),
    broadcasts=True,
)


def check_concat_channels(x: ir.Value, y: ir.Value, *biases: ir.Value | None) -> str | None:
    """Return why the kernel does not accept x (...,A), y (...,B) and biases (A,) and (B,), None if it does.

    The kernel moves eight numbers at a time, so A and B are multiples of 8.
    """
    sizes = [static_dim(value, -1) for value in (x, y)]
    if any(size is None or size % 8 for size in sizes):
        return f"{sizes[0]} and {sizes[1]} channels: the kernel accepts multiples of 8"
    for bias, size in zip(biases, sizes, strict=False):
        if bias is not None and bias.shape is not None and bias.shape != (size,):
            return f"a bias of shape {list(bias.shape)} for {size} channels"
    return CONCAT_CHANNELS.check_dtypes(x, y, *biases)


def _lower_concat_channels(node: ir.Node) -> list[ir.Value | None]:
    parts = []
    for index in range(2):
        value, bias = input_of(node, index), optional_input(node, index + 2)
        value = copied_rows(node, value, input_of(node, 0)) if index else value
        parts.append(value if bias is None else insert(node, "Add", [value, bias], shape=value.shape))
    return [insert(node, "Concat", parts, {"axis": -1})]


def _concat_channels_cases() -> Iterator[KernelCase]:
    # One vector of each; rows narrower and wider than a block; blocks of 512 vectors, whole and not.
    biases = tuple(product((False, True), repeat=2))
    cases: list[tuple[tuple[int, int], tuple[int, ...], tuple[bool, ...]]]
    cases = [*product(((8, 8), (320, 640)), ((3, 5, 7),), biases), ((640, 320), (2, 8, 8), (True, False))]
    cases += [(widths, (2, 3), (True, True)) for widths in ((8, 4096), (4096, 8), (4104, 72))]
    cases += [((64, 64), rows, (True, False)) for rows in ((32,), (1, 31), (1, 33), (32, 2))]
    cases += [((1280, 1280), (2, 8, 8), (False, False)), ((320, 320), (0, 4, 4), (True, True))]
    copied = [((320, 320), (6, 5, 7), biases[images], images) for images in (1, 2, 3)]
    for (left, right), rows, (has_left, has_right), images in [*((*case, 0) for case in cases), *copied]:
        empty = " 0 rows" if 0 in rows else ""
        yield sdonnx_case(
            "ConcatChannels",
            f"A={left} B={right} {'x'.join(map(str, rows))} bias_x={has_left} bias_y={has_right}{empty}"
            + (f" A={images}" if images else ""),
            (
                (*rows, left),
                (images or rows[0], *rows[1:], right),
                (left,) if has_left else None,
                (right,) if has_right else None,
            ),
        )


CONCAT_CHANNELS = SdonnxContract(
    "ConcatChannels",
    _lower_concat_channels,
    _concat_channels_cases,
    first_use=(
        "A=320 B=640 3x5x7 bias_x=True bias_y=True",
        "A=640 B=320 2x8x8 bias_x=True bias_y=False",
        "A=320 B=320 6x5x7 bias_x=True bias_y=False A=2",
    ),
    limits=on_inputs(check_concat_channels, 0, 1, 2, 3),
    row_inputs=frozenset({0, 1}),
)


_NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def check_upsample_nearest(x: ir.Value, sizes: ir.Value | None) -> str | None:
    """Return why the kernel does not accept x (B,H,W,C) and sizes (4,), None if it does.

    The kernel moves eight numbers at a time, so C is a multiple of 8.
    """
    shape, channels = dims(x), static_dim(x, -1)
    if shape is not None and len(shape) != 4:
        return f"the input has {len(shape)} dimensions, the kernel accepts 4"
    if channels is None or channels % 8:
        return f"{channels} channels: the kernel accepts multiples of 8"
    if sizes is not None and sizes.dtype not in (None, ir.DataType.INT64):
        return f"the sizes are {sizes.dtype}, the kernel accepts INT64"
    return UPSAMPLE_NEAREST.check_dtype(x)


def _lower_upsample_nearest(node: ir.Node) -> list[ir.Value | None]:
    x, sizes = input_of(node, 0), optional_input(node, 1)
    if sizes is not None:
        return [insert(node, "Resize", [x, None, None, sizes], _NEAREST)]
    scales = constant(graph_of(node), [1, 2, 2, 1], np.float32, "scales_1_2_2_1")
    return [insert(node, "Resize", [x, None, scales], _NEAREST)]


def _upsample_nearest_cases() -> Iterator[KernelCase]:
    # One vector; rows of less and more than a block; images of one pixel, of one row and of one column.
    fills = (None, Fill.DOUBLED_SIZES, Fill.ODD_SIZES, Fill.ODD_HEIGHT)
    cases: list[tuple[int, tuple[int, ...], str | None]]
    cases = [*product((8, 320), ((2, 5, 7),), fills), *product((64,), ((1, 1, 1), (1, 1, 7), (3, 7, 1)), fills)]
    cases += [(1280, (2, 4, 4), None), (128, (1, 16, 16), None), (64, (32, 2, 3), None), (2056, (1, 2, 3), None)]
    cases += [(64, (1, 33, 31), Fill.ODD_SIZES), (64, (0, 4, 4), None)]
    for channels, image, fill in cases:
        empty = " 0 rows" if 0 in image else ""
        output = 4 * channels * int(np.prod(image))
        yield sdonnx_case(
            "UpsampleNearest",
            f"C={channels} {'x'.join(map(str, image))} sizes={fill}{empty}",
            ((*image, channels), None if fill is None else (4,)),
            fills={} if fill is None else {1: fill},
            static_axes={} if fill is None else {1: (0,)},
            intermediate_size=output,
        )


UPSAMPLE_NEAREST = SdonnxContract(
    "UpsampleNearest",
    _lower_upsample_nearest,
    _upsample_nearest_cases,
    first_use=("C=320 2x5x7 sizes=None", "C=320 2x5x7 sizes=odd height"),
    limits=on_inputs(check_upsample_nearest, 0, 1),
    row_inputs=frozenset({0}),
)
