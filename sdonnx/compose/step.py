"""The step graph: one call of the denoiser with guidance, the sampler's update and the mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.graph_builder import (
    FLOAT,
    INT64,
    GraphBuilder,
    add_output,
    declared_input,
    graph_input,
    remove_unused_nodes,
    repeat_rows,
    replace_input,
)
from sdonnx.compose.sharing import share_images
from sdonnx.compose.timesteps import read_call_row, tabulate_timesteps
from sdonnx.errors import FolderError
from sdonnx.graph.edit import dtype_of
from sdonnx.models import abi
from sdonnx.samplers import STATE_ROWS
from sdonnx.samplers.plans import HEADER, matrix_start

__all__ = ["compose_step"]


def compose_step(model: ir.Model, config: Mapping[str, Any], *, plain: bool = False) -> None:
    """Turn a denoiser's graph into the step graph, in place.

    Inputs, with R = STATE_ROWS and G = 2 with guidance, 1 without:

    - `state` (R,B,C,H,W) float32: row 0 the latents, the rest the sampler's history
    - `noise` (B,C,H,W) float32: fresh noise, for samplers that add it
    - `parameters` (calls, P) float32: a row for each call, see `sdonnx.samplers.plans`
    - `step_index` (1) int64: the row of this call
    - `encoder_hidden_states` (G*B,S,D): unconditional prompts first
    - `known_latents` (2,B,C,H,W) float32: clean latents of the known image, and noise for them
    - `keep_mask` (R,B,C,H,W) bool: where the known latents replace the computed state
    - `mask` (B,1,H,W), `masked_latents` (B,C,H,W) float32: only of denoisers that were trained to inpaint, which
      read them concatenated to the latents (diffusers: StableDiffusionInpaintPipeline with a UNet of 2C + 1 channels)
    - the denoiser's other conditioning inputs, unchanged: `text_embeds` (G*B,P) and `time_ids` (G*B,N) if it is
      conditioned on image sizes, `encoder_attention_mask` (G*B,S) if it masks padding, `timestep_cond`
      (G*B,W) if guidance is distilled into it

    Where the denoiser returns twice the channels, the second half is the learned variance, which no sampler here
    reads.

    Outputs: `new_state`, like `state`, and `next_step_index`, like `step_index`. Either may overwrite its input: every
    node that reads the input is, by data, before the node that writes the output.

    Args:
        model: the optimized denoiser: `sample, timestep, encoder_hidden_states, ... -> out_sample`.
        config: its configuration.
        plain: keep the denoiser as it is, so that values which it reads have the names of its inputs. Otherwise values
            that depend only on the timestep, or that the copies of an image share, are computed less often.

    Raises:
        FolderError: the denoiser's numbers of channels are not supported.
    """
    graph, spec = model.graph, abi.STEP
    channels, inpaints = _channels(config)
    sizes = {"channels": channels, "state_rows": STATE_ROWS}
    names = (abi.STATE, abi.NOISE, abi.PARAMETERS, abi.STEP_INDEX, abi.KNOWN_LATENTS, abi.KEEP_MASK)
    state, noise, parameters, step_index, known_latents, keep_mask = (
        declared_input(spec.input(name), sizes) for name in names
    )
    masks = [declared_input(spec.input(name), sizes) for name in (abi.MASK, abi.MASKED_LATENTS) if inpaints]
    hidden, sample = graph_input(graph, abi.ENCODER_HIDDEN_STATES), graph_input(graph, "sample")
    conditioning = [value for value in graph.inputs if value.name not in ("sample", "timestep", hidden.name)]

    add = GraphBuilder(model, before=True)
    call = read_call_row(add, parameters, step_index)
    latents = add.op("Gather", state, add.index(0), axis=0)
    image = add.op("Mul", latents, call.scale)
    if inpaints:
        image = add.op("Concat", image, *masks, axis=1)
    image = add.cast(image, dtype_of(sample))
    # G copies: the batch size of the prompts over the latents'.
    batch = add.op("Shape", noise, dtype=INT64, start=0, end=1)
    copies = add.op("Div", add.op("Shape", hidden, dtype=INT64, start=0, end=1), batch)
    repeated = repeat_rows(add, image, copies)
    repeated.shape = sample.shape
    image.shape = None if sample.shape is None else ir.Shape(["batch", *sample.shape.dims[1:]])
    replace_input(graph, "sample", repeated)
    replace_input(graph, "timestep", call.timestep)

    prediction = graph.outputs[0]
    graph.outputs.clear()
    add = GraphBuilder(model, before=False)
    new_state = _updated_state(
        add, config, channels, prediction, call.row, copies, state, noise, known_latents, keep_mask
    )
    add_output(graph, new_state, abi.NEW_STATE, state.shape)
    add_output(graph, call.next_index, abi.NEXT_STEP_INDEX, step_index.shape)
    graph.inputs.clear()
    graph.inputs.extend([state, noise, parameters, step_index, hidden, known_latents, keep_mask, *masks, *conditioning])
    graph.name = spec.name
    if not plain:
        tabulate_timesteps(model, call.timestep, call.timesteps, call.index, conditioning)
        share_images(model, image, repeated, copies, [hidden, *conditioning])
    remove_unused_nodes(graph)


def _updated_state(
    add: GraphBuilder,
    config: Mapping[str, Any],
    channels: int,
    prediction: ir.Value,
    row: ir.Value,
    copies: ir.Value,
    state: ir.Value,
    noise: ir.Value,
    known_latents: ir.Value,
    keep_mask: ir.Value,
) -> ir.Value:
    """Return where(keep_mask, weights @ known_latents, matrix @ [state, noise, predictions]) (R,B,C,H,W)."""
    if int(config.get("out_channels", channels)) != channels:
        prediction = add.op(
            "Slice", prediction, add.integers(0), add.integers(channels), add.integers(1), dtype=prediction.dtype
        )
    per_copy = add.op("Reshape", add.cast(prediction, FLOAT), add.op("Concat", copies, add.integers(-1), axis=0))
    rows = [
        add.op("Reshape", state, add.integers(STATE_ROWS, -1)),
        add.op("Reshape", noise, add.integers(1, -1)),
        per_copy,
    ]
    matrix = add.op("Reshape", add.columns(row, matrix_start()), add.integers(STATE_ROWS, -1))
    updated = add.op("MatMul", matrix, add.op("Concat", *rows, axis=0))
    weights = add.op("Reshape", add.columns(row, HEADER, matrix_start()), add.integers(STATE_ROWS, 2))
    kept = add.op("MatMul", weights, add.op("Reshape", known_latents, add.integers(2, -1)))
    flat_mask = add.op("Reshape", keep_mask, add.integers(STATE_ROWS, -1))
    chosen = add.op("Where", flat_mask, kept, updated, dtype=FLOAT)
    return add.op("Reshape", chosen, add.op("Shape", state, dtype=INT64))


def _channels(config: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the number of latent channels, and whether the denoiser was trained to inpaint."""
    inputs = int(config["in_channels"])
    outputs = int(config.get("out_channels", inputs))
    if outputs in (inputs, 2 * inputs):
        return inputs, False
    if inputs == 2 * outputs + 1:
        return outputs, True
    raise FolderError(
        f"the denoiser has {inputs} input channels and {outputs} output channels",
        f"{outputs} input channels, half of that for a learned variance, or {2 * outputs + 1} for inpainting",
        "use a pipeline whose denoiser reads latents only, or latents with a mask and a masked image",
    )
