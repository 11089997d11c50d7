"""sdonnx::LayerNorm(x (...,C), gamma (C,), beta (C,)) -> (x - mean) / sqrt(variance + epsilon) * gamma + beta.

Ba et al. 2016. The kernel is kernels/src/layer_norm.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from sdonnx.graph.edit import input_of, insert, optional_input, static_dim
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import OWN_DOMAIN, KernelCase

__all__ = ["MAX_LAYER_NORM_CHANNELS", "OWN_LAYER_NORM", "check_own_layer_norm"]

# layer_norm.cuh: a warp holds a row in registers, eight vectors of eight numbers in each lane.
MAX_LAYER_NORM_CHANNELS = 2048


def check_own_layer_norm(x: ir.Value, gamma: ir.Value, beta: ir.Value | None) -> str | None:
    """Return why the kernel does not accept a norm over the last axis of x (...,C), None if it does."""
    channels = static_dim(gamma, 0)
    if channels is None or gamma.shape is None or gamma.shape.rank() != 1:
        return "gamma is not a vector of a known size"
    if channels % 8 or channels > MAX_LAYER_NORM_CHANNELS:
        return f"{channels} channels: the kernel accepts multiples of 8 up to {MAX_LAYER_NORM_CHANNELS}"
    if beta is not None and beta.shape != gamma.shape:
        return "beta does not have the shape of gamma"
    failures = (OWN_LAYER_NORM.check_dtype(value) for value in (x, gamma, beta) if value is not None)
    return next(filter(None, failures), None)


def _limits(node: ir.Node) -> str | None:
    return check_own_layer_norm(input_of(node, 0), input_of(node, 1), optional_input(node, 2))


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, gamma = node.inputs[:2]
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    return [insert(node, "LayerNormalization", [x, gamma, optional_input(node, 2)], attributes)]


def _kernel_cases() -> Iterator[KernelCase]:
    # Every number of vectors in a lane: full lanes, one lane more, and one lane less than full.
    widths = [8, 256, 264, 320, 512, 640, 760, 768, 1024, 1152, 1280, 1536, 1544, 1784, 1792, 2040, 2048]
    cases: list[tuple[int, tuple[int, ...], bool]] = [(width, (3, 7), True) for width in widths]
    cases += [(width, (2, 77), False) for width in (320, 1280)]
    cases += [(640, rows, True) for rows in ((1, 1), (1, 4), (3, 1), (1, 1024), (32, 5), (2, 3, 5, 2))]
    for width, rows, has_beta in cases:
        name = f"C={width} {'x'.join(map(str, rows))} beta={has_beta}"
        shapes = ((*rows, width), (width,), (width,) if has_beta else None)
        yield KernelCase("LayerNorm", name, shapes, {"epsilon": 1e-5}, domain=OWN_DOMAIN)
    yield KernelCase("LayerNorm", "C=320 0 rows", ((2, 0, 320), (320,), (320,)), {"epsilon": 1e-5}, domain=OWN_DOMAIN)


OWN_LAYER_NORM = Contract(
    "LayerNorm",
    _lower,
    _kernel_cases,
    first_use=("C=320 3x7 beta=True", "C=1280 3x7 beta=True"),
    limits=_limits,
    domain=OWN_DOMAIN,
    dtypes=frozenset({ir.DataType.FLOAT16}),
)
