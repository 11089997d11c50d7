"""Find the rows that a graph repeats for each image or prompt, so that a kernel may read them where they are."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.graph.edit import constant_value, dims, input_of, static_dim
from sdonnx.graph.match import producer_of, same_shape

__all__ = ["TableRow", "copied_value", "row_of_table"]


@dataclass(frozen=True)
class TableRow:
    """Neighboring numbers of a row of a table.

    Attributes:
        table: (rows, width).
        index: (1,) int64, the row.
        offset: the place of the first number in the row.
    """

    table: ir.Value
    index: ir.Value
    offset: int


def row_of_table(value: ir.Value | None) -> TableRow | None:
    """Return the row that a value (B,C) or (B,1,1,C) repeats for each image, None if it is not known to be one.

    `sdonnx.compose.timesteps` writes these: Gather, Expand to the images, Split into layers, and Unsqueeze. A Slice of
    images, which `sdonnx.compose.sharing` inserts before the Unsqueeze, changes no row.
    """
    if (node := producer_of(value, "Unsqueeze")) is not None:
        axes = constant_value(node.inputs[1])
        if axes is None or axes.tolist() != [1, 2]:
            return None
        value = node.inputs[0]
    if (node := producer_of(value, "Slice")) is not None:
        axes = constant_value(node.inputs[3]) if len(node.inputs) > 3 else None
        if axes is None or axes.tolist() != [0]:
            return None
        value = node.inputs[0]
    offset = 0
    if value is not None and (node := producer_of(value, "Split")) is not None:
        sizes = [static_dim(output, -1) for output in node.outputs]
        if node.attributes.get_int("axis", 0) not in (-1, 1) or None in sizes:
            return None
        offset = sum(size or 0 for size in sizes[: list(node.outputs).index(value)])
        value = node.inputs[0]
    if value is None or (node := producer_of(value, "Expand")) is None:
        return None
    row = input_of(node, 0)
    gather = producer_of(row, "Gather")
    if gather is None or gather.attributes.get_int("axis", 0) != 0:
        return None
    table, index = input_of(gather, 0), input_of(gather, 1)
    width = static_dim(table, 1)
    if len(dims(table) or ()) != 2 or width is None or static_dim(value, 1) != width or static_dim(index, 0) != 1:
        return None
    return TableRow(table, index, offset)


def copied_value(value: ir.Value | None) -> ir.Value | None:
    """Return the value (A,...) of which a value (B,...) holds copies, one behind another; None if it is not known to.

    `sdonnx.compose.graph_builder.repeat_rows` writes these: Expand to (copies, A, ...), and Reshape to (-1, ...).
    """
    flat = producer_of(value, "Reshape")
    expanded = None if flat is None else producer_of(flat.inputs[0], "Expand")
    if flat is None or expanded is None:
        return None
    source = input_of(expanded, 0)
    sizes, whole = producer_of(flat.inputs[1], "Concat"), producer_of(expanded.inputs[1], "Concat")
    if sizes is None or whole is None or len(sizes.inputs) != 2 or len(whole.inputs) != 2:
        return None
    minus_one = constant_value(sizes.inputs[0])
    is_flat = minus_one is not None and minus_one.tolist() == [-1] and _measures(sizes.inputs[1], source, 1)
    return source if is_flat and _measures(whole.inputs[1], source, 0) else None


def _measures(sizes: ir.Value | None, value: ir.Value, start: int) -> bool:
    """Return whether `sizes` are the sizes of a value's axes from `start` on."""
    node = producer_of(sizes, "Shape")
    if node is None or node.inputs[0] is None:
        return False
    measured = node.inputs[0]
    is_same = measured is value or same_shape(measured, value)
    return is_same and node.attributes.get_int("start", 0) == start and "end" not in node.attributes
