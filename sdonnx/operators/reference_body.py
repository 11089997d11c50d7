"""Helpers for writing reference bodies."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["TO_NCHW", "TO_NHWC", "graph_of", "optional_input"]

TO_NCHW, TO_NHWC = [0, 3, 1, 2], [0, 2, 3, 1]
"""Permutations between (B,H,W,C) and (B,C,H,W)."""


def graph_of(node: ir.Node) -> ir.Graph:
    """Return the graph that a node is in; reference bodies are not inserted into functions."""
    graph = node.graph
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"{node.op_type} {node.name!r} is in {type(graph).__name__}, not in a graph")
    return graph


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input of a node, None where it is absent."""
    return node.inputs[index] if index < len(node.inputs) else None
