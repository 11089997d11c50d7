"""Served graphs of encoders: text to hidden states, and CLIP's vision tower for image prompts and safety checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from sdonnx.compose.graph_builder import (
    INT64,
    GraphBuilder,
    add_output,
    declared_input,
    declared_shape,
    graph_input,
    widen_input,
    widen_interface,
)
from sdonnx.graph.edit import dtype_of, input_of, producer_node
from sdonnx.models import abi

__all__ = [
    "compose_image_prompt_encoder",
    "compose_image_prompt_projection",
    "compose_safety_check",
    "compose_second_text",
    "compose_text",
]

_LAYERS = "hidden_states."
_FIRST_LAYER = _LAYERS + "0"


def compose_text(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn a text encoder's graph into the text graph, in place.

    Inputs:

    - `input_ids` (B,S)
    - `attention_mask` (B,S), only of T5: 1 for tokens of the caption
    - `layer_index` (B) int64, only of CLIP: for each prompt the number of last layers to skip (diffusers' clip_skip,
      which does not apply to negative prompts), times B, plus the prompt's row

    Output: `hidden_states` (B,S,D): the output of that layer through the final norm. If the encoder has its layers'
    hidden states as outputs, it is the layer's input instead, which denoisers of such pipelines read.

    Where the layers cannot be identified in the graph, there is no input `layer_index`, and the output is the last
    layer's.

    Args:
        model: the optimized text encoder: `input_ids, ... -> last_hidden_state, ...`, and `hidden_states.i`.
        config: its configuration, for `num_hidden_layers`.
    """
    graph = model.graph
    outputs = {str(value.name): value for value in graph.outputs}
    if _FIRST_LAYER in outputs:
        chosen, layer_index = _layer_input(model, outputs)
        graph.outputs.clear()
        chosen.name = "chosen"
        add_output(graph, chosen, abi.HIDDEN_STATES, outputs[_FIRST_LAYER].shape)
        inputs = [graph_input(graph, abi.INPUT_IDS), layer_index]
    else:
        inputs = _add_normalized_output(model, outputs["last_hidden_state"], config)
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.name = abi.TEXT.name


