"""The step graph and the decode graph: what the run-time replays.

Both are built around an optimized component and read its weight file; they add no weights.

- step: batch doubling for guidance, the denoiser, guidance and the sampler's update. A sampler is a
  matrix per call (`sdonnx.samplers`), so one graph serves all of them and the host only replays it.
- decode: scaling, the VAE's decoder, and pixels as bytes, so that only bytes leave the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.errors import FolderError
from sdonnx.graph.edit import constant
from sdonnx.samplers import STATE_ROWS

__all__ = ["DECODE_MODEL", "ROW_HEADER", "STEP_MODEL", "compose_decode", "compose_step"]

STEP_MODEL = "step.onnx"
DECODE_MODEL = "decode.onnx"

# A row of the parameter table: index of the next row, timestep, input scale, then the matrix.
ROW_HEADER = 3

_FLOAT, _INT64, _UINT8 = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.UINT8


class _Composer:
    """Adds nodes before or after those of a graph."""

    def __init__(self, model: ir.Model, *, before: bool) -> None:
        self.graph = model.graph
        self._anchor = next(iter(model.graph)) if before else None

    def op(
        self, op_type: str, *inputs: ir.Value | None, dtype: ir.DataType | None = None, **attributes: Any
    ) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes)
        kind = dtype if dtype is not None else next(value.dtype for value in inputs if value is not None)
        if kind is not None:
            node.outputs[0].type = ir.TensorType(kind)
        if self._anchor is not None:
            self._anchor.prepend(node)
        else:
            self.graph.append(node)
        return node.outputs[0]

    def integers(self, *values: int) -> ir.Value:
        name = "integers_" + "_".join(str(value).replace("-", "m") for value in values)
        return constant(self.graph, values, np.int64, name)

    def index(self, value: int) -> ir.Value:
        return constant(self.graph, value, np.int64, f"index_{value}")

    def number(self, value: float, name: str) -> ir.Value:
        return constant(self.graph, value, np.float32, name)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return value if value.dtype == dtype else self.op("Cast", value, dtype=dtype, to=dtype)

    def columns(self, row: ir.Value, start: int, end: int) -> ir.Value:
        return self.op("Slice", row, self.integers(start), self.integers(end), self.integers(1))


def _tensor(name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _take_over(graph: ir.Graph, name: str, source: ir.Value) -> None:
    """Let the nodes that read the graph's input `name` read `source`, and drop the input."""
    value = next(value for value in graph.inputs if value.name == name)
    value.replace_all_uses_with(source)
    graph.inputs.remove(value)


