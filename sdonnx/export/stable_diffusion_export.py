"""Export of Stable Diffusion 1, 2 and XL: wrappers of their components, by component name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sdonnx.export.wrappers import (
    VAE_WRAPPERS,
    Denoiser,
    LayeredTextEncoder,
    ProjectedTextEncoder,
    SizeConditionedDenoiser,
    TextEncoder,
    Wrapper,
)

__all__ = ["WRAPPERS", "XL_WRAPPERS"]


class SafetyChecker(Wrapper):
    """clip_input (B,3,S,S), images (B,H,W,3) -> out_images (B,H,W,3), has_nsfw_concepts (B) bool.

    The decision follows diffusers' StableDiffusionSafetyChecker.forward: cosines minus thresholds, raised by 0.01
    if a special concept is found, and rounded to three decimals. diffusers' `forward_onnx` omits the rounding. The
    decision is computed in float32.
    """

    def run(self, clip_input: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Search for concepts, and replace the images that contain one by zeros."""
        checker = self.model
        embeds = checker.visual_projection(checker.vision_model(pixel_values=clip_input).pooler_output)
        directions = torch.nn.functional.normalize(embeds.float())
        special = _excess(directions, checker.special_care_embeds, checker.special_care_embeds_weights)
        adjustment = _has_positive(special).float().unsqueeze(1) * 0.01
        excess = _excess(directions, checker.concept_embeds, checker.concept_embeds_weights)
        found = _has_positive(excess + adjustment)
        return torch.where(found[:, None, None, None], torch.zeros_like(images), images), found


def _excess(directions: torch.Tensor, concepts: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Return the cosine with each concept minus its threshold, (B,K)."""
    return directions @ torch.nn.functional.normalize(concepts.float()).t() - thresholds.float()


def _has_positive(scores: torch.Tensor) -> torch.Tensor:
    """Return for each row whether any score, rounded to three decimals as numpy rounds, is above 0."""
    # numpy multiplies, rounds half to even and divides. The division does not change the sign.
    return torch.round(scores * 1000).amax(1) > 0


WRAPPERS: Mapping[str, type[Wrapper]] = {
    **VAE_WRAPPERS,
    "text_encoder": TextEncoder,
    "unet": Denoiser,
    "safety_checker": SafetyChecker,
}

XL_WRAPPERS: Mapping[str, type[Wrapper]] = {
    **VAE_WRAPPERS,
    "text_encoder": LayeredTextEncoder,
    "text_encoder_2": ProjectedTextEncoder,
    "unet": SizeConditionedDenoiser,
}
