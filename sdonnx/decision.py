"""What of a safety checker's graph decides, once the image has been seen.

Cosines are compared with thresholds to three decimals, more than fp16 keeps of a norm or of a sum of
hundreds of products: this part stays in float32 when the rest is converted.
"""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["decision_nodes"]

_DECIDED = "has_nsfw_concepts"
_PRODUCTS = frozenset({"MatMul", "Gemm"})


def decision_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that the decision is computed by, down from the embedding of the image.

    Going up from the output, the first product gives the cosines and the second one the embedding
    (`visual_projection` of diffusers' StableDiffusionSafetyChecker), which belongs to the decision no more.

    Args:
        graph: a safety checker's, with the output `has_nsfw_concepts`.
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
