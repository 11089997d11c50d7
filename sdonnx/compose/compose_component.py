"""Compose the served graphs of a component."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.absorption import absorb_projections
from sdonnx.compose.image_prompt_encoder import compose_image_prompt_encoder, compose_image_prompt_projection
from sdonnx.compose.precompute import hoist_step_invariants
from sdonnx.compose.safety_check import compose_safety_check
from sdonnx.compose.step import compose_step
from sdonnx.compose.text import compose_second_text, compose_text
from sdonnx.compose.vae import compose_decode, compose_encode
from sdonnx.models import abi
from sdonnx.models.spec import Role

__all__ = ["compose_component"]

_COMPOSE: Mapping[Role, Callable[[ir.Model, Mapping[str, Any]], None]] = {
    Role.TEXT_ENCODER: compose_text,
    Role.TEXT_ENCODER_2: compose_second_text,
    Role.IMAGE_ENCODER: compose_encode,
    Role.IMAGE_DECODER: compose_decode,
    Role.SAFETY_CHECKER: compose_safety_check,
    Role.IMAGE_PROMPT_ENCODER: compose_image_prompt_encoder,
    Role.IMAGE_PROMPT_ADAPTER: compose_image_prompt_projection,
}

_PER_STEP_INPUTS = {"sample", "timestep"}


def compose_component(role: Role, model: ir.Model, config: Mapping[str, Any]) -> dict[str, ir.Model]:
    """Return the served graphs of an optimized component, by file name; `model` is changed in place.

    Args:
        role: the component's role.
        model: its optimized graph.
        config: its configuration.
    """
    if role is not Role.DENOISER:
        _COMPOSE[role](model, config)
        return {abi.GRAPHS[role].file: model}
    conditioning = [str(value.name) for value in model.graph.inputs if value.name not in _PER_STEP_INPUTS]
    short = model.clone()
    graphs = _compose_denoiser(model, conditioning, config, abi.STEP.file, abi.PRECOMPUTE.file)
    if absorb_projections(short, conditioning):
        files = abi.STEP.short_file or "", abi.PRECOMPUTE.short_file or ""
        graphs |= _compose_denoiser(short, conditioning, config, *files)
    return graphs


def _compose_denoiser(
    model: ir.Model, conditioning: list[str], config: Mapping[str, Any], step_file: str, precompute_file: str
) -> dict[str, ir.Model]:
    compose_step(model, config)
    precompute = hoist_step_invariants(model, conditioning)
    return {step_file: model} | ({} if precompute is None else {precompute_file: precompute})
