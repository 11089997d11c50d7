"""sdonnx::UpsampleNearest(x (B,H,W,C), sizes (4,)): y (B,H',W',C) with y[b,i,j] = x[b,i/2,j/2].

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

from sdonnx.graph.edit import constant, dims, graph_of, input_of, insert, optional_input, static_dim
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import OWN_DOMAIN, Fill, KernelCase

__all__ = ["OWN_UPSAMPLE_NEAREST", "check_own_upsample_nearest"]

_NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def check_own_upsample_nearest(x: ir.Value, sizes: ir.Value | None) -> str | None:
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
    return OWN_UPSAMPLE_NEAREST.check_dtype(x)


def _limits(node: ir.Node) -> str | None:
    return check_own_upsample_nearest(input_of(node, 0), optional_input(node, 1))


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, sizes = input_of(node, 0), optional_input(node, 1)
    if sizes is not None:
        return [insert(node, "Resize", [x, None, None, sizes], _NEAREST)]
    scales = constant(graph_of(node), [1, 2, 2, 1], np.float32, "scales_1_2_2_1")
    return [insert(node, "Resize", [x, None, scales], _NEAREST)]


def _kernel_cases() -> Iterator[KernelCase]:
    # One vector; rows of less and more than a block; images of one pixel, of one row and of one column.
    fills = (None, Fill.DOUBLED_SIZES, Fill.ODD_SIZES, Fill.ODD_HEIGHT)
    cases: list[tuple[int, tuple[int, ...], str | None]]
    cases = [*product((8, 320), ((2, 5, 7),), fills), *product((64,), ((1, 1, 1), (1, 1, 7), (3, 7, 1)), fills)]
    cases += [(1280, (2, 4, 4), None), (128, (1, 16, 16), None), (64, (32, 2, 3), None), (2056, (1, 2, 3), None)]
    cases += [(64, (1, 33, 31), Fill.ODD_SIZES), (64, (0, 4, 4), None)]
    for channels, image, fill in cases:
        empty = " 0 rows" if 0 in image else ""
        output = 4 * channels * int(np.prod(image))
        yield KernelCase(
            "UpsampleNearest",
            f"C={channels} {'x'.join(map(str, image))} sizes={fill}{empty}",
            ((*image, channels), None if fill is None else (4,)),
            fills={} if fill is None else {1: fill},
            static_axes={} if fill is None else {1: (0,)},
            intermediate_size=output,
            domain=OWN_DOMAIN,
        )


OWN_UPSAMPLE_NEAREST = Contract(
    "UpsampleNearest",
    _lower,
    _kernel_cases,
    first_use=("C=320 2x5x7 sizes=None", "C=320 2x5x7 sizes=odd height"),
    limits=_limits,
    domain=OWN_DOMAIN,
    dtypes=frozenset({ir.DataType.FLOAT16}),
    row_inputs=frozenset({0}),
)
