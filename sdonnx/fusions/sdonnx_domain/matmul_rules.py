"""The rules of MatMul: matmuls by a constant, with the bias, the activation or the residual that follows.

With `scaled` they write ScaledMatMul for factors that are rounded to 8 bits, and other matmuls are no candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.fusions.sdonnx_domain.matmul_8bit_rules import scaled_matmul
from sdonnx.fusions.sdonnx_domain.replacement import both_orders, without_absent
from sdonnx.fusions.sdonnx_domain.rounded_matmul import rounded_matmul
from sdonnx.graph.edit import dims, input_of, insert, optional_input, replace, static_dim
from sdonnx.graph.match import (
    NOT_A_CANDIDATE,
    REWRITTEN,
    Refused,
    WalkResult,
    has_one_reader,
    is_matrix,
    producer_of,
    same_shape,
)
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.operators.sdonnx_domain.matmul import check_mat_mul

__all__ = ["bias_add", "fast_gelu", "gemm", "mat_mul", "sum_with_bias"]


@dataclass(frozen=True)
class _Epilogue:
    """What a matmul of our own adds to its result.

    Attributes:
        bias: added to each row; None for none.
        residual: of the shape of the result; None for none.
        gelu: 1 to apply gelu (tanh), 0 not to.
        scaled: whether the factors are in 8 bits.
    """

    bias: ir.Value | None = None
    residual: ir.Value | None = None
    gelu: int = 0
    scaled: bool = False


def fast_gelu(node: ir.Node, _: object, scaled: bool = False) -> WalkResult:
    """FastGelu(x @ w, bias) -> MatMul(x, w, bias) with gelu."""
    return _before(node, input_of(node, 0), _Epilogue(optional_input(node, 1), gelu=1, scaled=scaled))


def bias_add(node: ir.Node, _: object, scaled: bool = False) -> WalkResult:
    """BiasAdd(x @ w, bias, skip) -> MatMul(x, w, bias, skip), with the matmul in either place."""
    first, bias, second = node.inputs
    result = _before(node, first, _Epilogue(bias, second, scaled=scaled))
    return _before(node, second, _Epilogue(bias, first, scaled=scaled)) if result is NOT_A_CANDIDATE else result


def sum_with_bias(node: ir.Node, _: object, scaled: bool = False) -> WalkResult:
    """X @ w + bias -> MatMul(x, w, bias), with the operands in either order. The bias may be computed at each step."""
    for matmul, bias in both_orders(node):
        if bias is not None and bias.shape is not None and bias.shape.rank() == 1:
            return _before(node, matmul, _Epilogue(bias, scaled=scaled))
    return NOT_A_CANDIDATE


def gemm(node: ir.Node, _: object, scaled: bool = False) -> WalkResult:
    """Gemm(x, w, residual) -> MatMul(x, w, residual): ONNX Runtime's kernel copies the residual first."""
    if scaled and rounded_matmul(node.inputs[0], node.inputs[1]) is None:
        return NOT_A_CANDIDATE
    residual, result = optional_input(node, 2), node.outputs[0]
    if residual is None or not same_shape(residual, result) or len(dims(residual) or ()) != 2:
        return NOT_A_CANDIDATE
    if any(node.attributes.get_float(name, 1.0) != 1 for name in ("alpha", "beta")):
        return Refused("the matmul or the residual is scaled")
    if any(node.attributes.get_int(name, 0) for name in ("transA", "transB")):
        return Refused("a factor is transposed")
    return _replaced(node, _Epilogue(residual=residual, scaled=scaled))


def mat_mul(node: ir.Node, _: object, scaled: bool = False) -> WalkResult:
    """X @ w -> MatMul(x, w): ONNX Runtime's large matmuls need a memset (docs/decisions/0147)."""
    if not scaled and not is_matrix(input_of(node, 1)):
        return NOT_A_CANDIDATE
    return _replaced(node, _Epilogue(scaled=scaled))


def _before(node: ir.Node, value: ir.Value | None, epilogue: _Epilogue) -> WalkResult:
    """Replace a node and the matmul before it, also through a Reshape that keeps the last axis.

    The matmul must be by a constant, and have no other reader.
    """
    reshape, total = producer_of(value, "Reshape"), value
    residual = epilogue.residual
    if reshape is not None:
        value = _inside(value, reshape)
        other = producer_of(residual, "Reshape")
        if residual is not None and other is None:
            return NOT_A_CANDIDATE
        residual = None if other is None else input_of(other, 0)
    matmul = producer_of(value, "MatMul")
    if matmul is None or value is None or not all(map(has_one_reader, (value, total))):
        return NOT_A_CANDIDATE
    if not epilogue.scaled and not is_matrix(input_of(matmul, 1)):
        return NOT_A_CANDIDATE
    if residual is not None and not same_shape(residual, value):
        return Refused("the residual is not known to have the shape of the matmul")
    inner = _Epilogue(epilogue.bias, residual, epilogue.gelu, epilogue.scaled)
    made = _inserted(node, matmul, value, inner)
    if not isinstance(made, ir.Value):
        return made
    old = node.outputs[0]
    if reshape is not None:
        made = insert(node, "Reshape", [made, *reshape.inputs[1:]], reshape.attributes, shape=old.shape)
    replace(old, made)
    return REWRITTEN


def _replaced(node: ir.Node, epilogue: _Epilogue) -> WalkResult:
    """Replace a matmul."""
    made = _inserted(node, node, node.outputs[0], epilogue)
    if not isinstance(made, ir.Value):
        return made
    replace(node.outputs[0], made)
    return REWRITTEN


def _inserted(node: ir.Node, matmul: ir.Node, like: ir.Value, epilogue: _Epilogue) -> ir.Value | WalkResult:
    """Return the result of a matmul of our own, which is inserted before `node`, or why there is none.

    Args:
        node: the node before which to insert it.
        matmul: the matmul to replace.
        like: a value of the shape and type of the result.
        epilogue: what is added to it.
    """
    x, weight = input_of(matmul, 0), input_of(matmul, 1)
    bias, residual, gelu = epilogue.bias, epilogue.residual, epilogue.gelu
    if epilogue.scaled:
        rounded = rounded_matmul(x, weight)
        if rounded is None:
            return NOT_A_CANDIDATE
        made = scaled_matmul(node, like, rounded, bias, residual, gelu)
        return Refused(made) if isinstance(made, str) else made
    if (reason := check_mat_mul(x, weight, bias)) is not None:
        return Refused(reason)
    inputs = without_absent(x, weight, bias, residual)
    return insert(node, "MatMul", inputs, {"gelu": gelu}, domain=OUR_DOMAIN, shape=like.shape, dtype=like.dtype)


def _inside(value: ir.Value | None, reshape: ir.Node) -> ir.Value | None:
    """Return the value that a Reshape reads, None if the last axis is not known to stay the same."""
    before = input_of(reshape, 0)
    size = None if value is None else static_dim(value, -1)
    return before if size is not None and size == static_dim(before, -1) else None
