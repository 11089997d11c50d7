"""Export of Stable Diffusion XL: wrappers of its components, by component name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sdonnx.export.wrappers import VAE_WRAPPERS, Denoiser, LayeredTextEncoder, Wrapper

__all__ = ["WRAPPERS"]


class ProjectedTextEncoder(Wrapper):
    """input_ids (B,S) -> text_embeds (B,P), last_hidden_state (B,S,D), hidden_states.0 ... .n (B,S,D)."""

    def run(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the text encoder, project the last token, and also return the input of each layer."""
        output = self.model(input_ids=input_ids, output_hidden_states=True)
        return output.text_embeds, output.last_hidden_state, *output.hidden_states


class SizeConditionedDenoiser(Denoiser):
    """Denoiser with text_embeds (B,P), the pooled text, and time_ids (B,N) float32, the sizes of the image."""

    def added_conditions(self, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the pooled text and the sizes."""
        # diffusers concatenates them with float32 embeddings; without the cast, the exporter would write a Concat of
        # two types.
        added = {"text_embeds": named["text_embeds"].float(), "time_ids": named["time_ids"]}
        return super().added_conditions(named) | added


WRAPPERS: Mapping[str, type[Wrapper]] = {
    **VAE_WRAPPERS,
    "text_encoder": LayeredTextEncoder,
    "text_encoder_2": ProjectedTextEncoder,
    "unet": SizeConditionedDenoiser,
}
