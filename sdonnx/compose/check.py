"""The check graph: whether images show what the safety checker knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.composer import FLOAT, Composer, give_out, input_of, take_over, tensor

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
    given = input_of(graph, "clip_input")
    assert given.dtype is not None
    assert given.shape is not None
    clip_input = given
    if given.dtype != FLOAT:
        clip_input = tensor("clip_input", FLOAT, [size if isinstance(size, int) else str(size) for size in given.shape])
        take_over(graph, "clip_input", Composer(model, before=True).cast(clip_input, given.dtype))
    give_out(graph, flags, "has_nsfw_concepts", shape)
    # The nodes that blacken images, which alone read `images`, lead nowhere now.
    graph.inputs.clear()
    graph.inputs.append(clip_input)
    graph.name = "check"
