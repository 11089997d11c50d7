"""Compose the served graphs of a component."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from sdonnx.compose.absorption import absorb_projections
from sdonnx.compose.control_network import compose_adapt, compose_control
from sdonnx.compose.image_prompt_encoder import compose_image_prompt_encoder, compose_image_prompt_projection
from sdonnx.compose.precompute import hoist_step_invariants
from sdonnx.compose.residuals import add_residuals
from sdonnx.compose.safety_check import compose_safety_check
from sdonnx.compose.step import compose_step
from sdonnx.compose.text import compose_second_text, compose_text
from sdonnx.compose.vae import compose_decode, compose_encode
from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.models.unet_residuals import Residual

__all__ = ["ControlPlan", "compose_component"]

_COMPOSE: Mapping[Role, Callable[[ir.Model, Mapping[str, Any]], None]] = {
    Role.TEXT_ENCODER: compose_text,
    Role.TEXT_ENCODER_2: compose_second_text,
    Role.IMAGE_ENCODER: compose_encode,
    Role.IMAGE_DECODER: compose_decode,
    Role.SAFETY_CHECKER: compose_safety_check,
    Role.IMAGE_PROMPT_ENCODER: compose_image_prompt_encoder,
    Role.IMAGE_PROMPT_ADAPTER: compose_image_prompt_projection,
    Role.T2I_ADAPTER: compose_adapt,
}


@dataclass(frozen=True)
class ControlPlan:
    """How ControlNets or T2I-Adapters change the graphs of a component.

    Attributes:
        residuals: the residuals of the pipeline's UNet.
        to_blocks: whether they belong to blocks, as T2I-Adapter's do.
        adds: for a ControlNet, whether it may run after another one.
        latent_size: for a ControlNet, the size of the latents that the UNet generates by default; None if unknown.
    """

    residuals: tuple[Residual, ...] = ()
    to_blocks: bool = False
    adds: bool = False
    latent_size: int | None = None


_PER_STEP_INPUTS = {"sample", "timestep"}


def compose_component(
    role: Role, model: ir.Model, config: Mapping[str, Any], controls: ControlPlan | None = None
) -> dict[str, ir.Model]:
    """Return the served graphs of an optimized component, by file name; `model` is changed in place.

    Args:
        role: the component's role.
        model: its optimized graph.
        config: its configuration.
        controls: for a denoiser, the residuals that it reads, or None; for a ControlNet, its place.

    Raises:
        FolderError: the denoiser has other skip connections than its configuration says.
    """
    if role is Role.CONTROLNET:
        return compose_control(model, config, adds=controls is not None and controls.adds)
    if role is not Role.DENOISER:
        _COMPOSE[role](model, config)
        return {abi.GRAPHS[role].file: model}
    conditioning = [str(value.name) for value in model.graph.inputs if value.name not in _PER_STEP_INPUTS]
    short, controlled = model.clone(), None if controls is None else model.clone()
    graphs = _compose_denoiser(model, conditioning, config, abi.STEP.file, abi.PRECOMPUTE.file)
    if absorb_projections(short, conditioning):
        files = abi.STEP.short_file or "", abi.PRECOMPUTE.short_file or ""
        graphs |= _compose_denoiser(short, conditioning, config, *files)
    if controlled is not None and controls is not None:
        graphs[abi.CONTROLLED_STEP.file] = _compose_controlled(controlled, conditioning, config, controls, model)
    return graphs


def _compose_denoiser(
    model: ir.Model, conditioning: list[str], config: Mapping[str, Any], step_file: str, precompute_file: str
) -> dict[str, ir.Model]:
    compose_step(model, config)
    precompute = hoist_step_invariants(model, conditioning)
    return {step_file: model} | ({} if precompute is None else {precompute_file: precompute})


def _compose_controlled(
    model: ir.Model, conditioning: list[str], config: Mapping[str, Any], controls: ControlPlan, step: ir.Model
) -> ir.Model:
    """Return the step graph with residuals. It reads the same precomputed values as the step graph."""
    add_residuals(model, controls.residuals, to_blocks=controls.to_blocks)
    compose_step(model, config)
    hoist_step_invariants(model, conditioning)
    model.graph.name = abi.CONTROLLED_STEP.name
    precomputed = [{str(value.name) for value in graph.inputs if abi.PRECOMPUTE.outputs[0].matches(str(value.name))}
                   for graph in (model.graph, step.graph)]  # fmt: skip
    if not precomputed[0] <= precomputed[1]:
        raise ValueError(f"residuals change what is precomputed: {sorted(precomputed[0] - precomputed[1])}")
    return model
