"""Scaling of the residual stream of an encoder with RMS norms, so that it fits into the range of fp16.

The feed-forward layers of T5 produce values beyond 65504, the maximum of fp16 (transformers keeps their last matmul in
float32: `T5PreTrainedModel._keep_in_fp32_modules`). Every reader of the stream is a norm that divides by the root mean
square of the stream: RMSNorm(s x) with epsilon s^2 e equals RMSNorm(x) with epsilon e. So each term of the stream is
multiplied by a power of two, which is exact, within the matmul that computes the term.
"""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, derived_initializer, input_of, insert, replace, tensor_of
from sdonnx.graph.tensors import read

__all__ = ["scale_residual_stream"]

_FUSED = "SkipSimplifiedLayerNormalization"
_PLAIN = "RMSNormalization"


def scale_residual_stream(model: ir.Model, scale: float) -> str | None:
    """Scale the residual stream of a fused graph in place.

    Args:
        model: an encoder with RMSNormalization and SkipSimplifiedLayerNormalization as norms.
        scale: a power of two.

    Returns:
        None, or the reason why the graph was left unchanged.
    """
    graph = model.graph
    norms = [node for node in graph if node.op_type in (_FUSED, _PLAIN)]
    if not norms or norms[0].op_type != _PLAIN:
        return "the graph does not begin with an RMS norm"
    first = norms[0].inputs[0]
    embedding = None if first is None else first.producer()
    if first is None or embedding is None or embedding.op_type != "Gather" or not _is_own(embedding.inputs[0]):
        return "the input of the first norm is not an embedding"
    streams = {first}
    branches: list[ir.Node] = []
    for norm in norms[1:]:
        added = [value for value in norm.inputs[:2] if value not in streams]
        matmul = added[0].producer() if len(added) == 1 and added[0] is not None else None
        if norm.op_type != _FUSED or matmul is None or len(norm.inputs) != 3:
            return f"{norm.name} does not add one value to the stream"
        if matmul.op_type != "MatMul" or matmul.domain or len(matmul.outputs[0].uses()) != 1:
            return f"the value that {norm.name} adds is not a matmul"
        branches.append(matmul)
        if len(norm.outputs) > 3:  # the sum is an output, which the next norms read
            streams.add(norm.outputs[3])
    for stream in streams:
        if stream.is_graph_output() or any(use.node not in norms for use in stream.uses()):
            return f"{stream.name} is read by other operators than norms"
    for matmul in branches:
        a, b = matmul.inputs
        shape = matmul.outputs[0].shape
        replace(
            matmul.outputs[0],
            insert(matmul, "FusedMatMul", [a, b], {"alpha": scale}, domain=MICROSOFT, shape=shape),
        )
        graph.remove(matmul, safe=True)
    _scale_table(graph, embedding, scale)
    for norm in norms:
        epsilon = norm.attributes.get_float("epsilon", 1e-5)
        norm.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon * scale**2)
    return None


def _is_own(table: ir.Value | None) -> bool:
    return table is not None and table.is_initializer() and len(table.uses()) == 1


def _scale_table(graph: ir.Graph, embedding: ir.Node, scale: float) -> None:
    table = input_of(embedding, 0)
    tensor = tensor_of(table)
    shape = tuple(tensor.shape.numpy())
    scaled = derived_initializer(
        graph, f"{table.name}.scaled", lambda: read(tensor) * tensor.dtype.numpy().type(scale), tensor.dtype, shape
    )
    embedding.replace_input_with(0, scaled)
    graph.initializers.pop(str(table.name))
