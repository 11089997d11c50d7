"""The check graph: the safety checker's flags for images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.graph_builder import add_output, widen_input
from sdonnx.models import abi

__all__ = ["compose_safety_check"]


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
