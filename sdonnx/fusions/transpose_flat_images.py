"""Transpositions of flattened images -> transpositions of images, which cancel in the channels-last pass."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sdonnx.graph.edit import dims, known_dims
from sdonnx.graph.match import Rule, same_dims

__all__ = ["ChannelsLastToFlatChannels", "FlatChannelsToChannelsLast"]


class FlatChannelsToChannelsLast(Rule):
    """Transpose(Reshape(x, (B,C,H*W)), (0,2,1)) -> Reshape(Transpose(x, (0,2,3,1)), (B,H*W,C)).

    Shapes: x (B,C,H,W). A transposition of the image can then cancel against its neighbours.
    """

    keeps_nodes = True

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        return op.Transpose(op.Reshape(x, shape, _allow_other_attributes=True), perm=[0, 2, 1], _outputs=["last"])

    def check(self, x: ir.Value, last: ir.Value, **_: Any) -> str | None:
        before, after = dims(x), dims(last)
        if before is None or after is None or len(before) != 4 or not same_dims(before[:2], (after[0], after[2])):
            return "the reshape does more than flatten height and width"
        if not isinstance(before[1], int):
            return "the number of channels is dynamic"
        return None

    def rewrite(self, op: Any, x: ir.Value, last: ir.Value, **_: Any) -> Any:
        sizes = known_dims(x)
        moved = op.Transpose(x, perm=[0, 2, 3, 1])
        moved.shape, moved.type = ir.Shape([sizes[0], sizes[2], sizes[3], sizes[1]]), x.type
        shape = op.Constant(value_ints=[0, -1, int(str(sizes[1]))])
        return op.Reshape(moved, shape)


class ChannelsLastToFlatChannels(Rule):
    """Reshape(Transpose(x, (0,2,1)), (B,C,H,W)) -> Transpose(Reshape(x, (B,H,W,C)), (0,3,1,2)).

    Shapes: x (B,H*W,C). The inverse of FlatChannelsToChannelsLast.
    """

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        moved = op.Transpose(x, perm=[0, 2, 1])
        return op.Reshape(moved, shape, _allow_other_attributes=True, _outputs=["image"])

    def check(self, x: ir.Value, image: ir.Value, **_: Any) -> str | None:
        before, after = dims(x), dims(image)
        if before is None or after is None or len(after) != 4 or not same_dims(after[:2], (before[0], before[2])):
            return "the reshape does more than unflatten height and width"
        if not isinstance(after[1], int):
            return "the number of channels is dynamic"
        return None

    def rewrite(self, op: Any, x: ir.Value, shape: ir.Value, image: ir.Value) -> Any:
        sizes = known_dims(image)
        # The number of channels is spelled out: `shape` may say 0, the size at the same place.
        kept = op.Gather(shape, op.Constant(value_ints=[0, 2, 3]))
        unflat = op.Reshape(x, op.Concat(kept, op.Constant(value_ints=[sizes[1]]), axis=0))
        unflat.shape, unflat.type = ir.Shape([sizes[0], sizes[2], sizes[3], sizes[1]]), x.type
        return op.Transpose(unflat, perm=[0, 3, 1, 2])
