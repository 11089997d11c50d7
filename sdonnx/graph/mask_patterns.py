"""Recognize causal masks and padding masks of attention, in the forms that exporters compute them."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.graph.edit import Dim, constant_value, dims
from sdonnx.graph.match import filling, producer_of, same_dims, scalar

__all__ = ["MASKED_SCORE", "allowed_keys", "is_causal"]

MASKED_SCORE = -60000.0
"""Added to a masked score: the score vanishes in the softmax, and float16 holds it, down to -65504."""

# A score to which this or less is added vanishes in any softmax: scores are far smaller.
_MAX_MASKED_SCORE = -1e4


def is_causal(mask: ir.Value) -> bool:
    """Return whether a mask, boolean or additive, allows exactly each position itself and those before it."""
    return _is_lower_triangle(mask) if mask.dtype == ir.DataType.BOOL else _is_added_triangle(mask)


def _is_added_triangle(mask: ir.Value) -> bool:
    """Return whether an additive mask is 0 in the lower triangle and a very low number elsewhere."""
    value = _matrix(mask)
    if (node := producer_of(value, "Where")) is not None:
        condition, yes, no = node.inputs
        if condition is None:
            return False
        if _is_lower_triangle(condition):
            return _allows(yes) and _refuses(no)
        return _is_upper_triangle(condition) and _refuses(yes) and _allows(no)
    if (node := producer_of(value, "Trilu")) is not None:
        # Very low numbers everywhere; Trilu keeps those above the diagonal.
        kept_above = node.attributes.get_int("upper", 1) == 1 and _diagonal(node) == 1
        return kept_above and _is_square(node) and _refuses(node.inputs[0])
    return False


def _allows(value: ir.Value | None) -> bool:
    """Return whether the value is 0, so that adding it leaves scores unchanged."""
    return value is not None and filling(value) == 0.0


def _refuses(value: ir.Value | None) -> bool:
    """Return whether scores vanish in the softmax when the value is added."""
    number = None if value is None else filling(value)
    return number is not None and number <= _MAX_MASKED_SCORE


def _is_upper_triangle(value: ir.Value) -> bool:
    """Return whether a mask is the complement of the lower triangle: Not(lower), lower == 0, or column > row."""
    inner = _matrix(value)
    if (node := producer_of(inner, "Not")) is not None:
        return node.inputs[0] is not None and _is_lower_triangle(node.inputs[0])
    if (node := producer_of(inner, "Equal")) is not None:
        for triangle, zero in (node.inputs, reversed(node.inputs)):
            if triangle is not None and scalar(zero) == 0.0:
                return _is_lower_triangle(triangle)
    if (node := producer_of(inner, "Greater", "Less")) is not None:
        column, row = node.inputs if node.op_type == "Greater" else tuple(reversed(node.inputs))
        return _counts_columns_and_rows(column, row)
    return False


def _is_lower_triangle(value: ir.Value) -> bool:
    """Return whether a mask is column <= row, or the lower triangle of ones."""
    inner = _matrix(value)
    if (node := producer_of(inner, "Trilu")) is not None:
        kept_below = node.attributes.get_int("upper", 1) == 0 and _diagonal(node) == 0
        return kept_below and _is_square(node) and node.inputs[0] is not None and filling(node.inputs[0]) == 1.0
    if (node := producer_of(inner, "LessOrEqual", "GreaterOrEqual")) is not None:
        column, row = node.inputs if node.op_type == "LessOrEqual" else tuple(reversed(node.inputs))
        return _counts_columns_and_rows(column, row)
    if (node := producer_of(inner, "Less", "Greater")) is not None:
        column, row = node.inputs if node.op_type == "Less" else tuple(reversed(node.inputs))
        return _counts_columns_and_rows(column, row, rows_from=1)  # column < row + 1
    return False


def _diagonal(node: ir.Node) -> int | None:
    number = scalar(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else 0.0
    return None if number is None else int(number)


def _is_square(node: ir.Node) -> bool:
    sizes = dims(node.outputs[0])
    return sizes is not None and len(sizes) >= 2 and same_dims(sizes[-1:], sizes[-2:-1])


def _matrix(value: ir.Value) -> ir.Value | None:
    """Return the matrix that `value` repeats for batch and heads; its last two axes are the same."""
    inner = _through(value, ("Expand", "Unsqueeze", "Cast"))
    before, after = dims(value), None if inner is None else dims(inner)
    if before is None or after is None or len(after) < 2 or not same_dims(before[-2:], after[-2:]):
        return None
    return inner


def _through(value: ir.Value | None, op_types: tuple[str, ...]) -> ir.Value | None:
    """Return the source of `value` before any of these operators."""
    while (node := producer_of(value, *op_types)) is not None:
        value = node.inputs[0]
    return value


def _counts_columns_and_rows(column: ir.Value | None, row: ir.Value | None, rows_from: int = 0) -> bool:
    """Return whether these count columns from 0 and rows from `rows_from`, along the last two axes."""
    column_range, row_range = (_through(value, ("Unsqueeze", "Reshape")) for value in (column, row))
    if rows_from and (node := producer_of(row_range, "Add")) is not None:
        first, second = node.inputs
        row_range = first if scalar(second) == rows_from else second if scalar(first) == rows_from else None
    elif rows_from:
        return False
    if column is None or row is None or column_range is None or column_range is not row_range:
        return False
    if not _counts_from_0(column_range):
        return False
    columns, rows = dims(column), dims(row)
    if columns is None or rows is None or len(rows) < 2:
        return False
    return rows[-1] == 1 and columns[-2:-1] in ((), (1,)) and same_dims(columns[-1:], rows[-2:-1])


def _is_counted(value: ir.Value, length: Dim) -> bool:
    """Return whether a value is 0, 1, 2 ... along its last axis, of that length, and constant along others."""
    sizes = dims(value)
    if sizes is None or any(size != 1 for size in sizes[:-1]) or not same_dims(sizes[-1:], (length,)):
        return False
    return _counts_from_0(_through(value, ("Unsqueeze", "Reshape")))


def _counts_from_0(value: ir.Value | None) -> bool:
    counted = producer_of(value, "Range")
    if counted is None:
        return False
    start, step = constant_value(counted.inputs[0]), constant_value(counted.inputs[2])
    return start is not None and step is not None and start.item() == 0 and step.item() == 1


def allowed_keys(bias: ir.Value) -> ir.Value | None:
    """Return the prefix mask (B,L) from which an additive mask (B,1,S,L) is computed; None for other values."""
    row: ir.Value | None = bias
    while (node := producer_of(row, "Unsqueeze", "Expand", "Cast")) is not None:
        source, before = node.inputs[0], dims(node.outputs[0])
        after = None if source is None else dims(source)
        # Batch and keys stay the first and the last axis, with their sizes.
        if before is None or after is None or len(after) < 2:
            return None
        if not same_dims((before[0], before[-1]), (after[0], after[-1])):
            return None
        row = source
    choice = producer_of(row, "Where")
    if choice is None or row is None or len(dims(row) or ()) != 2:
        return None
    condition, yes, no = choice.inputs
    if condition is None or not _allows(yes) or not _refuses(no):
        return None
    sizes, wanted = dims(condition), dims(row)
    if sizes is None or wanted is None or len(sizes) != 2 or not same_dims(sizes, wanted):
        return None
    return condition if _is_prefix(condition) else None


def _is_prefix(condition: ir.Value) -> bool:
    """Return whether a mask (B,L) is 0, 1, 2 ... < a length for each row."""
    node = producer_of(condition, "Less", "Greater")
    if node is None:
        return False
    place, count = node.inputs if node.op_type == "Less" else tuple(reversed(node.inputs))
    sizes = None if count is None else dims(count)
    whole = dims(condition)
    if place is None or sizes is None or whole is None or len(sizes) != 2 or sizes[-1] != 1:
        return False
    return _is_counted(place, whole[-1])
