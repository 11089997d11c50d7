"""Served graphs of ControlNets and T2I-Adapters, and the denoiser that adds their residuals.

The graph with residuals is made from the fused graph of the UNet, so that both have the same weights and the same
step-invariant values, and that the graph without residuals is the one that a pipeline without ControlNets has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

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
from sdonnx.compose.timesteps import read_call_row, tabulate_timesteps
from sdonnx.errors import FolderError
from sdonnx.graph.edit import MICROSOFT, dims, dtype_of, input_of, insert, producer_node
from sdonnx.models import abi
from sdonnx.models.control_networks import Residual, controlnet_residuals
from sdonnx.samplers import STATE_ROWS

__all__ = [
    "add_residuals",
    "compose_adapt",
    "compose_control",
]

_TO_CHANNELS_FIRST, _TO_CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)
"""Permutations of the axes of images."""


def _is_channels_last(graph: ir.Graph) -> bool:
    """Return whether the convolutions of a fused graph, and so its residuals, have channels last."""
    return any(node.op_type == "NhwcConv" for node in graph)


def _residual_shape(residual: Residual, *, channels_last: bool) -> list[int | str]:
    """Return the shape of a residual for the prompts of a batch."""
    height, width = residual.axes
    if channels_last:
        return ["batch_size", height, width, residual.channels]
    return ["batch_size", residual.channels, height, width]


def add_residuals(model: ir.Model, residuals: Sequence[Residual], *, to_blocks: bool) -> list[str]:
    """Add inputs for residuals to a fused UNet, in place, and return their names.

    Args:
        model: the fused UNet.
        residuals: the residuals, in the order of their numbers.
        to_blocks: whether a residual is added to a block's output wherever it is read, as T2I-Adapter does; otherwise
            only to the skip connection, as ControlNet does.

    Raises:
        FolderError: the graph has other skip connections than the configuration says.
    """
    graph = model.graph
    joins = [node for node in graph if _joins_skip(node)]
    last = _is_channels_last(graph)
    count = max((residual.skip for residual in residuals if residual.skip is not None), default=0) + 1
    if len(joins) < count:
        raise _unknown(f"{len(joins)} skip connections", f"at least {count}")
    names = []
    for number, residual in enumerate(residuals):
        join, index = (joins[0], 0) if residual.skip is None else (joins[-1 - residual.skip], 1)
        value = input_of(join, index)
        axis = join.attributes.get_int("axis", 1) % 4
        width = (dims(value) or (None,) * 4)[axis]
        if width != residual.channels:
            raise _unknown(f"{width} channels in skip connection {residual.skip}", f"{residual.channels}")
        name = f"{abi.RESIDUAL}{number}"
        source = new_input(name, dtype_of(value), _residual_shape(residual, channels_last=last))
        graph.inputs.append(source)
        names.append(name)
        if to_blocks and residual.skip is not None:
            _add_everywhere(model, value, source, transposed=last and axis == 1)
        else:
            added = insert(join, "Transpose", [source], {"perm": _TO_CHANNELS_FIRST}) if last and axis == 1 else source
            join.replace_input_with(index, insert(join, "Add", [value, added], shape=value.shape))
    return names


def _joins_skip(node: ir.Node) -> bool:
    """Return whether a node concatenates a skip connection to an image."""
    if node.op_type != "Concat" or len(node.inputs) != 2 or len(dims(node.outputs[0]) or ()) != 4:
        return False
    return node.attributes.get_int("axis", 1) % 4 in (1, 3)


def _add_everywhere(model: ir.Model, value: ir.Value, source: ir.Value, *, transposed: bool) -> None:
    """Let all users of a value read its sum with a residual."""
    uses = list(value.uses())
    producer = value.producer()
    add = GraphBuilder(model, after=producer)
    added = add.op("Transpose", source, perm=_TO_CHANNELS_FIRST) if transposed else source
    total = add.op("Add", value, added)
    total.shape = value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, total)
    if producer is None or producer.op_type != "SkipGroupNorm" or not producer.outputs[0].uses():
        return
    # The operator normalizes its sum, which now lacks the residual.
    normalized = producer.outputs[0]
    norm = ir.node(
        "GroupNorm", [total, *producer.inputs[1:3]], dict(producer.attributes), domain=MICROSOFT, num_outputs=1
    )
    norm.outputs[0].type, norm.outputs[0].shape = normalized.type, normalized.shape
    producer_node(total).append(norm)
    normalized.replace_all_uses_with(norm.outputs[0])


def _unknown(found: str, expected: str) -> FolderError:
    return FolderError(
        f"the UNet has {found}",
        f"{expected}, as its config.json says",
        "export the pipeline without ControlNets",
    )


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
    last = _is_channels_last(graph)
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
        shape = _residual_shape(residual, channels_last=last)
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
    if node is not None and is_transposed and tuple(node.attributes.get_ints("perm")) == _TO_CHANNELS_FIRST:
        return input_of(node, 0)
    return add.op("Transpose", value, perm=_TO_CHANNELS_LAST)


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
