"""Images flattened to sequences and back: the form in which the layout stage meets no needless transposition."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sdonnx.graph.edit import dims, is_weight, static_dim
from sdonnx.graph.match import Rule, is_bias, same_dims

__all__ = [
    "BiasAfterReshape",
    "ChannelsLastToFlatChannels",
    "FlatChannelsToChannelsLast",
    "FlatGroupNormToGroupNorm",
]


class FlatGroupNormToGroupNorm(Rule):
    """GroupNormalization(Reshape(x, (B,C,H*W))) -> Reshape(GroupNormalization(x), (B,C,H*W)).

    Shapes: x (B,C,H,W). diffusers' VAE normalizes the flattened image.
    """

    def pattern(self, op: Any, x: Any, shape: Any, gamma: Any, beta: Any) -> Any:
        """The norm of a flattened image."""
        flat = op.Reshape(x, shape, _allow_other_attributes=True)
        return op.GroupNormalization(flat, gamma, beta, _allow_other_attributes=True, _outputs=["norm"])

    keeps_nodes = True  # the flat image is the residual too

    def refuse(self, x: ir.Value, norm: ir.Value, **_: Any) -> str | None:
        """The reshape must keep batch and channels."""
        return None if _flattens_last_two(x, norm) else "the reshape does more than to flatten height and width"

    def rewrite(self, op: Any, x: ir.Value, shape: ir.Value, gamma: ir.Value, beta: ir.Value, norm: ir.Value) -> Any:
        """Normalize, then flatten."""
        node = norm.producer()
        assert node is not None
        normal = op.GroupNormalization(x, gamma, beta, **node.attributes)
        normal.shape, normal.type = x.shape, x.type
        return op.Reshape(normal, shape)


def _flattens_last_two(x: ir.Value, flat: ir.Value) -> bool:
    before, after = dims(x), dims(flat)
    if before is None or after is None or len(before) != 4 or len(after) != 3:
        return False
    return same_dims(before[:2], after[:2])


class FlatChannelsToChannelsLast(Rule):
    """Transpose(Reshape(x, (B,C,H*W)), (0,2,1)) -> Reshape(Transpose(x, (0,2,3,1)), (B,H*W,C)).

    Shapes: x (B,C,H,W). A transposition of the image can then cancel against its neighbours.
    """

    keeps_nodes = True

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        """A flattened image, channels moved last."""
        return op.Transpose(op.Reshape(x, shape, _allow_other_attributes=True), perm=[0, 2, 1], _outputs=["last"])

    def refuse(self, x: ir.Value, last: ir.Value, **_: Any) -> str | None:
        """The reshape must keep batch and channels."""
        before, after = dims(x), dims(last)
        if before is None or after is None or len(before) != 4 or not same_dims(before[:2], (after[0], after[2])):
            return "the reshape does more than to flatten height and width"
        if not isinstance(before[1], int):
            return "the number of channels is dynamic"
        return None

    def rewrite(self, op: Any, x: ir.Value, last: ir.Value, **_: Any) -> Any:
        """Move channels last, then flatten."""
        sizes = dims(x)
        assert sizes is not None
        moved = op.Transpose(x, perm=[0, 2, 3, 1])
        moved.shape, moved.type = ir.Shape([sizes[0], sizes[2], sizes[3], sizes[1]]), x.type
        shape = op.Constant(value_ints=[0, -1, int(str(sizes[1]))])
        return op.Reshape(moved, shape)


class ChannelsLastToFlatChannels(Rule):
    """Reshape(Transpose(x, (0,2,1)), (B,C,H,W)) -> Transpose(Reshape(x, (B,H,W,C)), (0,3,1,2)).

    Shapes: x (B,H*W,C). The inverse of FlatChannelsToChannelsLast.
    """

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        """A sequence put back into an image."""
        moved = op.Transpose(x, perm=[0, 2, 1])
        return op.Reshape(moved, shape, _allow_other_attributes=True, _outputs=["image"])

    def refuse(self, x: ir.Value, image: ir.Value, **_: Any) -> str | None:
        """The reshape must keep batch and channels."""
        before, after = dims(x), dims(image)
        if before is None or after is None or len(after) != 4 or not same_dims(after[:2], (before[0], before[2])):
            return "the reshape does more than to unflatten height and width"
        if not isinstance(after[1], int):
            return "the number of channels is dynamic"
        return None

    def rewrite(self, op: Any, x: ir.Value, shape: ir.Value, image: ir.Value) -> Any:
        """Unflatten, then move channels first."""
        sizes = dims(image)
        assert sizes is not None
        # The number of channels is spelled out: `shape` may say 0, the size at the same place.
        kept = op.Gather(shape, op.Constant(value_ints=[0, 2, 3]))
        unflat = op.Reshape(x, op.Concat(kept, op.Constant(value_ints=[sizes[1]]), axis=0))
        unflat.shape, unflat.type = ir.Shape([sizes[0], sizes[2], sizes[3], sizes[1]]), x.type
        return op.Transpose(unflat, perm=[0, 3, 1, 2])


class BiasAfterReshape(Rule):
    """Reshape(x + bias, shape) -> Reshape(x, shape) + bias, where the last axis stays as it is.

    Shapes: x (..., C), bias (C,). The bias comes next to the residual, where one kernel adds both.
    """

    def pattern(self, op: Any, x: Any, bias: Any, shape: Any) -> Any:
        """A biased value, reshaped."""
        return op.Reshape(op.Add(x, bias), shape, _allow_other_attributes=True, _outputs=["reshaped"])

    def concerns(self, x: ir.Value, bias: ir.Value, **_: Any) -> bool:
        """What is added must be a constant; the other way round, it is taken for x."""
        return is_weight(bias) and not is_weight(x)

    def refuse(self, x: ir.Value, bias: ir.Value, reshaped: ir.Value, **_: Any) -> str | None:
        """The bias must be a constant vector along an axis that the reshape keeps."""
        channels = static_dim(x, -1)
        if not is_bias(bias, channels):
            return "what is added is no constant vector"
        if static_dim(reshaped, -1) != channels:
            return "the reshape changes the last axis"
        return None

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, shape: ir.Value, reshaped: ir.Value) -> Any:
        """Reshape, then add."""
        moved = op.Reshape(x, shape)
        moved.shape, moved.type = reshaped.shape, reshaped.type
        return op.Add(moved, bias)
