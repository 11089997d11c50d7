"""Export of PixArt: wrappers of its components, by component name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from sdonnx.export import pixart_transformer
from sdonnx.export.t5_encoder import MaskedTextEncoder
from sdonnx.export.wrappers import VAE_WRAPPERS, Wrapper
from sdonnx.models.spec import CAPTION_MASK

__all__ = ["WRAPPERS", "TransformerDenoiser"]


class TransformerDenoiser(Wrapper):
    """sample (B,C,H,W), timestep (1,), encoder_hidden_states (B,S,D), encoder_attention_mask (B,S) -> (B,2C,H,W).

    The mask is 1 for tokens of the caption. Transformers that are conditioned on the image size have the inputs
    resolution (1,2) and aspect_ratio (1,1) float32, which all images of a batch share. The second half of the output's
    channels is the learned variance.
    """

    example_sizes: ClassVar = {"height": 38, "width": 46}  # whole patches, an odd number of them

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__(model, names)
        pixart_transformer.make_traceable(model)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the transformer."""
        named = dict(zip(self.names, inputs, strict=True))
        first = [named.pop(name) for name in ("sample", "timestep", "encoder_hidden_states", CAPTION_MASK)]
        prediction: torch.Tensor = self.model(*first, named)
        return prediction


WRAPPERS: Mapping[str, type[Wrapper]] = {
    **VAE_WRAPPERS,
    "text_encoder": MaskedTextEncoder,
    "transformer": TransformerDenoiser,
}
