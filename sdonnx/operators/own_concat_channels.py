"""sdonnx::ConcatChannels(x (...,A), y (...,B), bias_x (A,), bias_y (B,)): concat(x + bias_x, y + bias_y) (...,A+B).

The first axis of y divides x's: y is appended to each copy. The biases are optional. A sum is computed in float32
and rounded once to fp16; numbers without a bias are copied bit by bit. The kernel is kernels/src/concat_channels.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import input_of, insert, optional_input, static_dim
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import OWN_DOMAIN, KernelCase
from sdonnx.operators.reference_body import copied_rows

__all__ = ["OWN_CONCAT_CHANNELS", "check_own_concat_channels"]


def check_own_concat_channels(x: ir.Value, y: ir.Value, *biases: ir.Value | None) -> str | None:
    """Return why the kernel does not accept x (...,A), y (...,B) and biases (A,) and (B,), None if it does.

    The kernel moves eight numbers at a time, so A and B are multiples of 8.
    """
    sizes = [static_dim(value, -1) for value in (x, y)]
    if any(size is None or size % 8 for size in sizes):
        return f"{sizes[0]} and {sizes[1]} channels: the kernel accepts multiples of 8"
    for bias, size in zip(biases, sizes, strict=False):
        if bias is not None and bias.shape is not None and bias.shape != (size,):
            return f"a bias of shape {list(bias.shape)} for {size} channels"
    failures = (OWN_CONCAT_CHANNELS.check_dtype(value) for value in (x, y, *biases) if value is not None)
    return next(filter(None, failures), None)


def _limits(node: ir.Node) -> str | None:
    biases = optional_input(node, 2), optional_input(node, 3)
    return check_own_concat_channels(input_of(node, 0), input_of(node, 1), *biases)


def _lower(node: ir.Node) -> list[ir.Value | None]:
    parts = []
    for index in range(2):
        value, bias = input_of(node, index), optional_input(node, index + 2)
        value = copied_rows(node, value, input_of(node, 0)) if index else value
        parts.append(value if bias is None else insert(node, "Add", [value, bias], shape=value.shape))
    return [insert(node, "Concat", parts, {"axis": -1})]


def _kernel_cases() -> Iterator[KernelCase]:
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
        yield KernelCase(
            "ConcatChannels",
            f"A={left} B={right} {'x'.join(map(str, rows))} bias_x={has_left} bias_y={has_right}{empty}"
            + (f" A={images}" if images else ""),
            (
                (*rows, left),
                (images or rows[0], *rows[1:], right),
                (left,) if has_left else None,
                (right,) if has_right else None,
            ),
            domain=OWN_DOMAIN,
        )


OWN_CONCAT_CHANNELS = Contract(
    "ConcatChannels",
    _lower,
    _kernel_cases,
    first_use=(
        "A=320 B=640 3x5x7 bias_x=True bias_y=True",
        "A=640 B=320 2x8x8 bias_x=True bias_y=False",
        "A=320 B=320 6x5x7 bias_x=True bias_y=False A=2",
    ),
    limits=_limits,
    domain=OWN_DOMAIN,
    dtypes=frozenset({ir.DataType.FLOAT16}),
    row_inputs=frozenset({0, 1}),
)
