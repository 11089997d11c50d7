"""Served graphs of ControlNets and T2I-Adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.compose.call_row import read_call_row
from sdonnx.compose.graph_builder import (
    INT64,
    GraphBuilder,
    add_output,
    declared_input,
    graph_input,
    new_input,
    remove_unused_nodes,
    repeat_rows,
    replace_input,
    widen_interface,
)
from sdonnx.compose.precompute import hoist_step_invariants
from sdonnx.compose.residuals import TO_CHANNELS_FIRST, TO_CHANNELS_LAST, is_channels_last, residual_shape
from sdonnx.compose.timesteps import tabulate_timesteps
from sdonnx.graph.edit import dtype_of, input_of
from sdonnx.models import abi
from sdonnx.models.unet_residuals import controlnet_residuals
from sdonnx.samplers import STATE_ROWS

__all__ = ["compose_adapt", "compose_control"]

_PER_STEP_INPUTS = {"sample", "timestep", abi.CONDITION_SCALES}


def compose_control(model: ir.Model, config: Mapping[str, Any], *, adds: bool) -> dict[str, ir.Model]:
    """Turn a ControlNet's graph into its served graphs, in place, and return them by file name.

    Inputs, with B images, G copies of each (2 with guidance) and K residuals:

    - `state`, `parameters`, `step_index`: as in the step graph, which runs after this graph
    - `control_factors` (calls, 1 + G*K + N) float32: a row for each call. The first number is 1 to add to the residuals
      of the ControlNets before, or 0 to replace them. The next ones are the weights of the residuals for each copy. The
      last ones are the weights of the N images of a ControlNet-Union.
    - `encoder_hidden_states` (G*B,S,D), `control_image` and the other conditioning inputs, unchanged
    - `residual.k`: the residuals of the ControlNets before, if it `adds`

    Outputs: `new_residual.k`, which may overwrite `residual.k`: the sum of both.

    Args:
        model: the optimized ControlNet.
        config: its configuration.
        adds: whether it may run after another ControlNet.
    """
    graph, spec = model.graph, abi.CONTROL
    sizes = {"channels": int(config["in_channels"]), "state_rows": STATE_ROWS}
    state, parameters, step_index, factors = (
        declared_input(spec.input(name), sizes)
        for name in (abi.STATE, abi.PARAMETERS, abi.STEP_INDEX, abi.CONTROL_FACTORS)
    )
    hidden, sample = graph_input(graph, abi.ENCODER_HIDDEN_STATES), graph_input(graph, "sample")
    conditioning = [value for value in graph.inputs if value.name not in _PER_STEP_INPUTS]
    add = GraphBuilder(model, before=True)
    call = read_call_row(add, parameters, step_index)
    latents = add.op("Gather", state, add.index(0), axis=0)
    image = add.cast(add.op("Mul", latents, call.scale), dtype_of(sample))
    batch = add.op("Shape", latents, dtype=INT64, start=0, end=1)
    copies = add.op("Div", add.op("Shape", hidden, dtype=INT64, start=0, end=1), batch)
    repeated = repeat_rows(add, image, copies)
    repeated.shape = sample.shape
    row = add.op("Gather", factors, call.index, axis=0)
    count = len(graph.outputs)
    weights = add.op("Mul", copies, add.integers(count))
    end = add.op("Add", weights, add.integers(1))
    if any(value.name == abi.CONDITION_SCALES for value in graph.inputs):
        most = add.integers(np.iinfo(np.int64).max)
        columns = add.op("Slice", row, end, most, add.integers(1))
        scales = add.op("Reshape", columns, add.integers(-1))
        scales.shape = ir.Shape(["conditions"])
        replace_input(graph, abi.CONDITION_SCALES, scales)
    replace_input(graph, "sample", repeated)
    replace_input(graph, "timestep", call.timestep)
    # One weight for each row and residual: (G*K) -> (G,1,K) -> (G,B,K) -> (G*B,K).
    by_copy = add.op("Reshape", add.op("Slice", row, add.integers(1), end, add.integers(1)), add.integers(-1, 1, count))
    by_row = add.op("Expand", by_copy, add.op("Concat", add.integers(1), batch, add.integers(1), axis=0))
    by_row = add.cast(add.op("Reshape", by_row, add.integers(-1, count, 1, 1)), dtype_of(sample))
    is_added = add.op("Greater", add.columns(row, 0, 1), add.number(0.5, "half"), dtype=ir.DataType.BOOL)
    before = _add_outputs(model, config, by_row, is_added, adds=adds)
    graph.inputs.clear()
    graph.inputs.extend([state, parameters, step_index, factors, *conditioning, *before])
    graph.name = spec.name
    tabulate_timesteps(model, call.timestep, call.timesteps, call.index, conditioning)
    remove_unused_nodes(graph)
    precompute = hoist_step_invariants(model, [str(value.name) for value in conditioning])
    if precompute is None:
        return {spec.file: model}
    precompute.graph.name = abi.CONTROL_PRECOMPUTE.name
    return {spec.file: model, abi.CONTROL_PRECOMPUTE.file: precompute}


def _add_outputs(
    model: ir.Model, config: Mapping[str, Any], weights: ir.Value, is_added: ir.Value, *, adds: bool
) -> list[ir.Value]:
    """Multiply the residuals by their weights (G*B,K,1,1), and return inputs for the residuals before, if it `adds`."""
    graph = model.graph
    last = is_channels_last(graph)
    found = [str(value.name) for value in graph.outputs], list(graph.outputs)
    numbered = {int(name.removeprefix(abi.RESIDUAL)): value for name, value in zip(*found, strict=True)}
    graph.outputs.clear()
    add = GraphBuilder(model, before=False)
    before = []
    for number, residual in enumerate(controlnet_residuals(config)):
        value = numbered[number]
        value.name = f"unweighted.{number}"
        if last:
            value = _channels_last(add, value)
        chosen = add.op("Gather", weights, add.index(number), axis=1)  # (G*B,1,1)
        total = add.op("Mul", value, add.op("Unsqueeze", chosen, add.integers(3)))
        shape = residual_shape(residual, channels_last=last)
        if adds:
            source = new_input(f"{abi.RESIDUAL}{number}", dtype_of(value), shape)
            before.append(source)
            kept = add.op("Where", is_added, source, add.zero(dtype_of(value)), dtype=dtype_of(value))
            total = add.op("Add", total, kept)
        add_output(graph, total, f"{abi.NEW_RESIDUAL}{number}", shape)
    return before


def _channels_last(add: GraphBuilder, value: ir.Value) -> ir.Value:
    """Return an image with channels last: the value that was transposed to channels first, or a new transposition."""
    node = value.producer()
    is_transposed = node is not None and node.op_type == "Transpose"
    if node is not None and is_transposed and tuple(node.attributes.get_ints("perm")) == TO_CHANNELS_FIRST:
        return input_of(node, 0)
    return add.op("Transpose", value, perm=TO_CHANNELS_LAST)


def compose_adapt(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Make the inputs and outputs of a T2I-Adapter float32, in place: the host adds residuals of several adapters.

    Input: `control_image` (I,C,H,W). Outputs: `residual.k`, channels first.

    Args:
        model: the optimized adapter.
        config: its configuration, unused.
    """
    del config
    widen_interface(model)
    model.graph.name = abi.ADAPT.name
