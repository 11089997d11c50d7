"""The rules of LayerNorm, SkipLayerNorm and GroupNorm."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from sdonnx.fusions.sdonnx_domain.repeated_rows import copied_value, row_of_table
from sdonnx.fusions.sdonnx_domain.replacement import both_orders, is_read, replace_by, without_absent
from sdonnx.graph.edit import (
    dims,
    input_of,
    insert,
    insert_multi,
    known_dims,
    known_size,
    optional_input,
    replace,
    static_dim,
)
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
from sdonnx.operators.sdonnx_domain.norms import (
    check_group_norm,
    check_layer_norm,
    check_skip_layer_norm,
    check_table_row,
)

__all__ = ["STATISTICS_ARE_READ", "group_norm", "layer_norm", "skip_layer_norm"]

STATISTICS_ARE_READ = "the mean or the deviation is read"


def layer_norm(node: ir.Node, _: object) -> WalkResult:
    """LayerNormalization(x, gamma, beta) over the last axis -> LayerNorm(x, gamma, beta)."""
    x, gamma, beta = input_of(node, 0), input_of(node, 1), optional_input(node, 2)
    rank = len(dims(x) or ())
    if node.attributes.get_int("axis", -1) not in (-1, rank - 1):
        return Refused("the norm is not over the last axis only")
    if is_read(node.outputs[1:]):
        return Refused(STATISTICS_ARE_READ)
    if (reason := check_layer_norm(x, gamma, beta)) is not None:
        return Refused(reason)
    attributes = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
    replace_by(node, node.outputs[:1], "LayerNorm", without_absent(x, gamma, beta), attributes)
    return REWRITTEN


def skip_layer_norm(node: ir.Node, _: object) -> WalkResult:
    """SkipLayerNormalization(x @ (w * gate), skip) -> SkipLayerNorm(x @ w, skip, gate), which multiplies no weight.

    Without a gate, ONNX Runtime's kernel is as fast, unless the skip was copied for it.
    """
    value, skip = input_of(node, 0), input_of(node, 1)
    found = _gated_matmul(value)
    if found is None:
        value, skip = skip, value
        found = _gated_matmul(value)
    if found is None:
        return _norm_of_copies(node)
    matmul, weight, gate = found
    if is_read(node.outputs[1:3]):
        return Refused(STATISTICS_ARE_READ)
    if not same_shape(value, skip):
        return Refused("the skip is not known to have the shape of the matmul")
    vectors = input_of(node, 2), optional_input(node, 3), optional_input(node, 4)
    if (reason := check_skip_layer_norm(value, *vectors, gate)) is not None:
        return Refused(reason)
    plain = insert(matmul, "MatMul", [input_of(matmul, 0), weight], shape=value.shape, dtype=value.dtype)
    _put_skip_layer_norm(node, [plain, skip, *vectors, gate])
    return REWRITTEN


def _norm_of_copies(node: ir.Node) -> WalkResult:
    """SkipLayerNormalization(x, copies of skip) -> SkipLayerNorm(x, skip)."""
    for value, copies in ((input_of(node, 0), input_of(node, 1)), (input_of(node, 1), input_of(node, 0))):
        skip = copied_value(copies)
        if skip is None or len(dims(skip) or ()) != 3 or known_dims(skip)[1:] != (dims(value) or ())[1:]:
            continue
        if is_read(node.outputs[1:3]):
            return Refused(STATISTICS_ARE_READ)
        vectors = input_of(node, 2), optional_input(node, 3), optional_input(node, 4)
        if (reason := check_skip_layer_norm(value, *vectors, None)) is not None:
            return Refused(reason)
        _put_skip_layer_norm(node, [value, skip, *vectors])
        return REWRITTEN
    return NOT_A_CANDIDATE


def _put_skip_layer_norm(node: ir.Node, inputs: Sequence[ir.Value | None]) -> None:
    shape = None if inputs[0] is None else inputs[0].shape
    attributes = {"epsilon": node.attributes.get_float("epsilon", 1e-12)}
    outputs = insert_multi(node, "SkipLayerNorm", inputs, attributes, 2, domain=OUR_DOMAIN, shapes=[shape, shape])
    replace(node.outputs[0], outputs[0])
    if len(node.outputs) > 3:
        replace(node.outputs[3], outputs[1])


def _gated_matmul(value: ir.Value) -> tuple[ir.Node, ir.Value, ir.Value] | None:
    """Return the matmul x @ (w * gate) with its weight w (K,C) and its gate (C,), None for other values."""
    matmul = producer_of(value, "MatMul")
    scaling = None if matmul is None else producer_of(matmul.inputs[1], "Mul")
    if matmul is None or scaling is None or not has_one_reader(value):
        return None
    for weight, gate in both_orders(scaling):
        if weight is None or gate is None or not is_matrix(weight):
            continue
        if len(dims(gate) or ()) == 1 and static_dim(gate, 0) == static_dim(weight, 1) is not None:
            return matmul, weight, gate
    return None


def group_norm(node: ir.Node, _: object) -> WalkResult:
    """GroupNorm or SkipGroupNorm of ONNX Runtime -> GroupNorm, which may read the skip's row from a table."""
    x, gamma = input_of(node, 0), input_of(node, 1)
    groups = node.attributes.get_int("groups")
    if (reason := check_group_norm(x, gamma, groups)) is not None:
        return Refused(reason)
    attributes = {
        "groups": groups,
        "epsilon": node.attributes.get_float("epsilon", 1e-5),
        "activation": node.attributes.get_int("activation", 0),
    }
    inputs = list(node.inputs)
    row = row_of_table(optional_input(node, 3))
    if row is not None and check_table_row(row.table, row.index, row.offset, known_size(gamma, 0)) is None:
        attributes["offset"] = row.offset
        inputs = [*inputs[:3], row.table, optional_input(node, 4), row.index]
    replace_by(node, node.outputs, "GroupNorm", inputs, attributes)
    return REWRITTEN
