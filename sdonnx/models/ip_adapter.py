"""IP-Adapter (Ye et al. 2023, arXiv:2308.06721): components and inputs that image prompts add to a family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sdonnx.models.image_adapters import ADAPTER_SCALE, ADAPTERS, IMAGE_PROCESSOR, AdapterSet
from sdonnx.models.layer_counts import clip_vision, require_class
from sdonnx.models.spec import ComponentSpec, Config, Family, Role, TensorSpec

__all__ = ["is_cross_attention", "with_adapters"]


def _count_vision(config: Config) -> dict[str, int]:
    require_class(config, "CLIPVisionModelWithProjection")
    return clip_vision(config["num_hidden_layers"])


# CLIP's vision tower. IP-Adapter reads the projected embedding, IP-Adapter Plus the input of the last layer.
_IMAGE_PROMPT_ENCODER = ComponentSpec(
    "image_encoder",
    "image_encoder",
    Role.IMAGE_PROMPT_ENCODER,
    (TensorSpec("pixel_values", ("batch_size", "config:num_channels", "config:image_size", "config:image_size")),),
    (
        TensorSpec("image_embeds", ("batch_size", "config:projection_dim")),
        TensorSpec("penultimate_hidden_states", ("batch_size", "positions", "config:hidden_size")),
    ),
    (IMAGE_PROCESSOR, "preprocessor_config.json"),
    count_layers=_count_vision,
)


def is_cross_attention(name: str) -> bool:
    """Return whether an entry of a UNet's `attn_processors` attends to the prompt."""
    return name.endswith(".attn2.processor")


def with_adapters(family: Family, adapters: AdapterSet) -> Family:
    """Return the family with an image encoder, the adapters' projections, and a denoiser that attends to images.

    The denoiser gets the inputs `image_embeds.i` (B,T,D), the tokens that adapter i makes from all its images, and
    `ip_adapter_scale` (A,N), the weight of each adapter in each block of `AdapterSet.blocks`.
    """
    projection = ComponentSpec(
        ADAPTERS,
        ADAPTERS,
        Role.IMAGE_PROMPT_ADAPTER,
        tuple(
            TensorSpec(f"image_embeds.{i}", (f"images_{i}", adapter.length, adapter.width))
            for i, adapter in enumerate(adapters.adapters)
        ),
        tuple(
            TensorSpec(f"ip_hidden_states.{i}", (f"images_{i}", adapter.tokens, adapters.width))
            for i, adapter in enumerate(adapters.adapters)
        ),
    )
    components: list[ComponentSpec] = []
    for spec in family.components:
        if spec.role is Role.DENOISER:
            components += [_IMAGE_PROMPT_ENCODER, projection, _with_image_inputs(spec, adapters)]
        else:
            components.append(spec)
    return replace(family, components=tuple(components), adapters=adapters)


def _with_image_inputs(denoiser: ComponentSpec, adapters: AdapterSet) -> ComponentSpec:
    count = len(adapters.adapters)
    images = (
        TensorSpec(f"image_embeds.{i}", ("batch_size", f"image_tokens_{i}", adapters.width)) for i in range(count)
    )
    scale = TensorSpec(ADAPTER_SCALE, (count, len(adapters.blocks)), keeps_float32=True)
    return replace(
        denoiser,
        inputs=(*denoiser.inputs, *images, scale),
        count_layers=denoiser.count_layers and _with_image_attentions(denoiser.count_layers, count),
    )


def _with_image_attentions(
    count_layers: Callable[[Config], dict[str, int]], adapters: int
) -> Callable[[Config], dict[str, int]]:
    """Return a counter with one more attention per adapter in each transformer block; a block has one GEGLU."""

    def count(config: Config) -> dict[str, int]:
        layers = count_layers(config)
        return layers | {"attention": layers["attention"] + adapters * layers["geglu"]}

    return count
