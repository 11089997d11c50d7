"""Served graphs with CLIP's vision tower: tokens of image prompts, and the safety checker's flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.graph_builder import add_output, widen_input, widen_interface
from sdonnx.models import abi

__all__ = ["compose_image_prompt_encoder", "compose_image_prompt_projection", "compose_safety_check"]


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
