"""Shifts, scales and gates that are one row for the whole batch -> norms and biases.

Of adaptive norms (adaLN-single: arXiv:2310.00426, section 2.3), whose rows are computed at each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import Dim, constant, constant_value, dims, insert, is_weight, replace, static_dim
from sdonnx.graph.match import Idiom, biased, is_matrix, producer_of, same_shape, sole_user, sum_of, total_bias
from sdonnx.graph.modules import joint_path

__all__ = ["BiasBeforeGate", "GateIntoWeight", "ModulationIntoLayerNorm", "RowPastProduct"]


class ModulationIntoLayerNorm(Idiom):
    """LayerNormalization(x, ones, zeros) * scale + shift -> LayerNormalization(x, scale, shift).

    Shapes: x (B,S,D), scale and shift (1,1,D).
    """

    roots = frozenset({"LayerNormalization"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite where the norm has no weights of its own, and its result is modulated alone."""
        result = node.outputs[0]
        channels = static_dim(result, -1)
        scaled, scale = _with_row(result, "Mul", channels)
        shifted, shift = _with_row(scaled, "Add", channels)
        if scale is None or shift is None or len(node.inputs) < 3:
            return ""
        x, gamma, beta = node.inputs[:3]
        if not _is_filled(gamma, 1) or not _is_filled(beta, 0):
            return "the norm has weights of its own"
        last = shifted.producer()
        assert last is not None
        inputs = [x, _vector(last, scale, channels), _vector(last, shift, channels)]
        replace(shifted, insert(last, "LayerNormalization", inputs, node.attributes, shape=result.shape))
        return None


