"""Wrappers of the components that IP-Adapters add to a family, and of a denoiser that attends to images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sdonnx.export.image_attention import ImagePrompt
from sdonnx.export.wrappers import Denoiser, Wrapper
from sdonnx.models.image_adapters import ADAPTER_SCALE, ADAPTERS

__all__ = ["with_image_prompts"]


class ImagePromptEncoder(Wrapper):
    """pixel_values (B,3,S,S) -> image_embeds (B,P), penultimate_hidden_states (B,L,D)."""

    def run(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run CLIP's vision tower; IP-Adapter Plus reads the input of its last layer."""
        output = self.model(pixel_values=pixel_values, output_hidden_states=True)
        return output.image_embeds, output.hidden_states[-2]


class ImagePromptAdapter(Wrapper):
    """image_embeds.i (I,L,W) -> ip_hidden_states.i (I,T,D), for each adapter i."""

    def run(self, *image_embeds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Project the image encoder's output."""
        return tuple(project(embeds) for project, embeds in zip(self.model, image_embeds, strict=True))


class ImagePromptedDenoiser(Denoiser):
    """Denoiser with image_embeds.i (B,T,D), tokens of adapter i, and ip_adapter_scale (A,N) float32, the weights."""

    def added_conditions(self, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the tokens of the adapters' images, with their weights."""
        added = super().added_conditions(named)
        images = [value for name, value in named.items() if name.startswith("image_embeds.")]
        prompts = zip(images, named[ADAPTER_SCALE], strict=True)
        return added | {"image_embeds": [ImagePrompt.weighted(tokens, weights) for tokens, weights in prompts]}


def with_image_prompts(wrappers: Mapping[str, type[Wrapper]]) -> dict[str, type[Wrapper]]:
    """Return a family's wrappers for an adapted pipeline, with an image encoder and adapters."""
    adapted = {
        name: type(f"ImagePrompted{wrapper.__name__}", (ImagePromptedDenoiser, wrapper), {})
        if issubclass(wrapper, Denoiser)
        else wrapper
        for name, wrapper in wrappers.items()
    }
    return adapted | {"image_encoder": ImagePromptEncoder, ADAPTERS: ImagePromptAdapter}
