"""The graphs that the run-time replays, built around optimized components.

Each reads the weight file of the component that it wraps and adds no weights.

- text: token ids to the hidden states of any layer; of Stable Diffusion XL's second encoder, with the first one's
  beside them and the pooled text
- conditions: what of a step depends on the prompt alone, once for an image
- short step and conditions: the same for prompts of few tokens, of denoisers whose prompts are masked
- step: batch doubling for guidance, the denoiser, guidance, the sampler's update and what a mask keeps.
  A sampler is a matrix for each call (`sdonnx.samplers`), so that one graph serves all of them.
- encode: an image to latents, drawn from the VAE's distribution, with and without noise
- decode: latents to pixels as bytes, so that only bytes leave the device
- prompt: an image, as CLIP sees it, to what IP-Adapters read of it
- project: that to the tokens that the denoiser attends to
- check: images, as CLIP sees them, to whether the safety checker knows what they show
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.absorption import absorb_projections
from sdonnx.compose.check import compose_check
from sdonnx.compose.conditions import split_conditions
from sdonnx.compose.images import compose_decode, compose_encode
from sdonnx.compose.prompt import compose_project, compose_prompt
from sdonnx.compose.step import compose_step
from sdonnx.compose.text import compose_second_text, compose_text
from sdonnx.compose.weights import shared_weights
from sdonnx.families import Role

__all__ = [
    "COMPOSED",
    "SHORT",
    "absorb_projections",
    "compose",
    "compose_check",
    "compose_decode",
    "compose_encode",
    "compose_project",
    "compose_prompt",
    "compose_second_text",
    "compose_step",
    "compose_text",
    "shared_weights",
    "split_conditions",
]

COMPOSED = {
    Role.TEXT_ENCODER: ("text.onnx", compose_text),
    Role.TEXT_ENCODER_2: ("text.onnx", compose_second_text),
    Role.DENOISER: ("step.onnx", compose_step),
    Role.IMAGE_ENCODER: ("encode.onnx", compose_encode),
    Role.IMAGE_DECODER: ("decode.onnx", compose_decode),
    Role.SAFETY_CHECKER: ("check.onnx", compose_check),
    Role.IMAGE_PROMPT_ENCODER: ("prompt.onnx", compose_prompt),
    Role.IMAGE_PROMPT_ADAPTER: ("project.onnx", compose_project),
}
"""The file beside each component's model, and what makes it."""

_CONDITIONS = "conditions.onnx"

SHORT = ("step-short.onnx", "conditions-short.onnx")
"""The step's and the conditions' file for short prompts: see `sdonnx.compose.absorption`."""

_OF_EACH_STEP = {"sample", "timestep"}


def compose(role: Role, model: ir.Model, config: Mapping[str, Any]) -> dict[str, ir.Model]:
    """Return the graphs that stand beside an optimized component, by file name; the component's own is changed.

    Args:
        role: what the component does.
        model: its optimized graph.
        config: its configuration.
    """
    file, make = COMPOSED[role]
    if role is not Role.DENOISER:
        make(model, config)
        return {file: model}
    told = [str(value.name) for value in model.graph.inputs if value.name not in _OF_EACH_STEP]
    short = model.clone()
    made = _composed_denoiser(model, told, config, (file, _CONDITIONS))
    if absorb_projections(short, told):
        made |= _composed_denoiser(short, told, config, SHORT)
    return made


def _composed_denoiser(
    model: ir.Model, told: list[str], config: Mapping[str, Any], files: tuple[str, str]
) -> dict[str, ir.Model]:
    compose_step(model, config)
    conditions = split_conditions(model, told)
    return {files[0]: model} | ({} if conditions is None else {files[1]: conditions})
