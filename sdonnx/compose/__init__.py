"""Served graphs: the graphs that the run-time executes, built around optimized components.

Each served graph reads the weight file of the component that it wraps, and adds no weights. `sdonnx.models.abi`
declares their files, inputs and outputs:

- text: token ids to the hidden states of any layer. For the second of two encoders, also the hidden states of the
  first one and the pooled prompt.
- precompute: the step-invariant part of the denoiser, computed once for an image
- step: batch doubling for guidance, the denoiser, guidance, the sampler's update and the mask. A sampler is a matrix
  for each call (`sdonnx.samplers`), so one graph serves all samplers.
- short variants of step and precompute, for prompts of few tokens and denoisers that mask padding
- encode: images to latents, sampled from the VAE's distribution, with and without noise
- decode: latents to 8-bit pixels, so that only bytes leave the device
- prompt: images, prepared for CLIP, to the embeddings that adapters for image prompts read
- project: these embeddings to the tokens that the denoiser attends to
- controlled step: the step graph that also adds the residuals of ControlNets or T2I-Adapters
- control: one call of a ControlNet, and its precompute graph; adapt: images to the residuals of a T2I-Adapter
- check: images, prepared for CLIP, to the flags of the safety checker
"""

from __future__ import annotations

from sdonnx.compose.absorption import absorb_projections
from sdonnx.compose.compose_component import ControlPlan, compose_component, shared_weights
from sdonnx.compose.image_prompt_encoder import compose_image_prompt_encoder, compose_image_prompt_projection
from sdonnx.compose.precompute import hoist_step_invariants
from sdonnx.compose.safety_check import compose_safety_check
from sdonnx.compose.step import compose_step
from sdonnx.compose.text import compose_second_text, compose_text
from sdonnx.compose.vae import compose_decode, compose_encode

__all__ = [
    "ControlPlan",
    "absorb_projections",
    "compose_component",
    "compose_decode",
    "compose_encode",
    "compose_image_prompt_encoder",
    "compose_image_prompt_projection",
    "compose_safety_check",
    "compose_second_text",
    "compose_step",
    "compose_text",
    "hoist_step_invariants",
    "shared_weights",
]