def compose_step(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn a denoiser's graph into the step graph, in place.

    Inputs, with R = STATE_ROWS and G = 2 with guidance, 1 without:

    - `state` (R,B,C,H,W) float32: row 0 the latents, the rest the sampler's history
    - `noise` (B,C,H,W) float32: fresh noise, for samplers that add some
    - `parameters` (calls, P) float32: a row for each call: index of the next row, timestep, input scale,
      matrix (R, R+1+G) in row-major order
    - `call` (1) int64: the row of this call
    - `encoder_hidden_states` (G*B,S,D): unconditional prompts first

    Outputs: `new_state`, as `state`, and `next_call`, as `call`. Either may be written over its
    input: every node that reads the input comes, by data, before the one that writes the output.

    Args:
        model: the optimized denoiser: `sample, timestep, encoder_hidden_states -> out_sample`.
        config: its configuration.
    """
    graph = model.graph
    channels = int(config["in_channels"])
    if config.get("out_channels", channels) != channels:
        raise FolderError(
            f"the denoiser predicts {config['out_channels']} channels of {channels}",
            "one prediction for each latent channel",
            "use a pipeline whose denoiser does not learn the variance",
        )
    state = _tensor("state", _FLOAT, [STATE_ROWS, "batch", channels, "height", "width"])
    noise = _tensor("noise", _FLOAT, ["batch", channels, "height", "width"])
    parameters = _tensor("parameters", _FLOAT, ["calls", "row"])
    call = _tensor("call", _INT64, [1])
    hidden = next(value for value in graph.inputs if value.name == "encoder_hidden_states")
    sample = next(value for value in graph.inputs if value.name == "sample")
    assert sample.dtype is not None

    add = _Composer(model, before=True)
    row = add.op("Gather", parameters, call, axis=0)
    timestep = add.op("Reshape", add.columns(row, 1, 2), add.integers(1))
    scale = add.op("Reshape", add.columns(row, 2, 3), add.integers(1))
    latents = add.op("Gather", state, add.index(0), axis=0)
    scaled = add.op("Mul", latents, scale)
    # G copies: the batch of the prompts over that of the latents.
    batch = add.op("Shape", noise, dtype=_INT64, start=0, end=1)
    copies = add.op("Div", add.op("Shape", hidden, dtype=_INT64, start=0, end=1), batch)
    sizes = add.op("Concat", copies, add.op("Shape", noise, dtype=_INT64), axis=0)
    repeated = add.op("Expand", scaled, sizes)
    flat = add.op("Concat", add.integers(-1), add.op("Shape", noise, dtype=_INT64, start=1), axis=0)
    doubled = add.cast(add.op("Reshape", repeated, flat), sample.dtype)
    _take_over(graph, "sample", doubled)
    _take_over(graph, "timestep", timestep)

    prediction = graph.outputs[0]
    graph.outputs.clear()
    add = _Composer(model, before=False)
    wide = add.cast(prediction, _FLOAT)
    per_copy = add.op("Reshape", wide, add.op("Concat", copies, add.integers(-1), axis=0))
    rows = [
        add.op("Reshape", state, add.integers(STATE_ROWS, -1)),
        add.op("Reshape", noise, add.integers(1, -1)),
        per_copy,
    ]
    matrix = add.op("Reshape", add.columns(row, ROW_HEADER, np.iinfo(np.int64).max), add.integers(STATE_ROWS, -1))
    updated = add.op("MatMul", matrix, add.op("Concat", *rows, axis=0))
    new_state = add.op("Reshape", updated, add.op("Shape", state, dtype=_INT64))
    # From the row, not call + 1: it must not be written before the row was read.
    next_call = add.op("Cast", add.op("Reshape", add.columns(row, 0, 1), add.integers(1)), dtype=_INT64, to=_INT64)
    for value, name, like in ((new_state, "new_state", state), (next_call, "next_call", call)):
        value.name, value.shape = name, like.shape
        graph.outputs.append(value)
    graph.inputs.clear()
    graph.inputs.extend([state, noise, parameters, call, hidden])
    graph.name = "step"


def compose_decode(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn a VAE decoder's graph into the decode graph, in place.

    Input: `latents` (B,C,H,W) float32, as the sampler leaves them. Outputs: `images` (B,8H,8W,3)
    uint8, and `sample`, the same as float32 from 0 to 1. The arithmetic is that of diffusers'
    VaeImageProcessor: clamp(x / 2 + 0.5, 0, 1), then round(255 * x).

    Args:
        model: the optimized decoder: `latent_sample -> sample`.
        config: the VAE's configuration, for `scaling_factor` and `shift_factor`.
    """
    graph = model.graph
    latent_sample = graph.inputs[0]
    assert latent_sample.dtype is not None
    assert latent_sample.shape is not None
    latents = _tensor("latents", _FLOAT, ["batch", int(config["latent_channels"]), "height", "width"])
    add = _Composer(model, before=True)
    scaled = add.op("Div", latents, add.number(float(config.get("scaling_factor", 0.18215)), "scaling_factor"))
    if config.get("shift_factor") is not None:
        scaled = add.op("Add", scaled, add.number(float(config["shift_factor"]), "shift_factor"))
    _take_over(graph, latent_sample.name or "", add.cast(scaled, latent_sample.dtype))

    image = graph.outputs[0]
    graph.outputs.clear()
    image.name = None
    add = _Composer(model, before=False)
    last = image.producer()
    if last is not None and last.op_type == "Transpose" and last.attributes.get_ints("perm", ()) == (0, 3, 1, 2):
        pixels = last.inputs[0]
        assert pixels is not None
        graph.remove(last, safe=True)
    else:
        pixels = add.op("Transpose", image, perm=[0, 2, 3, 1])
    half, one = add.number(0.5, "half"), add.number(1.0, "one")
    shifted = add.op("Add", add.op("Mul", add.cast(pixels, _FLOAT), half), half)
    sample = add.op("Clip", shifted, add.number(0.0, "zero"), one)
    levels = add.op("Round", add.op("Mul", sample, add.number(255.0, "levels")))
    images = add.op("Cast", levels, dtype=_UINT8, to=_UINT8)
    for value, name in ((images, "images"), (sample, "sample")):
        value.name = name
        value.shape = ir.Shape(["batch", "image_height", "image_width", 3])
        graph.outputs.append(value)
    graph.inputs.clear()
    graph.inputs.append(latents)
    graph.name = "decode"
