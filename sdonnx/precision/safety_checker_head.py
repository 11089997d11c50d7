"""The head of a safety checker: the nodes that compare the image embedding with the concepts.

It compares cosine similarities with thresholds of three decimals. That is more precision than fp16 keeps in a norm or
in a sum of hundreds of products, so the head stays in float32.
"""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["decision_nodes"]

_DECIDED = "has_nsfw_concepts"
_PRODUCTS = frozenset({"MatMul", "Gemm"})


def decision_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes from the image embedding to the decision.

    Walking up from the output, the first matrix product computes the cosine similarities. The second one computes the
    embedding (`visual_projection` of diffusers' StableDiffusionSafetyChecker) and is not part of the head.

    Args:
        graph: the graph of a safety checker, with the output `has_nsfw_concepts`.
    """
    waiting = [(value, False) for value in graph.outputs if value.name == _DECIDED]
    found: set[ir.Node] = set()
    while waiting:
        value, below_cosines = waiting.pop()
        node = value.producer()
        if node is None or node in found:
            continue
        product = node.op_type in _PRODUCTS
        if product and below_cosines:
            continue
        found.add(node)
        waiting += [(each, product or below_cosines) for each in node.inputs if each is not None]
    return found
