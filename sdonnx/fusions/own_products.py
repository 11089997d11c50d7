"""Replacements of products by a constant, with the bias, the activation or the residual that follows."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.fusions.own_nodes import has_one_reader
from sdonnx.fusions.own_scaled_products import scaled_product
from sdonnx.fusions.rounded_products import rounded_product
from sdonnx.graph.edit import dims, input_of, insert, optional_input, replace, static_dim
from sdonnx.graph.match import NOT_A_CANDIDATE, REWRITTEN, Refused, WalkResult, is_matrix, producer_of, same_shape
from sdonnx.operators.kernel_case import SDONNX_DOMAIN
from sdonnx.operators.sdonnx_domain.matmul import check_mat_mul

__all__ = ["bias_add", "fast_gelu", "gemm", "mat_mul", "sum_with_bias"]


def fast_gelu(node: ir.Node, _: object, scaled: bool = False) -> WalkResult:
    """FastGelu(x @ w, bias) -> MatMul(x, w, bias) with gelu."""
    return _product(node, input_of(node, 0), optional_input(node, 1), None, gelu=1, scaled=scaled)


def bias_add(node: ir.Node, _: object, scaled: bool = False) -> WalkResult:
    """BiasAdd(x @ w, bias, skip) -> MatMul(x, w, bias, skip), with the product in either place."""
    first, bias, second = node.inputs
    for product, residual in ((first, second), (second, first)):
        result = _product(node, product, bias, residual, gelu=0, scaled=scaled)
        if result is not NOT_A_CANDIDATE:
            return result
    return NOT_A_CANDIDATE


def sum_with_bias(node: ir.Node, _: object, scaled: bool = False) -> WalkResult:
    """X @ w + bias -> MatMul(x, w, bias), with the operands in either order. The bias may be computed at each step."""
    for product, bias in (tuple(node.inputs), tuple(reversed(node.inputs))):
        if bias is not None and bias.shape is not None and bias.shape.rank() == 1:
            return _product(node, product, bias, None, gelu=0, scaled=scaled)
    return NOT_A_CANDIDATE


def gemm(node: ir.Node, _: object, scaled: bool = False) -> WalkResult:
    """Gemm(x, w, residual) -> MatMul(x, w, residual): ONNX Runtime's kernel copies the residual first."""
    if scaled and rounded_product(node.inputs[0], node.inputs[1]) is None:
        return NOT_A_CANDIDATE
    residual, result = optional_input(node, 2), node.outputs[0]
    if residual is None or not same_shape(residual, result) or len(dims(residual) or ()) != 2:
        return NOT_A_CANDIDATE
    if any(node.attributes.get_float(name, 1.0) != 1 for name in ("alpha", "beta")):
        return Refused("the product or the residual is scaled")
    if any(node.attributes.get_int(name, 0) for name in ("transA", "transB")):
        return Refused("a factor is transposed")
    return _put_product(node, residual, scaled)


def mat_mul(node: ir.Node, _: object, scaled: bool = False) -> WalkResult:
    """X @ w -> MatMul(x, w): ONNX Runtime's large products need a memset (docs/decisions/0147)."""
    if not scaled and not is_matrix(input_of(node, 1)):
        return NOT_A_CANDIDATE
    return _put_product(node, None, scaled)


def _product(
    node: ir.Node, value: ir.Value | None, bias: ir.Value | None, residual: ir.Value | None, gelu: int, scaled: bool
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
    if not scaled and not is_matrix(input_of(product, 1)):
        return NOT_A_CANDIDATE
    if residual is not None and not same_shape(residual, value):
        return Refused("the residual is not known to have the shape of the product")
    made = _own_product(node, product, value, bias, residual, gelu, scaled)
    if not isinstance(made, ir.Value):
        return made
    old = node.outputs[0]
    if reshape is not None:
        made = insert(node, "Reshape", [made, *reshape.inputs[1:]], reshape.attributes, shape=old.shape)
    replace(old, made)
    return REWRITTEN


def _put_product(node: ir.Node, residual: ir.Value | None, scaled: bool) -> WalkResult:
    """Let a product of our own compute what a product does, with a residual or without one."""
    made = _own_product(node, node, node.outputs[0], None, residual, 0, scaled)
    if not isinstance(made, ir.Value):
        return made
    replace(node.outputs[0], made)
    return REWRITTEN


def _own_product(
    node: ir.Node,
    product: ir.Node,
    like: ir.Value,
    bias: ir.Value | None,
    residual: ir.Value | None,
    gelu: int,
    scaled: bool,
) -> ir.Value | WalkResult:
    """Return the result of a product of our own, which is inserted before `node`, or why there is none.

    Args:
        node: the node before which to insert it.
        product: the product.
        like: a value of the shape and type of the result.
        bias: added to each row; None for none.
        residual: added to the product; None for none.
        gelu: 1 to apply gelu (tanh), 0 not to.
        scaled: multiply factors in 8 bits; products of other factors are no candidates.
    """
    x, weight = input_of(product, 0), input_of(product, 1)
    if scaled:
        rounded = rounded_product(x, weight)
        if rounded is None:
            return NOT_A_CANDIDATE
        made = scaled_product(node, like, rounded, bias, residual, gelu)
        return Refused(made) if isinstance(made, str) else made
    if (reason := check_mat_mul(x, weight, bias)) is not None:
        return Refused(reason)
    inputs = [x, weight, bias, residual]
    while inputs[-1] is None:
        inputs.pop()
    return insert(node, "MatMul", inputs, {"gelu": gelu}, domain=SDONNX_DOMAIN, shape=like.shape, dtype=like.dtype)


def _inside(value: ir.Value | None, reshape: ir.Node) -> ir.Value | None:
    """Return the value that a Reshape reads, None if the last axis is not known to stay the same."""
    before = input_of(reshape, 0)
    size = None if value is None else static_dim(value, -1)
    return before if size is not None and size == static_dim(before, -1) else None
