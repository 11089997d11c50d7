"""Torch modules with the signatures that the ONNX components have.

Each wrapper holds its model as `self.model` and takes and returns plain tensors, in the order of
the component's inputs and outputs in `sdonnx.families`.
"""

from __future__ import annotations

from typing import Any

import torch

from sdonnx.families import ComponentSpec, Role

__all__ = ["wrap"]


class _Wrapper(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model: Any = model


class TextEncoder(_Wrapper):
    """input_ids (B,S) -> last_hidden_state (B,S,D), pooler_output (B,D)."""

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the text encoder."""
        output = self.model(input_ids=input_ids)
        return output.last_hidden_state, output.pooler_output


class Denoiser(_Wrapper):
    """sample (B,C,H,W), timestep (1,) or (B,), encoder_hidden_states (B,S,D) -> out_sample (B,C,H,W)."""

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Run the UNet."""
        prediction: torch.Tensor = self.model(sample, timestep, encoder_hidden_states, return_dict=False)[0]
        return prediction


class ImageEncoder(_Wrapper):
    """sample (B,3,H,W) -> latent_parameters (B,2C,H/8,W/8): mean and logarithm of variance."""

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        """Run the VAE's encoder up to the parameters of the latent distribution."""
        parameters: torch.Tensor = self.model.encode(sample).latent_dist.parameters
        return parameters


class ImageDecoder(_Wrapper):
    """latent_sample (B,C,H,W) -> sample (B,3,8H,8W), in [-1, 1] up to overshoot."""

    def forward(self, latent_sample: torch.Tensor) -> torch.Tensor:
        """Run the VAE's decoder."""
        image: torch.Tensor = self.model.decode(latent_sample, return_dict=False)[0]
        return image


_WRAPPERS: dict[Role, type[_Wrapper]] = {
    Role.TEXT_ENCODER: TextEncoder,
    Role.DENOISER: Denoiser,
    Role.IMAGE_ENCODER: ImageEncoder,
    Role.IMAGE_DECODER: ImageDecoder,
}


def wrap(spec: ComponentSpec, model: torch.nn.Module) -> torch.nn.Module:
    """Return `model` behind the signature that the component `spec` has."""
    return _WRAPPERS[spec.role](model).eval()