def compose_second_text(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn the last text encoder of a pipeline with pooled prompts into a graph of all text conditioning, in place.

    Inputs:

    - `input_ids` (B,S), and `layer_index` (B) int64, as in `compose_text`
    - `positions` (B) int64: the position of each prompt's last token among the tokens of all prompts, row * S + column.
      The host computes it: ONNX Runtime has no CUDA kernel for the ArgMax that would (opset 12 and later).
    - `is_nonempty` (B) bool: where false, both outputs are zero (diffusers' `force_zeros_for_empty_prompt`)
    - `hidden_states_1` (B,S,D1): of the first text encoder, only where there is one

    Outputs: `hidden_states` (B,S,D1+D) and `text_embeds` (B,P).

    Args:
        model: the optimized text encoder: `input_ids -> text_embeds, last_hidden_state, hidden_states.i`.
        config: its configuration, with `text_encoder`'s under that key where there is one.
    """
    graph, spec = model.graph, abi.SECOND_TEXT
    outputs = {str(value.name): value for value in graph.outputs}
    pooled, last = outputs[abi.TEXT_EMBEDS], outputs["last_hidden_state"]
    positions = declared_input(spec.input(abi.POSITIONS))
    _pool_at(model, pooled, last, positions)
    chosen, layer_index = _layer_input(model, outputs)
    dtype = dtype_of(chosen)
    graph.outputs.clear()
    is_nonempty = declared_input(spec.input(abi.IS_NONEMPTY))
    inputs = [graph_input(graph, abi.INPUT_IDS), layer_index, positions, is_nonempty]
    add = GraphBuilder(model, before=False)
    width = int(config["hidden_size"])
    if "text_encoder" in config:
        first_width = int(config["text_encoder"]["hidden_size"])
        first = declared_input(spec.input(abi.FIRST_HIDDEN_STATES), {"hidden_size": first_width}, dtype)
        inputs.append(first)
        chosen = add.op("Concat", first, chosen, axis=2)
        width += first_width
    zero = add.zero(dtype)
    rows = add.op("Unsqueeze", is_nonempty, add.integers(1))
    states = add.op("Where", add.op("Unsqueeze", rows, add.integers(2)), chosen, zero, dtype=dtype)
    pooled.name = "projected"  # its name moves to the value behind the choice
    embeds = add.op("Where", rows, pooled, zero, dtype=pooled.dtype)
    add_output(
        graph, states, abi.HIDDEN_STATES, declared_shape(spec.output(abi.HIDDEN_STATES), {"joined_hidden_size": width})
    )
    add_output(graph, embeds, abi.TEXT_EMBEDS, pooled.shape)
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.name = spec.name


def _layer_input(model: ir.Model, outputs: Mapping[str, ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Return the hidden states that each prompt's layer reads, and the input that selects the layer."""
    add = GraphBuilder(model, before=False)
    layers = sorted((name for name in outputs if name.startswith(_LAYERS)), key=lambda name: int(name[len(_LAYERS) :]))
    layer_index = declared_input(abi.TEXT.input(abi.LAYER_INDEX))
    # The last layer's output is left out: no caller selects it.
    return _select_layer(add, [outputs[name] for name in reversed(layers[:-1])], layer_index), layer_index


def _select_layer(add: GraphBuilder, layers: Sequence[ir.Value], layer_index: ir.Value) -> ir.Value:
    """Return the hidden states of each prompt's layer; `layers` begins with the last one.

    GatherND with an index for each prompt cannot be used: ONNX Runtime's CUDA kernel copies sizes from the host at each
    run, from memory that is freed when a captured graph is replayed.
    """
    return add.op("Gather", add.op("Concat", *layers, axis=0), layer_index, axis=0)


def _pool_at(model: ir.Model, projected: ir.Value, last: ir.Value, positions: ir.Value) -> None:
    """Let the projection read the last hidden state at `positions` instead of the position that the graph computes."""
    projection = producer_node(projected)
    pooled = input_of(projection, 0)
    add = GraphBuilder(model, after=producer_node(last))
    width = add.op("Shape", last, dtype=INT64, start=2)
    rows = add.op("Reshape", last, add.op("Concat", add.integers(-1), width, axis=0))
    found = add.op("Gather", rows, positions, axis=0)
    projection.replace_input_with(0, add.cast(found, pooled.dtype) if pooled.dtype is not None else found)


def _add_normalized_output(model: ir.Model, output: ir.Value, config: Mapping[str, Any]) -> list[ir.Value]:
    """Make the output of each prompt's layer, through the final norm, the graph's output; return the graph's inputs."""
    graph, shape = model.graph, output.shape
    graph.outputs.clear()
    output.name = "last_layer"
    sums = _residual_streams(graph, output, config)
    add = GraphBuilder(model, before=False)
    inputs = list(graph.inputs)
    if sums is not None:
        final = producer_node(output)
        layer_index = declared_input(abi.TEXT.input(abi.LAYER_INDEX))
        inputs.append(layer_index)
        chosen = _select_layer(add, list(reversed(sums)), layer_index)
        epsilon = final.attributes.get_float("epsilon", 1e-12)
        output = add.op("LayerNormalization", chosen, final.inputs[2], final.inputs[3], axis=-1, epsilon=epsilon)
    add_output(graph, output, abi.HIDDEN_STATES, shape)
    return inputs


def _residual_streams(graph: ir.Graph, last: ir.Value, config: Mapping[str, Any]) -> list[ir.Value] | None:
    """Return the residual stream after each layer, the first layer first; None where layers cannot be identified.

    A layer has two norms. Fused, each but the very first is a SkipLayerNormalization with the stream as its fourth
    output; the one behind a layer's second addition is the next layer's first, or the final norm.
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


def compose_image_prompt_encoder(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Make the inputs and outputs of the image encoder float32, in place: the host prepares images, and has few.

    Input: `pixel_values` (I,3,S,S). Outputs: `image_embeds` (I,P), `penultimate_hidden_states` (I,L,D).

    Args:
        model: the optimized image encoder.
        config: its configuration, unused.
    """
    widen_interface(model)
    model.graph.name = abi.PROMPT.name


def compose_image_prompt_projection(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Make the inputs and outputs of the adapters' projections float32, in place.

    Inputs: `image_embeds.i` (I,L,W). Outputs: `ip_hidden_states.i` (I,T,D).

    Args:
        model: the optimized projections.
        config: their configuration, unused.
    """
    widen_interface(model)
    model.graph.name = abi.PROJECT.name


def compose_safety_check(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn a safety checker's graph into the check graph, in place.

    Input: `clip_input` (B,3,S,S) float32, prepared by CLIP's image processor. Output: `has_nsfw_concepts` (B) bool.
    The images themselves are no input: the caller blackens them.

    Args:
        model: the optimized safety checker: `clip_input, images -> out_images, has_nsfw_concepts`.
        config: its configuration, unused.
    """
    graph = model.graph
    flags = next(value for value in graph.outputs if value.name == abi.HAS_NSFW_CONCEPTS)
    shape = flags.shape
    graph.outputs.clear()
    clip_input = widen_input(model, abi.CLIP_INPUT)
    add_output(graph, flags, abi.HAS_NSFW_CONCEPTS, shape)
    # Only the nodes that blacken images read `images`; their outputs are unused now.
    graph.inputs.clear()
    graph.inputs.append(clip_input)
    graph.name = abi.SAFETY_CHECK.name
