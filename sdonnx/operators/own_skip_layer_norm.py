"""sdonnx::SkipLayerNorm(x, skip (...,C), gamma, beta, bias, gate (C,)): s = x * gate + skip + bias -> LayerNorm(s), s.

The first axis of the skip divides x's: the skip is added to each copy. beta, bias and gate are optional, and so
is the second output. ONNX Runtime's SkipLayerNormalization has no gate. Adaptive norms (adaLN-single: arXiv:2310.00426,
section 2.3) compute one at each step. The kernel is kernels/src/layer_norm.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import input_of, insert, optional_input
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import OWN_DOMAIN, KernelCase
from sdonnx.operators.own_layer_norm import check_own_layer_norm
from sdonnx.operators.reference_body import copied_rows
from sdonnx.operators.skip_layer_normalization import sum_with_skip

__all__ = ["OWN_SKIP_LAYER_NORM", "check_own_skip_layer_norm"]


def check_own_skip_layer_norm(
    x: ir.Value, gamma: ir.Value, beta: ir.Value | None, bias: ir.Value | None, gate: ir.Value | None
) -> str | None:
    """Return why the kernel does not accept a norm of x (...,C), None if it does."""
    if (reason := check_own_layer_norm(x, gamma, beta)) is not None:
        return reason
    for name, row in (("bias", bias), ("gate", gate)):
        if row is None:
            continue
        if row.shape != gamma.shape:
            return f"{name} does not have the shape of gamma"
        if (reason := OWN_SKIP_LAYER_NORM.check_dtype(row)) is not None:
            return reason
    return None


def _limits(node: ir.Node) -> str | None:
    return check_own_skip_layer_norm(
        input_of(node, 0), input_of(node, 2), *(optional_input(node, index) for index in (3, 4, 5))
    )


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, skip, gamma = (input_of(node, index) for index in range(3))
    beta, bias, gate = (optional_input(node, index) for index in (3, 4, 5))
    if gate is not None:
        x = insert(node, "Mul", [x, gate], shape=x.shape)
    total = sum_with_skip(node, x, copied_rows(node, skip, input_of(node, 0)), bias)
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    return [insert(node, "LayerNormalization", [total, gamma, beta], attributes), total]


def _kernel_cases() -> Iterator[KernelCase]:
    # Every number of vectors in a lane, as of LayerNorm, which has the same kernel.
    widths = [8, 256, 264, 320, 512, 640, 760, 768, 1024, 1152, 1280, 1536, 1544, 1784, 1792, 2040, 2048]
    cases: list[tuple[int, tuple[int, ...], bool, bool, bool, int]] = [
        (width, (3, 7), True, True, True, 2) for width in widths
    ]
    flags = (False, True)
    cases += [(320, (2, 77), *form) for form in product(flags, flags, flags, (1, 2))]
    cases += [(1152, rows, True, True, True, 2) for rows in ((1, 1), (1, 5), (3, 1), (1, 1024), (32, 5), (2, 3, 5, 2))]
    cases += [(320, (2, 0), True, True, True, 2)]
    copied = [(*case, images) for images, case in ((1, cases[3]), (1, cases[0]))]
    copied += [(320, (6, 7), True, True, has_gate, 2, images) for has_gate in (False, True) for images in (2, 3)]
    for width, rows, has_beta, has_bias, has_gate, outputs, images in [*((*case, 0) for case in cases), *copied]:
        x, vector = (*rows, width), (width,)
        skip = (images or rows[0], *rows[1:], width)
        shapes = (x, skip, vector, *(vector if present else None for present in (has_beta, has_bias, has_gate)))
        size = "0 rows" if 0 in rows else "x".join(map(str, rows))
        name = f"C={width} {size} beta={has_beta} bias={has_bias} gate={has_gate} outputs={outputs}"
        name += f" A={images}" if images else ""
        yield KernelCase("SkipLayerNorm", name, shapes, {"epsilon": 1e-5}, outputs, domain=OWN_DOMAIN)


OWN_SKIP_LAYER_NORM = Contract(
    "SkipLayerNorm",
    _lower,
    _kernel_cases,
    first_use=(
        "C=1152 3x7 beta=True bias=True gate=True outputs=2",
        "C=320 2x77 beta=False bias=False gate=False outputs=1",
        "C=320 6x7 beta=True bias=True gate=False outputs=2 A=2",
    ),
    limits=_limits,
    domain=OWN_DOMAIN,
    dtypes=frozenset({ir.DataType.FLOAT16}),
)
