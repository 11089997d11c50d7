"""Torch modules with the signatures of the ONNX components that several families share.

A wrapper stores its model as `self.model`. It accepts and returns plain tensors, in the order of the component's
inputs and outputs in `sdonnx.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from sdonnx.models.shared_components import TIMESTEP_COND

__all__ = [
    "VAE_WRAPPERS",
    "Denoiser",
    "ImageDecoder",
    "ImageEncoder",
    "LayeredTextEncoder",
    "LayeredVisionEncoder",
    "ProjectedTextEncoder",
    "SizeConditionedDenoiser",
    "TextEncoder",
    "Wrapper",
]


class Wrapper(torch.nn.Module):
    """Base class: accepts any number of inputs in order, and passes them to `run`.

    Args:
        model: The model.
        names: Names of its inputs.

    Attributes:
        example_sizes: Sizes of axes while the module is traced, where the defaults of `sdonnx.export.trace` do not fit.
    """

    example_sizes: ClassVar[Mapping[str, int]] = {}

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model: Any = model
        self.names = tuple(names)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the model."""
        return self.run(*inputs)

    def run(self, *inputs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Compute the component's outputs from its inputs."""
        raise NotImplementedError


class TextEncoder(Wrapper):
    """CLIP: input_ids (B,S) -> last_hidden_state (B,S,D), pooler_output (B,D)."""

    def run(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the text encoder."""
        output = self.model(input_ids=input_ids)
        return output.last_hidden_state, output.pooler_output


class LayeredTextEncoder(Wrapper):
    """CLIP: input_ids (B,S) -> last_hidden_state (B,S,D), pooler_output (B,D), hidden_states.0 ... .n (B,S,D)."""

    def run(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the text encoder, and also return the input of each layer."""
        output = self.model(input_ids=input_ids, output_hidden_states=True)
        return output.last_hidden_state, output.pooler_output, *output.hidden_states


class ProjectedTextEncoder(Wrapper):
    """CLIP: input_ids (B,S) -> text_embeds (B,P), last_hidden_state (B,S,D), hidden_states.0 ... .n (B,S,D)."""

    def run(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the text encoder, project the last token, and also return the input of each layer."""
        output = self.model(input_ids=input_ids, output_hidden_states=True)
        return output.text_embeds, output.last_hidden_state, *output.hidden_states


class LayeredVisionEncoder(Wrapper):
    """CLIP: pixel_values (B,C,H,W) -> image_embeds (B,P), last_hidden_state (B,S,D), hidden_states.0 ... .n (B,S,D)."""

    def run(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the vision tower, project the class token, and also return the input of each layer."""
        output = self.model(pixel_values=pixel_values, output_hidden_states=True)
        return output.image_embeds, output.last_hidden_state, *output.hidden_states


class Denoiser(Wrapper):
    """UNet: sample (B,C,H,W), timestep (1,) or (B,), encoder_hidden_states (B,S,D) -> out_sample (B,C,H,W).

    UNets with distilled guidance also read timestep_cond (B,W), the embedding of the guidance scale. Subclasses add
    conditioning inputs by `added_conditions`.
    """

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the UNet."""
        named = dict(zip(self.names, inputs, strict=True))
        first = [named.pop(name) for name in ("sample", "timestep", "encoder_hidden_states")]
        guidance = named.pop(TIMESTEP_COND, None)
        added = self.added_conditions(named)
        prediction: torch.Tensor = self.model(
            *first, timestep_cond=guidance, added_cond_kwargs=added or None, return_dict=False
        )[0]
        return prediction

    def added_conditions(self, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return `added_cond_kwargs` of diffusers' UNet2DConditionModel.

        Args:
            named: All inputs but the first three and timestep_cond, by their names.
        """
        return {}


class SizeConditionedDenoiser(Denoiser):
    """Denoiser with text_embeds (B,P), the pooled text, and time_ids (B,N) float32, the sizes of the image."""

    def added_conditions(self, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the pooled text and the sizes."""
        # diffusers concatenates them with float32 embeddings; without the cast, the exporter would write a Concat of
        # two types.
        added = {"text_embeds": named["text_embeds"].float(), "time_ids": named["time_ids"]}
        return super().added_conditions(named) | added


class ImageEncoder(Wrapper):
    """VAE: sample (B,3,H,W) -> latent_parameters (B,2C,H/8,W/8): mean and logarithm of the variance."""

    example_sizes: ClassVar = {"height": 40, "width": 56}  # pixels of whole latents

    def run(self, sample: torch.Tensor) -> torch.Tensor:
        """Run the VAE's encoder up to the parameters of the latent distribution."""
        parameters: torch.Tensor = self.model.encode(sample).latent_dist.parameters
        return parameters


class ImageDecoder(Wrapper):
    """VAE: latent_sample (B,C,H,W) -> sample (B,3,8H,8W), in [-1, 1] up to overshoot."""

    def run(self, latent_sample: torch.Tensor) -> torch.Tensor:
        """Run the VAE's decoder."""
        image: torch.Tensor = self.model.decode(latent_sample, return_dict=False)[0]
        return image


VAE_WRAPPERS: Mapping[str, type[Wrapper]] = {"vae_encoder": ImageEncoder, "vae_decoder": ImageDecoder}
"""Wrappers of the autoencoder's components, which all families share."""
