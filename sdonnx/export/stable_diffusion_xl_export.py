"""Export of Stable Diffusion XL: wrappers of its components, by component name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sdonnx.export.wrappers import VAE_WRAPPERS, LayeredTextEncoder, SizeConditionedDenoiser, Wrapper

__all__ = ["WRAPPERS"]


class ProjectedTextEncoder(Wrapper):
    """input_ids (B,S) -> text_embeds (B,P), last_hidden_state (B,S,D), hidden_states.0 ... .n (B,S,D)."""

    def run(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the text encoder, project the last token, and also return the input of each layer."""
        output = self.model(input_ids=input_ids, output_hidden_states=True)
        return output.text_embeds, output.last_hidden_state, *output.hidden_states


WRAPPERS: Mapping[str, type[Wrapper]] = {
    **VAE_WRAPPERS,
    "text_encoder": LayeredTextEncoder,
    "text_encoder_2": ProjectedTextEncoder,
    "unet": SizeConditionedDenoiser,
}
