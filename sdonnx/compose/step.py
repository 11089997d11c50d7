"""The step graph: one call of the denoiser and all that the sampler does around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.composer import FLOAT, INT64, Composer, give_out, input_of, prune, repeated_rows, take_over, tensor
from sdonnx.compose.sharing import share_images
from sdonnx.compose.timesteps import CALLS, tabulate_timesteps
from sdonnx.errors import FolderError
from sdonnx.samplers import STATE_ROWS
from sdonnx.samplers.parameters import HEADER, matrix_start

__all__ = ["compose_step"]

_BOOL = ir.DataType.BOOL


def compose_step(model: ir.Model, config: Mapping[str, Any], *, plain: bool = False) -> None:
    """Turn a denoiser's graph into the step graph, in place.

    Inputs, with R = STATE_ROWS and G = 2 with guidance, 1 without:

    - `state` (R,B,C,H,W) float32: row 0 the latents, the rest the sampler's history
    - `noise` (B,C,H,W) float32: fresh noise, for samplers that add some
    - `parameters` (calls, P) float32: a row for each call, see `sdonnx.samplers.parameters`
    - `call` (1) int64: the row of this call
    - `encoder_hidden_states` (G*B,S,D): unconditional prompts first
    - `background` (2,B,C,H,W) float32: clean latents and the noise that goes with them
    - `keeps` (R,B,C,H,W) bool: where the background stands in place of what was computed
    - `mask` (B,1,H,W), `masked_latents` (B,C,H,W) float32: only of denoisers that were trained to inpaint, which
      see them beside the latents (diffusers: StableDiffusionInpaintPipeline with a UNet of 2C + 1 channels)
    - what else the denoiser is told, as it takes it: of Stable Diffusion XL `text_embeds` (G*B,P) and `time_ids`
      (G*B,N), of PixArt `encoder_attention_mask` (G*B,S)

    Where the denoiser gives twice the channels, the second half is the variance that it learned, which no sampler here
    reads.

    Outputs: `new_state`, as `state`, and `next_call`, as `call`. Either may be written over its
    input: every node that reads the input comes, by data, before the one that writes the output.

    Args:
        model: the optimized denoiser: `sample, timestep, encoder_hidden_states, ... -> out_sample`.
        config: its configuration.
        plain: leave the denoiser as it is, so that what it is given has the names of its inputs. Otherwise what is made
            of the timestep alone, and what the copies of an image share, is computed less often.

    Raises:
        FolderError: the denoiser takes or gives channels that are not known.
    """
    graph = model.graph
    channels, inpaints = _channels(config)
    latent_shape: list[int | str] = ["batch", channels, "height", "width"]
    state = tensor("state", FLOAT, [STATE_ROWS, *latent_shape])
    noise = tensor("noise", FLOAT, latent_shape)
    parameters = tensor("parameters", FLOAT, [CALLS, "row"])
    call = tensor("call", INT64, [1])
    background = tensor("background", FLOAT, [2, *latent_shape])
    keeps = tensor("keeps", _BOOL, [STATE_ROWS, *latent_shape])
    seen: list[ir.Value] = []
    if inpaints:
        seen = [tensor("mask", FLOAT, ["batch", 1, "height", "width"]), tensor("masked_latents", FLOAT, latent_shape)]
    hidden = input_of(graph, "encoder_hidden_states")
    taken = {"sample", "timestep", hidden.name}
    told = [value for value in graph.inputs if value.name not in taken]
    sample = input_of(graph, "sample")
    assert sample.dtype is not None

    add = Composer(model, before=True)
    # The only node that reads the call: the next one may be written over it, which comes from the row.
    row = add.op("Gather", parameters, call, axis=0)
    next_call = add.op("Cast", add.op("Reshape", add.columns(row, 0, 1), add.integers(1)), dtype=INT64, to=INT64)
    this_call = add.op("Sub", next_call, add.integers(1))
    timestep = add.op("Reshape", add.columns(row, 1, 2), add.integers(1))
    timesteps = add.op("Reshape", add.columns(parameters, 1, 2), add.integers(-1))
    scale = add.op("Reshape", add.columns(row, 2, 3), add.integers(1))
    latents = add.op("Gather", state, add.index(0), axis=0)
    image = add.op("Mul", latents, scale)
    if inpaints:
        image = add.op("Concat", image, *seen, axis=1)
    image = add.cast(image, sample.dtype)
    # G copies: the batch of the prompts over that of the latents.
    batch = add.op("Shape", noise, dtype=INT64, start=0, end=1)
    copies = add.op("Div", add.op("Shape", hidden, dtype=INT64, start=0, end=1), batch)
    repeated = repeated_rows(add, image, copies)
    repeated.shape = sample.shape
    image.shape = None if sample.shape is None else ir.Shape(["batch", *sample.shape.dims[1:]])
    timestep.shape, timesteps.shape = ir.Shape([1]), ir.Shape([CALLS])
    take_over(graph, "sample", repeated)
    take_over(graph, "timestep", timestep)

    prediction = graph.outputs[0]
    graph.outputs.clear()
    add = Composer(model, before=False)
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
    kept = add.op("MatMul", weights, add.op("Reshape", background, add.integers(2, -1)))
    flat_keeps = add.op("Reshape", keeps, add.integers(STATE_ROWS, -1))
    chosen = add.op("Where", flat_keeps, kept, updated, dtype=FLOAT)
    new_state = add.op("Reshape", chosen, add.op("Shape", state, dtype=INT64))
    give_out(graph, new_state, "new_state", state.shape)
    give_out(graph, next_call, "next_call", call.shape)
    graph.inputs.clear()
    graph.inputs.extend([state, noise, parameters, call, hidden, background, keeps, *seen, *told])
    graph.name = "step"
    if not plain:
        tabulate_timesteps(model, timestep, timesteps, this_call, told)
        share_images(model, image, repeated, copies, [hidden, *told])
    prune(graph)


def _channels(config: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the number of latent channels, and whether the denoiser was trained to inpaint."""
    given = int(config["in_channels"])
    made = int(config.get("out_channels", given))
    if made in (given, 2 * given):
        return given, False
    if given == 2 * made + 1:
        return made, True
    raise FolderError(
        f"the denoiser takes {given} channels and gives {made}",
        f"{made} in, half of that where it learned the variance, or {2 * made + 1} where it was trained to inpaint",
        "use a pipeline whose denoiser takes no image beside the latents",
    )
