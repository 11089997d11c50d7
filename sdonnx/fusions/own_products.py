"""Replacements of products by a constant, with the bias, the activation or the residual that follows."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.fusions.own_nodes import has_one_reader, put_own
from sdonnx.graph.edit import dims, input_of, insert, replace, static_dim
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, Refused, WalkResult, is_matrix, producer_of, same_shape
from sdonnx.operators.case import OWN_DOMAIN
from sdonnx.operators.own_mat_mul import check_own_mat_mul
from sdonnx.operators.reference_body import optional_input

__all__ = ["bias_add", "fast_gelu", "gemm", "mat_mul", "sum_with_bias"]


def fast_gelu(node: ir.Node, _: object) -> WalkResult:
    """FastGelu(x @ w, bias) -> MatMul(x, w, bias) with gelu."""
    return _product(node, input_of(node, 0), optional_input(node, 1), None, gelu=1)


def bias_add(node: ir.Node, _: object) -> WalkResult:
    """BiasAdd(x @ w, bias, skip) -> MatMul(x, w, bias, skip), with the product in either place."""
    first, bias, second = node.inputs
    for product, residual in ((first, second), (second, first)):
        result = _product(node, product, bias, residual, gelu=0)
        if result is not NOT_A_CANDIDATE:
            return result
    return NOT_A_CANDIDATE


def sum_with_bias(node: ir.Node, _: object) -> WalkResult:
    """X @ w + bias -> MatMul(x, w, bias), with the operands in either order. The bias may be computed at each step."""
    for product, bias in (tuple(node.inputs), tuple(reversed(node.inputs))):
        if bias is not None and bias.shape is not None and bias.shape.rank() == 1:
            return _product(node, product, bias, None, gelu=0)
    return NOT_A_CANDIDATE


def gemm(node: ir.Node, _: object) -> WalkResult:
    """Gemm(x, w, residual) -> MatMul(x, w, residual): ONNX Runtime's kernel copies the residual first."""
    residual, result = optional_input(node, 2), node.outputs[0]
    if residual is None or not same_shape(residual, result) or len(dims(residual) or ()) != 2:
        return NOT_A_CANDIDATE
    if any(node.attributes.get_float(name, 1.0) != 1 for name in ("alpha", "beta")):
        return Refused("the product or the residual is scaled")
    if any(node.attributes.get_int(name, 0) for name in ("transA", "transB")):
        return Refused("a factor is transposed")
    x, weight = input_of(node, 0), input_of(node, 1)
    if (reason := check_own_mat_mul(x, weight, None)) is not None:
        return Refused(reason)
    put_own(node, result, "MatMul", [x, weight, None, residual], {"gelu": 0})
    return REWRITTEN


def mat_mul(node: ir.Node, _: object) -> WalkResult:
    """X @ w -> MatMul(x, w): ONNX Runtime's large products need a memset (docs/decisions/0147)."""
    x, weight = input_of(node, 0), input_of(node, 1)
    if not is_matrix(weight):
        return NOT_A_CANDIDATE
    if (reason := check_own_mat_mul(x, weight, None)) is not None:
        return Refused(reason)
    put_own(node, node.outputs[0], "MatMul", [x, weight], {"gelu": 0})
    return REWRITTEN


def _product(
    node: ir.Node, value: ir.Value | None, bias: ir.Value | None, residual: ir.Value | None, gelu: int
) -> WalkResult:
    """Replace a product and the node that reads it, also through a Reshape that keeps the last axis.

    The product must be by a constant, and have no other reader.
    """
    reshape, total = producer_of(value, "Reshape"), value
    if reshape is not None:
        value = _inside(value, reshape)
        other = producer_of(residual, "Reshape")
        if residual is not None and other is None:
            return NOT_A_CANDIDATE
        residual = None if other is None else input_of(other, 0)
    product = producer_of(value, "MatMul")
    if product is None or value is None or total is None or not all(map(has_one_reader, (value, total))):
        return NOT_A_CANDIDATE
    x, weight = input_of(product, 0), input_of(product, 1)
    if not is_matrix(weight):
        return NOT_A_CANDIDATE
    if (reason := check_own_mat_mul(x, weight, bias)) is not None:
        return Refused(reason)
    if residual is not None and not same_shape(residual, value):
        return Refused("the residual is not known to have the shape of the product")
    inputs = [x, weight, bias, residual]
    while inputs[-1] is None:
        inputs.pop()
    if reshape is None:
        put_own(node, node.outputs[0], "MatMul", inputs, {"gelu": gelu})
    else:
        made = insert(node, "MatMul", inputs, {"gelu": gelu}, domain=OWN_DOMAIN, shape=value.shape, dtype=value.dtype)
        old = node.outputs[0]
        replace(old, insert(node, "Reshape", [made, *reshape.inputs[1:]], reshape.attributes, shape=old.shape))
    return REWRITTEN


def _inside(value: ir.Value | None, reshape: ir.Node) -> ir.Value | None:
    """Return the value that a Reshape reads, None if the last axis is not known to stay the same."""
    before = input_of(reshape, 0)
    size = None if value is None else static_dim(value, -1)
    return before if size is not None and size == static_dim(before, -1) else None
