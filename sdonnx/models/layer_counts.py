"""Number of attentions, norms and convolutions of an architecture, computed from its configuration.

The optimizer compares a fused graph with these numbers: layers in a form that no rule recognizes are reported as
missing. The formulas follow diffusers' UNet2DConditionModel and AutoencoderKL, and transformers' CLIPTextModel and
CLIPVisionModel. Formulas of other architectures are in the modules of their families.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from sdonnx.models.spec import ComponentSpec, Config

__all__ = [
    "KINDS",
    "clip_text",
    "clip_vision",
    "expected_counts",
    "layer_counts",
    "require_class",
    "unet",
    "unet_down",
    "vae_decoder",
    "vae_encoder",
]

KINDS = ("attention", "geglu", "fast_gelu", "group_norm", "layer_norm", "rms_norm", "convolution")

# Block types with known layers -> whether the block has transformers.
_DOWN = {"CrossAttnDownBlock2D": True, "DownBlock2D": False}
_UP = {"CrossAttnUpBlock2D": True, "UpBlock2D": False}
# Configuration keys that can add layers of other kinds, and the values that add none.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "dual_cross_attention": (False,),
    "attention_type": ("default",),
    "addition_embed_type": (None, "text_time"),
    "encoder_hid_dim_type": (None, "text_proj"),
    "resnet_time_scale_shift": ("default", "scale_shift"),
}


def expected_counts(spec: ComponentSpec, config: Config) -> dict[str, int] | None:
    """Return the number of layers of each kind (`KINDS`), or None if the architecture is not known.

    Args:
        spec: The component.
        config: Its config.json.
    """
    if spec.count_layers is None:
        return None
    try:
        return spec.count_layers(config)
    except (KeyError, TypeError, ValueError, IndexError):
        return None  # other parts than the formula counts, or a contradictory configuration


def layer_counts(**counts: int) -> dict[str, int]:
    """Return counts for all of `KINDS`; kinds that are not passed are 0."""
    return {kind: counts.get(kind, 0) for kind in KINDS}


def require_class(config: Config, *names: str) -> None:
    """Raise unless the configuration belongs to one of these classes of diffusers or transformers.

    Raises:
        KeyError: It does not.
    """
    name = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
    if name not in names:
        raise KeyError("_class_name")


def clip_text(config: Config) -> dict[str, int]:
    """Count the layers of CLIP's text tower: two norms per layer, and a final norm."""
    require_class(config, "CLIPTextModel", "CLIPTextModelWithProjection")
    layers = config["num_hidden_layers"]
    return layer_counts(attention=layers, layer_norm=2 * layers + 1)


def clip_vision(layers: int) -> dict[str, int]:
    """Count the layers of CLIP's vision tower: one more norm before and one after the layers, and a convolution."""
    return layer_counts(attention=layers, layer_norm=2 * layers + 2, convolution=1)


def unet(config: Config) -> dict[str, int]:
    """Count the layers of a UNet2DConditionModel."""
    require_class(config, "UNet2DConditionModel")
    down = unet_down(config)
    blocks = len(config["block_out_channels"])
    layers = _each(config["layers_per_block"], blocks)
    depths = _each(config.get("transformer_layers_per_block", 1), blocks)
    up_depths = list(config.get("reverse_transformer_layers_per_block") or reversed(depths))
    up = [_UP[kind] for kind in config["up_block_types"]]
    up_layers = [count + 1 for count in reversed(layers)]
    resnets = sum(up_layers)
    transformers = sum(n for n, has in zip(up_layers, up, strict=True) if has)
    depth = sum(n * d for n, d, has in zip(up_layers, up_depths, up, strict=True) if has)
    # A resnet that changes the number of channels has a 1x1 convolution; all up blocks concatenate a skip connection.
    projections = 0 if config.get("use_linear_projection") else 2 * transformers
    return layer_counts(
        attention=down["attention"] + 2 * depth,
        geglu=down["geglu"] + depth,
        layer_norm=down["layer_norm"] + 3 * depth,
        group_norm=down["group_norm"] + 2 * resnets + transformers + 1,
        convolution=down["convolution"] + 3 * resnets + projections + 1 + (blocks - 1),
    )


def unet_down(config: Config) -> dict[str, int]:
    """Count the layers of a UNet2DConditionModel's first convolution, down blocks and middle block."""
    channels = config["block_out_channels"]
    blocks = len(channels)
    layers = _each(config["layers_per_block"], blocks)
    depths = _each(config.get("transformer_layers_per_block", 1), blocks)
    down = [_DOWN[kind] for kind in config["down_block_types"]]
    for key, values in _PLAIN.items():
        if config.get(key, values[0]) not in values:
            raise KeyError(key)
    resnets = sum(layers) + 2
    transformers = sum(n for n, has in zip(layers, down, strict=True) if has) + 1
    depth = sum(n * d for n, d, has in zip(layers, depths, down, strict=True) if has) + depths[-1]
    projections = 0 if config.get("use_linear_projection") else 2 * transformers
    return layer_counts(
        attention=2 * depth,
        geglu=depth,
        layer_norm=3 * depth,
        group_norm=2 * resnets + transformers,
        convolution=2 * resnets + _changes(channels) + projections + 1 + (blocks - 1),
    )


def vae_encoder(config: Config) -> dict[str, int]:
    """Count the layers of an AutoencoderKL's encoder."""
    layers = config["layers_per_block"]
    return _vae(config, "down_block_types", "DownEncoderBlock2D", layers, "use_quant_conv")


def vae_decoder(config: Config) -> dict[str, int]:
    """Count the layers of an AutoencoderKL's decoder."""
    layers = config["layers_per_block"] + 1
    return _vae(config, "up_block_types", "UpDecoderBlock2D", layers, "use_post_quant_conv")


def _vae(config: Config, key: str, block_type: str, layers: int, quantization: str) -> dict[str, int]:
    require_class(config, "AutoencoderKL")
    if set(config[key]) != {block_type}:
        raise KeyError(key)
    channels = config["block_out_channels"]
    blocks = len(channels)
    attention = 1 if config.get("mid_block_add_attention", True) else 0
    resnets = blocks * layers + 2
    quantizing = 1 if config.get(quantization, True) else 0
    return layer_counts(
        attention=attention,
        group_norm=2 * resnets + attention + 1,
        convolution=2 * resnets + _changes(channels) + (blocks - 1) + 2 + quantizing,
    )


def _each(value: Any, blocks: int) -> list[int]:
    return list(value) if isinstance(value, Sequence) else [value] * blocks


def _changes(channels: Sequence[int]) -> int:
    return sum(before != after for before, after in itertools.pairwise(channels))
