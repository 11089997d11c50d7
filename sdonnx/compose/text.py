"""The text graph: token ids to the hidden states that the denoiser attends to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.composer import INT64, Composer, give_out, input_of, tensor

__all__ = ["compose_text"]


def compose_text(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn a CLIP text encoder's graph into the text graph, in place.

    Inputs: `input_ids` (B,S), and `skips` (1) int64, how many of the last layers are left out (diffusers'
    clip_skip). Output: `hidden_states` (B,S,D): what that layer gives, through the final norm.

    Where the layers cannot be told apart in the graph, there is no input `skips`, and the output is the last
    layer's.

    Args:
        model: the optimized text encoder: `input_ids -> last_hidden_state, pooler_output`.
        config: its configuration, for `num_hidden_layers`.
    """
    graph = model.graph
    output = next(value for value in graph.outputs if value.name == "last_hidden_state")
    shape = output.shape
    graph.outputs.clear()
    output.name = "last_layer"
    sums = _sums_of_layers(graph, output, config)
    add = Composer(model, before=False)
    inputs = [input_of(graph, "input_ids")]
    if sums is not None:
        final = output.producer()
        assert final is not None
        skips = tensor("skips", INT64, [1])
        inputs.append(skips)
        # The last layer first, so that the number to leave out is the index.
        layers = [add.op("Unsqueeze", value, add.integers(0)) for value in reversed(sums)]
        layer = add.op("Gather", add.op("Concat", *layers, axis=0), skips, axis=0)
        chosen = add.op("Squeeze", layer, add.integers(0))
        epsilon = final.attributes.get_float("epsilon", 1e-12)
        output = add.op("LayerNormalization", chosen, final.inputs[2], final.inputs[3], axis=-1, epsilon=epsilon)
    give_out(graph, output, "hidden_states", shape)
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.name = "text"


def _sums_of_layers(graph: ir.Graph, last: ir.Value, config: Mapping[str, Any]) -> list[ir.Value] | None:
    """Return what each layer leaves in the residual stream, the first layer first; None where it is not told.

    A layer has two norms. Fused, each but the very first is a SkipLayerNormalization whose fourth output is the
    stream; the one behind a layer's second addition is the next layer's first, or the final norm.
    """
    norms = [node for node in graph if node.op_type == "SkipLayerNormalization"]
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or len(norms) != 2 * layers or last.producer() is not norms[-1]:
        return None
    sums = []
    for before, norm in zip(norms[::2], norms[1::2], strict=True):
        stream = _stream(before)
        if len(norm.inputs) < 4 or norm.inputs[2] is None or norm.inputs[3] is None or stream not in norm.inputs[:2]:
            return None
        sums.append(_stream(norm))
    return sums


def _stream(norm: ir.Node) -> ir.Value:
    """Return the sum that a SkipLayerNormalization normalizes, its fourth output."""
    norm.resize_outputs(max(len(norm.outputs), 4))
    stream = norm.outputs[3]
    if stream.type is None:
        stream.type, stream.shape = norm.outputs[0].type, norm.outputs[0].shape
    return stream
