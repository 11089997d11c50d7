"""Served graphs of image prompts: from an image to the tokens that the denoiser attends to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.graph_builder import widen_interface
from sdonnx.models import abi

__all__ = ["compose_image_prompt_encoder", "compose_image_prompt_projection"]


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
