"""The check graph: whether images show what the safety checker knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.composer import give_out, widened_input

__all__ = ["compose_check"]


def compose_check(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn a safety checker's graph into the check graph, in place.

    Input: `clip_input` (B,3,S,S) float32, as CLIP's image processor prepares it. Output: `has_nsfw_concepts` (B)
    bool. The images themselves stay outside: whoever has them blackens them.

    Args:
        model: the optimized safety checker: `clip_input, images -> out_images, has_nsfw_concepts`.
        config: its configuration, which is not needed.
    """
    graph = model.graph
    flags = next(value for value in graph.outputs if value.name == "has_nsfw_concepts")
    shape = flags.shape
    graph.outputs.clear()
    clip_input = widened_input(model, "clip_input")
    give_out(graph, flags, "has_nsfw_concepts", shape)
    # The nodes that blacken images, which alone read `images`, lead nowhere now.
    graph.inputs.clear()
    graph.inputs.append(clip_input)
    graph.name = "check"
