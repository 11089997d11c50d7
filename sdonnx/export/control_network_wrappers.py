"""Torch modules with the signatures of ControlNets and T2I-Adapters."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from sdonnx.export.wrappers import Wrapper
from sdonnx.models.control_networks import CONDITION_SCALES, CONTROL_IMAGE, CONTROL_MODES, CONTROL_TYPES
from sdonnx.models.spec import ComponentSpec, Role

__all__ = ["ControlNet", "control_wrapper"]


class ControlNet(Wrapper):
    """ControlNet: the UNet's inputs and an image (B,C,H,P,W,P) -> a residual for each skip, and the middle block's.

    The image shares the axes of the latents, so that the graph states how both sizes relate. P is the size of a latent
    in pixels. An input `conditioning_scale` (K,) has a weight for each of the K residuals, if there is one.
    """

    image_input: ClassVar = CONTROL_IMAGE

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the ControlNet."""
        named = dict(zip(self.names, inputs, strict=True))
        down, middle = self.model(
            named["sample"],
            named["timestep"],
            named["encoder_hidden_states"],
            named[self.image_input].flatten(4, 5).flatten(2, 3),
            added_cond_kwargs=_added(named),
            return_dict=False,
        )
        residuals = (*down, middle)
        if (weights := named.get("conditioning_scale")) is None:
            return residuals
        return tuple(each * weights[index : index + 1] for index, each in enumerate(residuals))


class ControlNetUnion(Wrapper):
    """ControlNet-Union: a ControlNet's inputs with N images (B,N,C,H,P,W,P), their types and their weights.

    As `ControlNetUnionModel.forward`, except that all images are computed at once, so that N is a dynamic axis, and
    that the caller multiplies the residuals.
    """

    example_sizes: ClassVar = {"conditions": 3}

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the ControlNet."""
        named = dict(zip(self.names, inputs, strict=True))
        model, states = self.model, named["encoder_hidden_states"]
        sample = named["sample"]
        embedding = self._embedding(named)
        sample = model.conv_in(sample)
        images = named[CONTROL_IMAGE].flatten(5, 6).flatten(3, 4)
        conditions = model.controlnet_cond_embedding(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        scales = named[CONDITION_SCALES].to(sample.dtype)[None, :, None]
        tasks = model.task_embedding[named[CONTROL_MODES].long()]
        features = (conditions.mean(dim=(3, 4)) + tasks) * scales
        tokens = torch.cat([features, sample.mean(dim=(2, 3)).unsqueeze(1)], dim=1)
        for layer in model.transformer_layes:
            tokens = layer(tokens)
        shifts = model.spatial_ch_projs(tokens[:, :-1]) * scales
        weighted = conditions * scales[..., None, None] + shifts[..., None, None]
        sample = sample + weighted.sum(dim=1)
        residuals = [sample]
        for block in model.down_blocks:
            if getattr(block, "has_cross_attention", False):
                sample, found = block(hidden_states=sample, temb=embedding, encoder_hidden_states=states)
            else:
                sample, found = block(hidden_states=sample, temb=embedding)
            residuals += found
        sample = model.mid_block(sample, embedding, encoder_hidden_states=states)
        projected = [project(each) for project, each in zip(model.controlnet_down_blocks, residuals, strict=True)]
        return *projected, model.controlnet_mid_block(sample)

    def _embedding(self, named: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the embedding of the timestep, the types and the sizes."""
        model, sample = self.model, named["sample"]
        timesteps = named["timestep"].expand(sample.shape[0])
        embedding: torch.Tensor = model.time_embedding(model.time_proj(timesteps).to(sample.dtype))
        types = named[CONTROL_TYPES]
        projected = model.control_type_proj(types.flatten()).unflatten(0, types.shape).flatten(1)
        embedding = embedding + model.control_add_embedding(projected.to(sample.dtype))
        added = _added(named)
        if added is None:
            return embedding
        sizes = added["time_ids"]
        times = model.add_time_proj(sizes.flatten()).unflatten(0, sizes.shape).flatten(1)
        joined = torch.cat([added["text_embeds"], times], dim=-1)
        added_embedding: torch.Tensor = model.add_embedding(joined.to(sample.dtype))
        return embedding + added_embedding


class T2IAdapter(Wrapper):
    """T2I-Adapter: control_image (B,C,H,W) -> a residual for each down block of the UNet."""

    example_sizes: ClassVar = {"image_height": 192, "image_width": 256}  # halved up to six times

    def run(self, control_image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the adapter."""
        return tuple(self.model(control_image))


def control_wrapper(spec: ComponentSpec) -> type[Wrapper] | None:
    """Return the wrapper of a ControlNet or T2I-Adapter; None for other components."""
    if spec.role is Role.T2I_ADAPTER:
        return T2IAdapter
    if spec.role is not Role.CONTROLNET:
        return None
    return ControlNetUnion if any(tensor.name == CONTROL_TYPES for tensor in spec.inputs) else ControlNet


def _added(named: dict[str, torch.Tensor]) -> dict[str, Any] | None:
    """Return `added_cond_kwargs` of diffusers' ControlNets."""
    if "text_embeds" not in named:
        return None
    # diffusers concatenates it with float32 embeddings; without the cast, the exporter would write a Concat of two
    # types.
    return {"text_embeds": named["text_embeds"].float(), "time_ids": named["time_ids"]}
