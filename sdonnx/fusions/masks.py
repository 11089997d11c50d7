"""Causal masks, however they are computed -> Attention's attribute."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sdonnx.graph.edit import dims
from sdonnx.graph.masks import is_causal
from sdonnx.graph.match import Rule, same_dims

__all__ = ["CausalMaskToAttribute"]


class CausalMaskToAttribute(Rule):
    """Attention(q, k, v, [j <= i]) -> Attention(q, k, v, is_causal=1).

    Shapes: q, k, v (B,N,S,H), mask (S,S) or (1 or B,1,S,S), of booleans or of numbers to add: 0 where
    j <= i and -inf, or a very low number, elsewhere.
    """

    keeps_nodes = True  # one mask serves every layer

    def pattern(self, op: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        """An attention with a mask."""
        return op.Attention(q, k, v, mask, _allow_other_attributes=True, _outputs=["attention"])

    def refuse(self, q: ir.Value, k: ir.Value, mask: ir.Value, **_: Any) -> str | None:
        """The mask must be the lower triangle, and not one element for all."""
        sizes, queries, keys = dims(mask), dims(q), dims(k)
        if sizes is None or queries is None or keys is None or not same_dims(sizes[-2:], (queries[-2], keys[-2])):
            return "the mask is not known to be causal"
        return None if is_causal(mask) else "the mask is not known to be causal"

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, attention: ir.Value, **_: Any) -> Any:
        """Say it by the attribute."""
        node = attention.producer()
        assert node is not None
        attributes = {name: value for name, value in node.attributes.items() if name != "is_causal"}
        return op.Attention(q, k, v, **attributes, is_causal=1)
