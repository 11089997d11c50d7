"""Matmuls and residuals -> Gemm."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, input_of, insert, is_weight, replace, required, static_dim
from sdonnx.graph.match import (
    NOT_A_CANDIDATE,
    REWRITTEN,
    Refused,
    WalkResult,
    WalkRule,
    biased,
    is_matrix,
    producer_of,
    same_shape,
    sole_user,
    sum_of,
    total_bias,
)
from sdonnx.graph.modules import joint_path

__all__ = ["ResidualIntoGemm", "RowPastProduct"]


class RowPastProduct(WalkRule):
    """s = x + y @ W + row -> x + y @ W, where the matmuls and sums that read s add the row after it.

    A matmul s @ V + b becomes (x + y @ W) @ V + (b + row @ V): the last term is again a row. A sum adds the row, and
    a norm can take it as its bias. The remaining x + y @ W becomes one Gemm (ResidualIntoGemm).
    Shapes: x (B,S,D), y (B,S,K), W (K,D), row (D), computed at each step; V (D,E), b (E).
    """

    roots = frozenset({"Add"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        total = node.outputs[0]
        parts, users = sum_of(total), [use.node for use in total.uses()]
        if total.is_graph_output() or len(parts.terms) != 2 or all(map(is_weight, parts.biases)):
            return NOT_A_CANDIDATE
        if not any(map(_is_own_matmul, parts.terms)) or len(dims(total) or ()) != 3:
            return NOT_A_CANDIDATE
        if not all(same_shape(term, total) for term in parts.terms):
            return NOT_A_CANDIDATE
        additions = {user: _bias_after(user, total) for user in users if user.op_type == "MatMul"}
        if not additions or None in additions.values():
            return NOT_A_CANDIDATE
        sums = [user for user in users if user not in additions]
        if not all(_is_sum_with_another(user, total) for user in sums):
            return Refused("the sum has other readers than matmuls and sums")
        row = required(total_bias(node, parts.biases))
        bare = insert(node, "Add", parts.terms, shape=total.shape)
        for matmul, after in additions.items():
            addition, weight = required(after), input_of(matmul, 1)
            index = 0 if addition.inputs[1] is matmul.outputs[0] else 1
            bias = input_of(addition, index)
            moved = insert(addition, "MatMul", [row, weight], shape=bias.shape)
            addition.replace_input_with(index, insert(addition, "Add", [moved, bias], shape=bias.shape))
            matmul.replace_input_with(0, bare)
        for user in sums:
            index = 0 if user.inputs[0] is total else 1
            other = input_of(user, 1 - index)
            user.replace_input_with(index, bare)
            user.replace_input_with(1 - index, insert(user, "Add", [other, row], shape=total.shape))
        return REWRITTEN


def _is_own_matmul(term: ir.Value) -> bool:
    """Return whether a term is a matmul (B,S,K) @ (K,D) that only the sum reads."""
    matmul = producer_of(term, "MatMul")
    weight = None if matmul is None else matmul.inputs[1]
    if weight is None or sole_user(term, "Add") is None:
        return False
    return len(dims(weight) or ()) == 2 and static_dim(weight, 0) is not None


def _is_sum_with_another(node: ir.Node, value: ir.Value) -> bool:
    """Return whether a node adds another value of the same shape to this one."""
    if node.op_type != "Add" or node.domain or node.inputs[0] is node.inputs[1]:
        return False
    return all(other is not None and same_shape(other, value) for other in node.inputs)


def _bias_after(matmul: ir.Node, x: ir.Value) -> ir.Node | None:
    """Return the addition of a constant bias to the matmul of `x` (B,S,D) by a weight (D,E)."""
    if matmul.domain or matmul.inputs[0] is not x or not is_matrix(matmul.inputs[1]):
        return None
    addition = sole_user(matmul.outputs[0], "Add")
    if addition is None or (found := biased(addition.outputs[0])) is None or found[0] is not matmul.outputs[0]:
        return None
    return addition


class ResidualIntoGemm(WalkRule):
    """x @ W + residual -> Gemm(x, W, residual), which adds as it multiplies: for sums that no norm takes, with no bias.

    Shapes: x (B,S,K), W (K,D), residual (B,S,D); the kernel sees (B*S,K) and (B*S,D).
    """

    roots = frozenset({"Add"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        total = node.outputs[0]
        for added, residual in (node.inputs, reversed(node.inputs)):
            matmul = producer_of(added, "MatMul")
            if matmul is None or residual is None or sole_user(matmul.outputs[0], "Add") is not node:
                continue
            if residual is added:  # twice the matmul, which one addition doubles
                continue
            x, weight = matmul.inputs
            if x is None or weight is None or len(dims(x) or ()) != 3 or len(dims(weight) or ()) != 2:
                continue
            rows, channels = static_dim(weight, 0), static_dim(weight, 1)
            if rows is None or channels is None or not same_shape(matmul.outputs[0], total):
                continue
            if not same_shape(residual, total):
                continue
            flat = [_flat(node, value, width) for value, width in ((x, rows), (residual, channels))]
            module = joint_path((matmul, node))
            made = insert(node, "Gemm", [flat[0], weight, flat[1]], shape=flat[1].shape, module=module)
            sizes = insert(node, "Shape", [residual], shape=[3], dtype=ir.DataType.INT64)
            replace(total, insert(node, "Reshape", [made, sizes], shape=total.shape))
            return REWRITTEN
        return NOT_A_CANDIDATE


def _flat(anchor: ir.Node, value: ir.Value, width: int) -> ir.Value:
    """Return (B,S,C) as (B*S,C)."""
    shape = constant(required(anchor.graph), [-1, width], np.int64, f"shape_m1_{width}")
    return insert(anchor, "Reshape", [value, shape], shape=[ir.SymbolicDim(None), width])
