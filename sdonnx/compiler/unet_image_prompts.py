"""IP-Adapters of a UNet2DConditionModel: the inputs of its graph for images, and for the adapters' scales.

diffusers keeps the scales in the attention processors, where tracing would make them constants. They are an input of
the graph instead (`sdonnx.export.image_attention`), read from the processors at each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.attention_processor import IPAdapterAttnProcessor, IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import (
    ImageProjection,
    IPAdapterFaceIDImageProjection,
    IPAdapterFullImageProjection,
    IPAdapterPlusImageProjection,
    MultiIPAdapterImageProjection,
)

from sdonnx.export.image_attention import ImageAttention, ImagePrompt
from sdonnx.models.image_adapters import ADAPTER_SCALE
from sdonnx.models.ip_adapter import is_cross_attention
from sdonnx.models.spec import TensorSpec

__all__ = ["IMAGE_EMBEDS", "SCALE_ATTRIBUTES", "image_inputs", "image_tensors", "prepare_images", "why_not_images"]

IMAGE_EMBEDS = "image_embeds"

_PROCESSORS = (IPAdapterAttnProcessor, IPAdapterAttnProcessor2_0)

SCALE_ATTRIBUTES: Mapping[type, frozenset[str]] = MappingProxyType(dict.fromkeys(_PROCESSORS, frozenset({"scale"})))
"""Attributes of attention processors that are inputs of the graph, by the processor's class."""


def why_not_images(unet: Any) -> str | None:
    """Return why the adapters of a UNet cannot be compiled; None if they can be, or if it has none."""
    projection = unet.encoder_hid_proj
    if projection is None:
        return None
    if type(projection) is not MultiIPAdapterImageProjection:
        return f"it has a {type(projection).__name__}"
    for layer in projection.image_projection_layers:
        if _embeds_dims(layer, 0) is None:
            return f"an IP-Adapter has a {type(layer).__name__}"
    if getattr(unet, "text_encoder_hid_proj", None) is not None:
        return "it projects its prompts"
    for name, processor in unet.attn_processors.items():
        is_adapted = type(processor) in _PROCESSORS
        if is_adapted != is_cross_attention(name):
            return f"it has IP-Adapters, and {name} is a {type(processor).__name__}"
        if is_adapted and len(processor.to_k_ip) != projection.num_ip_adapters:
            return f"{name} has {len(processor.to_k_ip)} IP-Adapters of {projection.num_ip_adapters}"
    return None


def image_inputs(unet: Any) -> tuple[TensorSpec, ...]:
    """Return the inputs for the embeddings of each adapter's images, and for the scale in each cross-attention."""
    if (projection := unet.encoder_hid_proj) is None:
        return ()
    layers = [(index, _embeds_dims(layer, index)) for index, layer in enumerate(projection.image_projection_layers)]
    embeds = tuple(TensorSpec(f"{IMAGE_EMBEDS}.{index}", dims) for index, dims in layers if dims is not None)
    scale = TensorSpec(ADAPTER_SCALE, (len(embeds), len(_attentions(unet))), keeps_float32=True)
    return (*embeds, scale)


def image_tensors(unet: Any, embeds: Any) -> dict[str, Any] | str:
    """Return values of the inputs for images by name, or why the graph cannot compute a call with them.

    Args:
        unet: The UNet.
        embeds: The entry `image_embeds` of `added_cond_kwargs`.
    """
    if (projection := unet.encoder_hid_proj) is None:
        return {}
    count = projection.num_ip_adapters
    if not isinstance(embeds, list) or len(embeds) != count:
        return f"its {IMAGE_EMBEDS} are not a list of {count} tensors"
    scales = [attention.processor.scale for attention in _attentions(unet)]
    if not all(isinstance(each, list) and len(each) == count for each in scales):
        return f"an IP-Adapter's attention has no list of {count} scales"
    if not all(isinstance(scale, int | float) for each in scales for scale in each):
        return "a scale of an IP-Adapter is not a number"
    named = {f"{IMAGE_EMBEDS}.{index}": tensor for index, tensor in enumerate(embeds)}
    device = embeds[0].device if isinstance(embeds[0], torch.Tensor) else None
    weights = torch.tensor(scales, dtype=torch.float32, device=device)
    return named | {ADAPTER_SCALE: weights.T.contiguous()}


def prepare_images(unet: Any) -> None:
    """Change a UNet in place: its `image_embeds` become a tuple, the list of diffusers and scales (adapters, N)."""
    if unet.encoder_hid_proj is None:
        return
    for index, attention in enumerate(_attentions(unet)):
        processor = attention.processor
        attention.processor = ImageAttention(index, processor.to_k_ip, processor.to_v_ip)
    unet.encoder_hid_proj = _WeightedImageProjection(list(unet.encoder_hid_proj.image_projection_layers))


class _WeightedImageProjection(MultiIPAdapterImageProjection):
    """Project the images of each adapter; each cross-attention is a block with its own weight."""

    def forward(self, image_embeds: Any) -> list[Any]:
        embeds, scales = image_embeds
        tokens = [each.flatten(1, 2) for each in super().forward(embeds)]
        return [ImagePrompt.weighted(each, weights) for each, weights in zip(tokens, scales, strict=True)]


def _attentions(unet: Any) -> list[Any]:
    """Return the cross-attentions of a UNet to images, in the order of `unet.attn_processors`."""
    return [each for each in unet.modules() if type(getattr(each, "processor", None)) in _PROCESSORS]


def _embeds_dims(layer: Any, index: int) -> tuple[str | int, ...] | None:
    """Return the shape of the embeddings that an adapter projects; None for other projections."""
    inner: Any = layer
    images, vectors = f"images_{index}", f"image_tokens_{index}"
    if type(layer) is ImageProjection:
        return "batch_size", images, int(inner.image_embeds.in_features)
    if type(layer) is IPAdapterFaceIDImageProjection:
        return "batch_size", images, int(inner.ff.net[0].proj.in_features)
    if type(layer) is IPAdapterFullImageProjection:
        return "batch_size", images, vectors, int(inner.ff.net[0].proj.in_features)
    if type(layer) is IPAdapterPlusImageProjection:
        return "batch_size", images, vectors, int(inner.proj_in.in_features)
    return None
