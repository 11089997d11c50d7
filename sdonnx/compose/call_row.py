"""Values that a served graph reads from the parameter table at each call of the denoiser."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.compose.graph_builder import INT64, GraphBuilder
from sdonnx.models import abi

__all__ = ["CallRow", "read_call_row"]


@dataclass(frozen=True)
class CallRow:
    """Values of one call.

    Attributes:
        row: (1,P) float32, the row of the parameter table.
        next_index: (1,) int64, the row of the next call.
        index: (1,) int64, the row of this call.
        timestep: (1,) float32.
        timesteps: (calls,) float32, of all calls.
        scale: (1,) float32, by which the latents are multiplied for the denoiser.
    """

    row: ir.Value
    next_index: ir.Value
    index: ir.Value
    timestep: ir.Value
    timesteps: ir.Value
    scale: ir.Value


def read_call_row(add: GraphBuilder, parameters: ir.Value, step_index: ir.Value) -> CallRow:
    """Add nodes that read the row of a call.

    Only one of them reads `step_index`: the next index, which may overwrite it, is computed from the row.

    Args:
        add: where to add the nodes.
        parameters: (calls,P) float32, see `sdonnx.samplers.parameters`.
        step_index: (1,) int64, the row of this call.
    """
    row = add.op("Gather", parameters, step_index, axis=0)
    next_index = add.op("Cast", add.op("Reshape", add.columns(row, 0, 1), add.integers(1)), dtype=INT64, to=INT64)
    index = add.op("Sub", next_index, add.integers(1))
    timestep = add.op("Reshape", add.columns(row, 1, 2), add.integers(1))
    timesteps = add.op("Reshape", add.columns(parameters, 1, 2), add.integers(-1))
    scale = add.op("Reshape", add.columns(row, 2, 3), add.integers(1))
    timestep.shape, timesteps.shape = ir.Shape([1]), ir.Shape([abi.CALLS])
    return CallRow(row, next_index, index, timestep, timesteps, scale)
