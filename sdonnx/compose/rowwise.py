"""Operators that treat every row of the first axis by itself, so that the number of rows does not change a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, constant_value, dims, input_of
from sdonnx.operators.operator_table import CONTRACTS

__all__ = ["RowRules", "rank_of"]

# Operators that compute each row of the first axis by itself, if their other inputs have no such axis or one of size 1.
_ROW_BY_ROW = frozenset(
    {"Abs", "Add", "BiasGelu", "Cast", "Clip", "Cos", "Div", "Erf", "Exp", "Gelu", "Identity", "Log", "Max", "Min",
     "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sin", "Softplus", "Sqrt", "Sub", "Tanh", "Where"}
) | {op_type for op_type, contract in CONTRACTS.items() if contract.broadcasts}  # fmt: skip
# The inputs that have rows, of operators that compute each row by itself; their other inputs are weights.
_ROW_INPUTS = dict.fromkeys(("Conv", "GroupNormalization", "InstanceNormalization"), frozenset({0})) | {
    op_type: contract.row_inputs for op_type, contract in CONTRACTS.items() if contract.row_inputs
}
# The default axis of operators that compute each row by itself, unless they work along the first axis.
_ALONG_AXIS = {
    "Concat": None,
    "Gather": 0,
    "LayerNormalization": -1,
    "LogSoftmax": -1,
    "RMSNormalization": -1,
    "SimplifiedLayerNormalization": -1,
    "Softmax": -1,
    "Split": 0,
}


class RowRules:
    """Rules that find the values of a graph with independently computed rows on their first axis.

    Attributes:
        rows: such a value -> whether it depends on the rows of the start value; false where it depends only on their
            number.
        other: values that are neither rows nor equal for all rows, or may be so.
    """

    def __init__(self, rows: dict[ir.Value, bool], other: set[ir.Value]) -> None:
        self.rows, self.other = rows, other

    def _is_weight(self, value: ir.Value | None, rank: int) -> bool:
        """Return whether a value broadcasts equally to every row of a value of that rank."""
        if value is None:
            return True
        sizes = dims(value)
        free = value not in self.rows and value not in self.other
        return free and sizes is not None and (len(sizes) < rank or (len(sizes) == rank and sizes[0] == 1))

    def _is_free(self, values: Iterable[ir.Value | None]) -> bool:
        return all(value is None or (value not in self.rows and value not in self.other) for value in values)

    def _are_rows(self, values: Iterable[ir.Value | None], rank: int) -> bool:
        return all(value is not None and value in self.rows and rank_of(value) == rank for value in values)

    def keeps_rows(self, node: ir.Node) -> bool:
        """Return whether each row of the output is the node's result for that row only, in the same order."""
        first, others = input_of(node, 0), node.inputs[1:]
        rank = rank_of(node.outputs[0])
        match node.op_type:
            case kind if kind in _ROW_BY_ROW:
                return all((value in self.rows and rank_of(value) == rank) or self._is_weight(value, rank)
                           for value in node.inputs if value is not None)  # fmt: skip
            case kind if kind in _ROW_INPUTS:
                return all(value in self.rows if index in _ROW_INPUTS[kind] else self._is_free([value])
                           for index, value in enumerate(node.inputs))  # fmt: skip
            case kind if kind in _ALONG_AXIS:
                data = node.inputs if kind == "Concat" else node.inputs[:1]
                axis = node.attributes.get_int("axis", _ALONG_AXIS[kind] or 0)
                return (
                    self._are_rows(data, rank_of(first))
                    and self._is_free(node.inputs[len(data) :])
                    and axis % max(rank_of(first), 1) != 0
                )
            case "QuantizeLinear" | "DequantizeLinear":
                # With one scale for all values; a weight has one for each channel.
                return first in self.rows and all(value is None or dims(value) == () for value in others)
            case "ReduceMax":
                kept = node.attributes.get_int("keepdims", 1) == 1
                return kept and first in self.rows and _is_past_first(node, 1, rank_of(first))
            case "Transpose":
                return next(iter(node.attributes.get_ints("perm", [-1]))) == 0
            case "Slice":
                return first in self.rows and self._is_free(others) and _is_past_first(node, 3, rank_of(first))
            case "Squeeze" | "Unsqueeze":
                return first in self.rows and _is_past_first(node, 1, max(rank, rank_of(first)))
            case "Reshape":
                return first in self.rows and self._is_free(others)
            case "Expand":
                same = first in self.rows and dims(first) is not None and rank_of(first) == rank
                return (same or self._is_weight(first, rank)) and self._is_free(others)
            case "Gemm":
                plain = not node.attributes.get_int("transA", 0)
                weights = self._is_free(node.inputs[1:2])
                added = all(value in self.rows or self._is_weight(value, 2) for value in node.inputs[2:])
                return plain and first in self.rows and weights and added
            case "MatMul" | "FusedMatMul":
                return self._multiplies_rows(node)
            case "MultiHeadAttention" | "Attention":
                return self._attends_rows(node)
            case _:
                return False

    def _attends_rows(self, node: ir.Node) -> bool:
        """Return whether attention has rows of queries, keys and values, and the same mask for all rows."""
        data = [value for value in node.inputs[:3] if value is not None]
        free: Sequence[ir.Value | None]
        mask: Sequence[ir.Value | None]
        absent: Sequence[ir.Value | None]
        if node.op_type == "MultiHeadAttention":
            free, mask, absent = node.inputs[3:4], node.inputs[5:6], (*node.inputs[4:5], *node.inputs[6:])
        elif node.domain != MICROSOFT and len(data) == 3:
            free, mask, absent = (), node.inputs[3:4], node.inputs[4:]
        else:
            return False
        return (
            all(value in self.rows for value in data)
            and self._is_free(free)
            and all(self._is_weight(value, 4) for value in mask)
            and all(value is None for value in absent)
        )

    def _multiplies_rows(self, node: ir.Node) -> bool:
        left, right = input_of(node, 0), input_of(node, 1)
        if any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB")):
            return False
        if left in self.rows and self._is_free([right]):
            return rank_of(right) == 2 or (rank_of(left) > 2 and self._is_weight(right, rank_of(left)))
        return rank_of(left) > 2 and self._are_rows([left, right], rank_of(left))


def rank_of(value: ir.Value) -> int:
    """Return the rank of a value, 0 where it is unknown."""
    return len(dims(value) or ())


def _is_past_first(node: ir.Node, index: int, rank: int) -> bool:
    """Return whether the axes that a node reads are constant and none of them is the first."""
    axes = constant_value(node.inputs[index]) if len(node.inputs) > index else None
    return axes is not None and all(int(axis) % max(rank, 1) != 0 for axis in axes.reshape(-1))
