"""The text graphs: token ids to the hidden states that the denoiser attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from sdonnx.compose.composer import INT64, Composer, give_out, input_of, tensor

__all__ = ["compose_second_text", "compose_text"]

LAYERS = "hidden_states."
FIRST_LAYER = LAYERS + "0"


def compose_text(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn a text encoder's graph into the text graph, in place.

    Inputs: `input_ids` (B,S); of T5 `attention_mask` (B,S), 1 for tokens of the caption; of CLIP `layers` (B) int64:
    for each prompt how many of the last layers are left out (diffusers' clip_skip, which it does not apply to what is
    drawn away from), times B, plus its row. Output: `hidden_states` (B,S,D): what that layer gives, through the final
    norm; or, of an encoder that gives out its layers, what is given to that layer, as Stable Diffusion XL sees it.

    Where the layers cannot be told apart in the graph, there is no input `layers`, and the output is the last
    layer's.

    Args:
        model: the optimized text encoder: `input_ids, ... -> last_hidden_state, ...`, and `hidden_states.i`.
        config: its configuration, for `num_hidden_layers`.
    """
    graph = model.graph
    outputs = {str(value.name): value for value in graph.outputs}
    if FIRST_LAYER in outputs:
        chosen, layers = _layer_before(model, outputs)
        graph.outputs.clear()
        chosen.name = "chosen"
        give_out(graph, chosen, "hidden_states", outputs[FIRST_LAYER].shape)
        inputs = [input_of(graph, "input_ids"), layers]
    else:
        inputs = _normed(model, outputs["last_hidden_state"], config)
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.name = "text"


def compose_second_text(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn Stable Diffusion XL's last text encoder into a graph that gives all that the denoiser is told, in place.

    Inputs:

    - `input_ids` (B,S), and `layers` (B) int64, as of `compose_text`
    - `positions` (B) int64: of each prompt's last token among those of all prompts, row * S + column. It is the
      host that knows them: ONNX Runtime has no CUDA kernel for the ArgMax that looks for them (opset 12 and later).
    - `given` (B) bool: where it is false, the prompt counts as none, and both outputs are zero (diffusers'
      `force_zeros_for_empty_prompt`)
    - `hidden_states_1` (B,S,D1): of the encoder before; only where there is one

    Outputs: `hidden_states` (B,S,D1+D) and `text_embeds` (B,P).

    Args:
        model: the optimized text encoder: `input_ids -> text_embeds, last_hidden_state, hidden_states.i`.
        config: its configuration, with that of `text_encoder` where there is one.
    """
    graph = model.graph
    outputs = {str(value.name): value for value in graph.outputs}
    pooled, last = outputs["text_embeds"], outputs["last_hidden_state"]
    positions = tensor("positions", INT64, ["batch_size"])
    _pool_at(model, pooled, last, positions)
    chosen, layers = _layer_before(model, outputs)
    graph.outputs.clear()
    given = tensor("given", ir.DataType.BOOL, ["batch_size"])
    inputs = [input_of(graph, "input_ids"), layers, positions, given]
    add = Composer(model, before=False)
    width = int(config["hidden_size"])
    if "text_encoder" in config:
        first = tensor("hidden_states_1", chosen.dtype, ["batch_size", "sequence_length", _width(config)])
        inputs.append(first)
        chosen = add.op("Concat", first, chosen, axis=2)
        width += _width(config)
    none = add.zero(chosen.dtype)
    rows = add.op("Unsqueeze", given, add.integers(1))
    told = add.op("Where", add.op("Unsqueeze", rows, add.integers(2)), chosen, none, dtype=chosen.dtype)
    # A name is given anew: what had it is behind the choice now.
    pooled.name = "projected"
    embeds = add.op("Where", rows, pooled, none, dtype=pooled.dtype)
    give_out(graph, told, "hidden_states", ["batch_size", "sequence_length", width])
    give_out(graph, embeds, "text_embeds", pooled.shape)
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.name = "text_2"


def _layer_before(model: ir.Model, outputs: Mapping[str, ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Return what is given to each prompt's layer, and the input that chooses it."""
    add = Composer(model, before=False)
    layers = sorted((name for name in outputs if name.startswith(LAYERS)), key=lambda name: int(name[len(LAYERS) :]))
    chosen = tensor("layers", INT64, ["batch_size"])
    # The last layer's own output is not among them: nobody asks for it.
    return _chosen(add, [outputs[name] for name in reversed(layers[:-1])], chosen), chosen


def _chosen(add: Composer, layers: Sequence[ir.Value], chosen: ir.Value) -> ir.Value:
    """Return for each prompt what its layer holds, the last layer first.

    Not by a GatherND with a number for each prompt: ONNX Runtime's CUDA kernel copies sizes from the host at each run,
    from memory that is gone when a captured graph is replayed.
    """
    return add.op("Gather", add.op("Concat", *layers, axis=0), chosen, axis=0)


def _pool_at(model: ir.Model, projected: ir.Value, last: ir.Value, positions: ir.Value) -> None:
    """Let the projection read the last hidden state at the positions, in place of where the graph looks itself."""
    projection = projected.producer()
    assert projection is not None
    pooled = projection.inputs[0]
    assert pooled is not None
    producer = last.producer()
    assert producer is not None
    add = Composer(model, after=producer)
    width = add.op("Shape", last, dtype=INT64, start=2)
    rows = add.op("Reshape", last, add.op("Concat", add.integers(-1), width, axis=0))
    found = add.op("Gather", rows, positions, axis=0)
    projection.replace_input_with(0, add.cast(found, pooled.dtype) if pooled.dtype is not None else found)


def _width(config: Mapping[str, Any]) -> int:
    return int(config["text_encoder"]["hidden_size"])


def _normed(model: ir.Model, output: ir.Value, config: Mapping[str, Any]) -> list[ir.Value]:
    """Give out what a layer gives, through the final norm, and return the graph's inputs."""
    graph, shape = model.graph, output.shape
    graph.outputs.clear()
    output.name = "last_layer"
    sums = _sums_of_layers(graph, output, config)
    add = Composer(model, before=False)
    inputs = list(graph.inputs)
    if sums is not None:
        final = output.producer()
        assert final is not None
        layers = tensor("layers", INT64, ["batch_size"])
        inputs.append(layers)
        chosen = _chosen(add, list(reversed(sums)), layers)
        epsilon = final.attributes.get_float("epsilon", 1e-12)
        output = add.op("LayerNormalization", chosen, final.inputs[2], final.inputs[3], axis=-1, epsilon=epsilon)
    give_out(graph, output, "hidden_states", shape)
    return inputs


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
