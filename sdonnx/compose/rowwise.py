"""Which operators treat every row of the first axis by itself, so that more rows change nothing for those there are."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, constant_value, dims

__all__ = ["RowRules", "rank_of"]

# Each row of the first axis by itself, where what else they read has no such axis or one of size 1.
_ROW_BY_ROW = frozenset(
    {"Abs", "Add", "BiasAdd", "BiasGelu", "BiasSplitGelu", "Cast", "Clip", "Cos", "Div", "Erf", "Exp", "FastGelu",
     "Gelu", "Identity", "Log", "Max", "Min", "Mul", "Neg", "Pow", "QuickGelu", "Reciprocal", "Relu", "Sigmoid", "Sin",
     "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Softplus", "Sqrt", "Sub", "Tanh", "Where"}
)  # fmt: skip
# Likewise; only the first input has rows, and the rest are weights.
_OF_FIRST = frozenset({"Conv", "GroupNorm", "GroupNormalization", "InstanceNormalization", "NhwcConv"})
# Likewise, if the axis that the operator works along is not the first one.
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
    """What is known of a graph's values.

    Attributes:
        rows: the values whose first axis are rows -> whether they depend on what is followed, and not on the number of
            rows alone.
        other: what depends on something else that is followed, or may; neither rows nor the same for all of them.
    """

    def __init__(self, rows: dict[ir.Value, bool], other: set[ir.Value]) -> None:
        self.rows, self.other = rows, other

    def _is_weight(self, value: ir.Value | None, rank: int) -> bool:
        """Tell whether every row of a value of that rank meets the same of this one."""
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
        """Tell whether a node gives for each row what it would give for that row alone, in the rows' order."""
        first, others = node.inputs[0], node.inputs[1:]
        rank = rank_of(node.outputs[0])
        assert first is not None
        match node.op_type:
            case kind if kind in _ROW_BY_ROW:
                return all((value in self.rows and rank_of(value) == rank) or self._is_weight(value, rank)
                           for value in node.inputs if value is not None)  # fmt: skip
            case kind if kind in _OF_FIRST:
                return first in self.rows and self._is_free(others)
            case "SkipGroupNorm":
                skip = node.inputs[3]
                return first in self.rows and skip in self.rows and self._is_free([*node.inputs[1:3], *node.inputs[4:]])
            case kind if kind in _ALONG_AXIS:
                data = node.inputs if kind == "Concat" else node.inputs[:1]
                axis = node.attributes.get_int("axis", _ALONG_AXIS[kind] or 0)
                return (
                    self._are_rows(data, rank_of(first))
                    and self._is_free(node.inputs[len(data) :])
                    and axis % max(rank_of(first), 1) != 0
                )
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
            case "MultiHeadAttention":
                given = [value for value in node.inputs[:3] if value is not None]
                rest = (*node.inputs[4:5], *node.inputs[6:])
                bias = node.inputs[5] if len(node.inputs) > 5 else None
                return (
                    all(value in self.rows for value in given)
                    and self._is_free(node.inputs[3:4])
                    and self._is_weight(bias, 4)
                    and all(value is None for value in rest)
                )
            case "Attention" if node.domain != MICROSOFT:
                mask = node.inputs[3] if len(node.inputs) > 3 else None
                return (
                    all(value in self.rows for value in node.inputs[:3])
                    and self._is_weight(mask, 4)
                    and all(value is None for value in node.inputs[4:])
                )
            case _:
                return False

    def _multiplies_rows(self, node: ir.Node) -> bool:
        left, right = node.inputs
        assert left is not None
        assert right is not None
        if any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB")):
            return False
        if left in self.rows and self._is_free([right]):
            return rank_of(right) == 2 or (rank_of(left) > 2 and self._is_weight(right, rank_of(left)))
        return rank_of(left) > 2 and self._are_rows([left, right], rank_of(left))


def rank_of(value: ir.Value) -> int:
    """Return how many axes a value has, 0 where that is not known."""
    return len(dims(value) or ())


def _is_past_first(node: ir.Node, index: int, rank: int) -> bool:
    """Tell whether the constant axes that a node reads are all known, and none of them the first."""
    axes = constant_value(node.inputs[index]) if len(node.inputs) > index else None
    return axes is not None and all(int(axis) % max(rank, 1) != 0 for axis in axes.reshape(-1))
