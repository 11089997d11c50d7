"""The graphs of IP-Adapters: from an image to the tokens that the denoiser attends to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.composer import FLOAT, Composer, give_out, widened_input

__all__ = ["compose_project", "compose_prompt"]


def compose_prompt(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Let the image encoder take and give float32, in place: the host prepares images, and has few of them.

    Input: `pixel_values` (I,3,S,S). Outputs: `image_embeds` (I,P), `penultimate_hidden_states` (I,L,D).

    Args:
        model: the optimized image encoder.
        config: its configuration, which is not needed.
    """
    _wide(model)
    model.graph.name = "prompt"


def compose_project(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Let the projections of IP-Adapters take and give float32, in place.

    Inputs: `image_embeds.i` (I,L,W). Outputs: `ip_hidden_states.i` (I,T,D).

    Args:
        model: the optimized projections.
        config: their configuration, which is not needed.
    """
    _wide(model)
    model.graph.name = "project"


def _wide(model: ir.Model) -> None:
    graph = model.graph
    inputs = [widened_input(model, str(value.name)) for value in list(graph.inputs)]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    outputs = [(value, str(value.name), value.shape) for value in graph.outputs]
    graph.outputs.clear()
    add = Composer(model, before=False)
    for value, name, shape in outputs:
        if value.dtype != FLOAT:
            value.name = f"{name}_narrow"
            value = add.cast(value, FLOAT)
        give_out(graph, value, name, shape)
