"""Torch modules with the signatures that the ONNX components have.

Each wrapper holds its model as `self.model` and takes and returns plain tensors, in the order of
the component's inputs and outputs in `sdonnx.families`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sdonnx.export import pixart, t5
from sdonnx.export.image_attention import ImagePrompt
from sdonnx.families import CAPTION_MASK, SCALE, TEXT_MASK, ComponentSpec, Role

__all__ = ["wrap"]


class _Wrapper(torch.nn.Module):
    """Takes the component's inputs in order, so that it may have any number of them.

    Args:
        model: the model.
        names: what its inputs are called.
    """

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model: Any = model
        self.names = tuple(names)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the model."""
        return self.run(*inputs)

    def run(self, *inputs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What a component does with its inputs."""
        raise NotImplementedError


class TextEncoder(_Wrapper):
    """input_ids (B,S) -> last_hidden_state (B,S,D), pooler_output (B,D)."""

    def run(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the text encoder."""
        output = self.model(input_ids=input_ids)
        return output.last_hidden_state, output.pooler_output


class MaskedTextEncoder(_Wrapper):
    """input_ids (B,S), attention_mask (B,S), 1 for tokens of the caption -> last_hidden_state (B,S,D)."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__(model, names)
        t5.traceable(model)

    def run(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Run the text encoder."""
        mask = t5.additive_mask(attention_mask, self.model.dtype)
        hidden: torch.Tensor = self.model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        return hidden


class LayeredTextEncoder(_Wrapper):
    """input_ids (B,S) -> last_hidden_state (B,S,D), pooler_output (B,D), hidden_states.0 ... .n (B,S,D)."""

    def run(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the text encoder and give out what each layer is given."""
        output = self.model(input_ids=input_ids, output_hidden_states=True)
        return output.last_hidden_state, output.pooler_output, *output.hidden_states


class ProjectedTextEncoder(_Wrapper):
    """input_ids (B,S) -> text_embeds (B,P), last_hidden_state (B,S,D), hidden_states.0 ... .n (B,S,D)."""

    def run(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the text encoder, project the last token, and give out what each layer is given."""
        output = self.model(input_ids=input_ids, output_hidden_states=True)
        return output.text_embeds, output.last_hidden_state, *output.hidden_states


class Denoiser(_Wrapper):
    """sample (B,C,H,W), timestep (1,) or (B,), encoder_hidden_states (B,S,D) -> out_sample (B,C,H,W).

    Some are told more: text_embeds (B,P) and time_ids (B,N) float32, what the image is and how large; image_embeds.i
    (B,T,D) and ip_adapter_scale (A,N) float32, what IP-Adapters made of images and their weights.
    """

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the UNet."""
        told = dict(zip(self.names, inputs, strict=True))
        first = [told.pop(name) for name in ("sample", "timestep", "encoder_hidden_states")]
        added: dict[str, Any] = {}
        if "time_ids" in told:
            # diffusers concatenates them with float32 embeddings, and the exporter would write a Concat of two types.
            added = {"text_embeds": told["text_embeds"].float(), "time_ids": told["time_ids"]}
        if SCALE in told:
            images = [value for name, value in told.items() if name.startswith("image_embeds.")]
            added["image_embeds"] = [
                ImagePrompt.weighted(tokens, weights) for tokens, weights in zip(images, told[SCALE], strict=True)
            ]
        prediction: torch.Tensor = self.model(*first, added_cond_kwargs=added or None, return_dict=False)[0]
        return prediction


class TransformerDenoiser(_Wrapper):
    """As Denoiser, with encoder_attention_mask (B,S), 1 for tokens of the caption -> out_sample (B,2C,H,W).

    Some are told the size too: resolution (1,2) and aspect_ratio (1,1) float32, of all images. The second half of the
    channels is the learned variance.
    """

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__(model, names)
        pixart.traceable(model)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the transformer."""
        told = dict(zip(self.names, inputs, strict=True))
        first = [told.pop(name) for name in ("sample", "timestep", "encoder_hidden_states", CAPTION_MASK)]
        prediction: torch.Tensor = self.model(*first, told)
        return prediction


class ImageEncoder(_Wrapper):
    """sample (B,3,H,W) -> latent_parameters (B,2C,H/8,W/8): mean and logarithm of variance."""

    def run(self, sample: torch.Tensor) -> torch.Tensor:
        """Run the VAE's encoder up to the parameters of the latent distribution."""
        parameters: torch.Tensor = self.model.encode(sample).latent_dist.parameters
        return parameters


class ImageDecoder(_Wrapper):
    """latent_sample (B,C,H,W) -> sample (B,3,8H,8W), in [-1, 1] up to overshoot."""

    def run(self, latent_sample: torch.Tensor) -> torch.Tensor:
        """Run the VAE's decoder."""
        image: torch.Tensor = self.model.decode(latent_sample, return_dict=False)[0]
        return image


class ImagePromptEncoder(_Wrapper):
    """pixel_values (B,3,S,S) -> image_embeds (B,P), penultimate_hidden_states (B,L,D)."""

    def run(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run CLIP's vision tower; IP-Adapter Plus reads what its last layer is given."""
        output = self.model(pixel_values=pixel_values, output_hidden_states=True)
        return output.image_embeds, output.hidden_states[-2]


class ImagePromptAdapter(_Wrapper):
    """image_embeds.i (I,L,W) -> ip_hidden_states.i (I,T,D), for each adapter i."""

    def run(self, *image_embeds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Project what the image encoder gives."""
        return tuple(project(embeds) for project, embeds in zip(self.model, image_embeds, strict=True))


class SafetyChecker(_Wrapper):
    """clip_input (B,3,S,S), images (B,H,W,3) -> out_images (B,H,W,3), has_nsfw_concepts (B) bool.

    The decision is that of diffusers' StableDiffusionSafetyChecker.forward: cosines less thresholds, raised by 0.01
    where a special concept is found, and rounded to three decimals, as its `forward_onnx` leaves out. It is
    taken in float32.
    """

    def run(self, clip_input: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Look for concepts, and return the images with zeros in place of those that have one."""
        checker = self.model
        embeds = checker.visual_projection(checker.vision_model(pixel_values=clip_input).pooler_output)
        directions = torch.nn.functional.normalize(embeds.float())
        special = _excess(directions, checker.special_care_embeds, checker.special_care_embeds_weights)
        adjustment = _positive(special).float().unsqueeze(1) * 0.01
        found = _positive(_excess(directions, checker.concept_embeds, checker.concept_embeds_weights) + adjustment)
        return torch.where(found[:, None, None, None], torch.zeros_like(images), images), found


def _excess(directions: torch.Tensor, concepts: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Return by how much the cosine with each concept is above its threshold, (B,K)."""
    return directions @ torch.nn.functional.normalize(concepts.float()).t() - thresholds.float()


def _positive(scores: torch.Tensor) -> torch.Tensor:
    """Tell for each row whether any score, rounded to three decimals as numpy does, is above 0."""
    # numpy multiplies, rounds half to even and divides; the division keeps the sign.
    return torch.round(scores * 1000).amax(1) > 0


_WRAPPERS: dict[Role, type[_Wrapper]] = {
    Role.TEXT_ENCODER: TextEncoder,
    Role.TEXT_ENCODER_2: ProjectedTextEncoder,
    Role.DENOISER: Denoiser,
    Role.IMAGE_ENCODER: ImageEncoder,
    Role.IMAGE_DECODER: ImageDecoder,
    Role.SAFETY_CHECKER: SafetyChecker,
    Role.IMAGE_PROMPT_ENCODER: ImagePromptEncoder,
    Role.IMAGE_PROMPT_ADAPTER: ImagePromptAdapter,
}
# Of text encoders that give out their layers.
_LAYERED = {Role.TEXT_ENCODER: LayeredTextEncoder}
# Of what is told which tokens are the caption's.
_MASKED = {Role.TEXT_ENCODER: MaskedTextEncoder, Role.DENOISER: TransformerDenoiser}


def wrap(spec: ComponentSpec, model: torch.nn.Module) -> torch.nn.Module:
    """Return `model` behind the signature that the component `spec` has."""
    chosen = _WRAPPERS[spec.role]
    if any(tensor.series is not None for tensor in spec.outputs):
        chosen = _LAYERED.get(spec.role, chosen)
    if any(tensor.name in (TEXT_MASK, CAPTION_MASK) for tensor in spec.inputs):
        chosen = _MASKED[spec.role]
    return chosen(model, [tensor.name for tensor in spec.inputs]).eval()
