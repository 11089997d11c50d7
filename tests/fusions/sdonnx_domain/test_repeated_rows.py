"""Our own operators read the rows that a graph copies for each prompt where they are."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import graph
from support.replacements import swapped

COPIES = """s0 = Shape(r) c0 = Concat<axis=0>(two, s0) e = Expand(r, c0)
    s1 = Shape<start=1>(r) c1 = Concat<axis=0>(last, s1) u = Reshape(e, c1)"""
WIDTHS = {"MultiHeadAttention": 80, "SkipLayerNormalization": 64, "Concat": 64}
BODIES = {
    "MultiHeadAttention": "y = com.microsoft.MultiHeadAttention<num_heads=1>(u, x, x)",
    "SkipLayerNormalization": "y, , , t = com.microsoft.SkipLayerNormalization<epsilon=0.001>(x, u, g, g, g)",
    "Concat": "y = Concat<axis=3>(x, u)",
}
OPERATORS = {"MultiHeadAttention": "Attention", "SkipLayerNormalization": "SkipLayerNorm", "Concat": "ConcatChannels"}


def copies(op_type: str, copying: str = COPIES, body: str = "") -> ir.Model:
    """Return an operator of x and of two copies u of r, which has one row."""
    width = WIDTHS[op_type]
    rows, short = ("B,S,H", "1,S,H") if op_type == "Concat" else ("B,S", "1,S")
    if op_type == "MultiHeadAttention":
        rows, short = "B,N", "1,S"  # another number of keys than of queries
    queries = "B,S" if op_type == "MultiHeadAttention" else rows
    outputs = f"float16[{queries},{2 * width if op_type == 'Concat' else width}] y"
    if op_type == "SkipLayerNormalization":
        outputs += f", float16[{rows},{width}] t"
    return graph(
        f"float16[{rows},{width}] x, float16[{short},{width}] r",
        outputs,
        f"{copying} {body or BODIES[op_type]}",
        f"float16[{queries},{width}] u",
        two=np.array([2]),
        last=np.array([-1]),
        g=np.ones(width, np.float16),
    )


@pytest.mark.parametrize("op_type", BODIES)
def test_copies_are_not_made(op_type: str) -> None:
    after, fired = swapped(copies(op_type))
    assert fired == {f"{op_type}ToOwn{OPERATORS[op_type]}": 1}
    (node,) = after.graph
    assert "r" in [value.name for value in node.inputs if value is not None]


def test_terms_of_a_norm_may_be_in_either_order() -> None:
    body = "y, , , t = com.microsoft.SkipLayerNormalization<epsilon=0.001>(u, x, g, g, g)"
    after, fired = swapped(copies("SkipLayerNormalization", body=body))
    assert fired == {"SkipLayerNormalizationToOwnSkipLayerNorm": 1}
    assert [value.name for value in after.graph[0].inputs[:2] if value is not None] == ["x", "r"]


@pytest.mark.parametrize(
    ("copying", "query"),
    [
        (COPIES.replace("Expand(r, c0)", "Expand(h, c0)").replace("s0 =", "h = Tanh(r) s0 ="), "h"),
        (COPIES.replace("u = Reshape", "h = Reshape") + " u = Tanh(h)", "u"),
        (COPIES.replace("c0 = Concat<axis=0>(two, s0)", "c0 = Constant<value_ints=[2, 1, 6, 80]>()"), "u"),
        ("u = Concat<axis=0>(r, r)", "u"),
    ],
    ids=["of a computed value", "then computed", "constant sizes", "by Concat"],
)
def test_a_query_is_read_where_it_is_only_if_copies_of_it_are(copying: str, query: str) -> None:
    after, _ = swapped(copies("MultiHeadAttention", copying))
    (node,) = [node for node in after.graph if node.op_type == "Attention"]
    assert node.inputs[0] is not None
    assert node.inputs[0].name == query