class BiasBeforeGate(Idiom):
    """gate * (x + bias) -> gate * x + gate * bias, of which the last is a row: a norm or an addition takes it.

    Shapes: x (B,S,D), bias (D,), gate (1,1,D).
    """

    roots = frozenset({"Mul"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite a gate over a sum that nothing else reads."""
        result = node.outputs[0]
        channels = static_dim(result, -1)
        for gate, total in (node.inputs, reversed(node.inputs)):
            found = biased(total)
            if found is None or total is None or gate is None or not _is_row(gate, channels):
                continue
            x, bias = found
            if sole_user(total, "Mul") is not node or not same_shape(x, result):
                continue
            gated = insert(node, "Mul", [x, gate], shape=result.shape)
            row = insert(node, "Mul", [bias, _vector(node, gate, channels)], shape=[channels or 0])
            replace(result, insert(node, "Add", [gated, row], shape=result.shape))
            return None
        return ""


class GateIntoWeight(Idiom):
    """gate * (x @ W) -> x @ (gate * W): a weight has fewer rows than a large image has tokens.

    Shapes: x (B,S,K), W (K,D), gate (1,1,D).
    """

    roots = frozenset({"Mul"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite a gate, computed at each step, over a product that nothing else reads."""
        result = node.outputs[0]
        channels = static_dim(result, -1)
        for gate, gated in (node.inputs, reversed(node.inputs)):
            product = producer_of(gated, "MatMul")
            if product is None or gate is None or is_weight(gate) or not _is_row(gate, channels):
                continue
            x, weight = product.inputs
            if weight is None or not is_matrix(weight):
                continue
            if sole_user(product.outputs[0], "Mul") is not node or not same_shape(product.outputs[0], result):
                continue
            if x is None or _is_fewer(dims(x) or (), static_dim(weight, 0)):
                continue
            module = joint_path((product, node))
            scaled = insert(node, "Mul", [weight, _vector(node, gate, channels)], shape=weight.shape, module=module)
            replace(result, insert(node, "MatMul", [x, scaled], shape=result.shape, module=module))
            return None
        return ""


class RowPastProduct(Idiom):
    """s = x + y @ W + row, which a product and sums read -> the row is added to what these make of x + y @ W.

    A product s @ V + b becomes (x + y @ W) @ V + (b + row @ V), whose last part is a row again, and a sum adds the row
    besides, where a norm takes it for a bias. What is left, the product y @ W can add to x (ResidualIntoGemm).
    Shapes: x (B,S,D), y (B,S,K), W (K,D), row (D), computed at each step; V (D,E), b (E).
    """

    roots = frozenset({"Add"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite where all readers can do without the row."""
        total = node.outputs[0]
        parts, users = sum_of(total), [use.node for use in total.uses()]
        if total.is_graph_output() or len(parts.terms) != 2 or all(map(is_weight, parts.biases)):
            return ""
        if not any(map(_is_own_product, parts.terms)) or len(dims(total) or ()) != 3:
            return ""
        if not all(same_shape(term, total) for term in parts.terms):
            return ""
        additions = {user: _bias_after(user, total) for user in users if user.op_type == "MatMul"}
        if not additions or None in additions.values():
            return ""
        sums = [user for user in users if user not in additions]
        if not all(_is_sum_with_another(user, total) for user in sums):
            return "the sum is read by more than products and sums"
        row = total_bias(node, parts.biases)
        assert row is not None
        bare = insert(node, "Add", parts.terms, shape=total.shape)
        for product, addition in additions.items():
            assert addition is not None
            weight, index = product.inputs[1], 0 if addition.inputs[1] is product.outputs[0] else 1
            bias = addition.inputs[index]
            assert weight is not None
            assert bias is not None
            moved = insert(addition, "MatMul", [row, weight], shape=bias.shape)
            addition.replace_input_with(index, insert(addition, "Add", [moved, bias], shape=bias.shape))
            product.replace_input_with(0, bare)
        for user in sums:
            index = 0 if user.inputs[0] is total else 1
            other = user.inputs[1 - index]
            assert other is not None
            user.replace_input_with(index, bare)
            user.replace_input_with(1 - index, insert(user, "Add", [other, row], shape=total.shape))
        return None


def _is_own_product(term: ir.Value) -> bool:
    """Tell whether a term is a product (B,S,K) @ (K,D) that nothing but the sum reads."""
    product = producer_of(term, "MatMul")
    weight = None if product is None else product.inputs[1]
    if weight is None or sole_user(term, "Add") is None:
        return False
    return len(dims(weight) or ()) == 2 and static_dim(weight, 0) is not None


def _is_sum_with_another(node: ir.Node, value: ir.Value) -> bool:
    """Tell whether a node adds another value of the same shape to this one."""
    if node.op_type != "Add" or node.domain or node.inputs[0] is node.inputs[1]:
        return False
    return all(other is not None and same_shape(other, value) for other in node.inputs)


def _bias_after(product: ir.Node, x: ir.Value) -> ir.Node | None:
    """Return the addition of a constant bias to the product of `x` (B,S,D) by a weight (D,E)."""
    if product.domain or product.inputs[0] is not x or not is_matrix(product.inputs[1]):
        return None
    addition = sole_user(product.outputs[0], "Add")
    if addition is None or (found := biased(addition.outputs[0])) is None or found[0] is not product.outputs[0]:
        return None
    return addition


def _with_row(value: ir.Value, op_type: str, channels: int | None) -> tuple[ir.Value, ir.Value | None]:
    """Return what follows `value` (B,S,D) and the row (1,1,D) that it is given."""
    node = sole_user(value, op_type)
    if node is None:
        return value, None
    other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
    fits = _is_row(other, channels) and same_shape(node.outputs[0], value)
    return (node.outputs[0], other) if fits else (value, None)


def _is_row(value: ir.Value | None, channels: int | None) -> bool:
    sizes = None if value is None else dims(value)
    return channels is not None and sizes == (1, 1, channels)


def _is_fewer(sizes: Sequence[Dim], rows: int | None) -> bool:
    """Tell whether tokens (..., K) are known to be fewer than the rows of a weight."""
    tokens = [size for size in sizes[:-1] if isinstance(size, int)]
    return rows is not None and len(tokens) == len(sizes) - 1 and math.prod(tokens) < rows


def _is_filled(value: ir.Value | None, number: int) -> bool:
    values = constant_value(value)
    return values is not None and bool((values == number).all())


def _vector(anchor: ir.Node, row: ir.Value, channels: int | None) -> ir.Value:
    """Return a row (1,1,D) as (D,)."""
    assert isinstance(anchor.graph, ir.Graph)
    assert channels is not None
    shape = constant(anchor.graph, [channels], np.int64, f"sizes_{channels}")
    return insert(anchor, "Reshape", [row, shape], shape=[channels])
