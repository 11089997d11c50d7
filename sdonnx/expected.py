"""How many attentions, norms and convolutions an architecture has, by its configuration.

A fused graph is measured by this: what an exporter wrote in a form that no rule knows is missing from
the counts, where a rule that never matched would stay silent. Formulas are those of diffusers'
UNet2DConditionModel, PixArtTransformer2DModel, AutoencoderKL and StableDiffusionSafetyChecker and of transformers'
CLIPTextModel, CLIPVisionModel and T5EncoderModel.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sdonnx.families import Role

__all__ = ["KINDS", "expected_counts"]

KINDS = ("attention", "geglu", "fast_gelu", "group_norm", "layer_norm", "rms_norm", "convolution")

_TEXT = (Role.TEXT_ENCODER, Role.TEXT_ENCODER_2)

# The blocks that are counted: whether each has transformers.
_DOWN = {"CrossAttnDownBlock2D": True, "DownBlock2D": False}
_UP = {"CrossAttnUpBlock2D": True, "UpBlock2D": False}
_TANH = "gelu-approximate"
# What published checkpoints call PixArt's transformer, which diffusers maps as it loads them.
_PIXART = ("PixArtTransformer2DModel", "Transformer2DModel")
_CODING = {True: "UpDecoderBlock2D", False: "DownEncoderBlock2D"}
# Keys that bring in layers of other kinds, and the values with which they do not.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "dual_cross_attention": (False,),
    "attention_type": ("default",),
    "addition_embed_type": (None, "text_time"),
    "encoder_hid_dim_type": (None, "text_proj"),
    "resnet_time_scale_shift": ("default", "scale_shift"),
}


def expected_counts(role: Role, config: Mapping[str, Any]) -> dict[str, int] | None:
    """Return how many of each kind (KINDS) a component has, None where its architecture is not known.

    Args:
        role: what the component does.
        config: its config.json.
    """
    try:
        name = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
        if name == "UNet2DConditionModel" and role is Role.DENOISER:
            return _unet(config)
        if name in _PIXART and role is Role.DENOISER:
            return _pixart(config)
        if name == "T5EncoderModel" and role is Role.TEXT_ENCODER:
            layers = config["num_layers"]
            gelus = layers if config["feed_forward_proj"] == "gated-gelu" else 0
            return _counts(attention=layers, rms_norm=2 * layers + 1, fast_gelu=gelus)
        if name == "AutoencoderKL" and role in (Role.IMAGE_ENCODER, Role.IMAGE_DECODER):
            return _autoencoder(config, role is Role.IMAGE_DECODER)
        if name in ("CLIPTextModel", "CLIPTextModelWithProjection") and role in _TEXT:
            layers = config["num_hidden_layers"]
            return _counts(attention=layers, layer_norm=2 * layers + 1)
        if name == "StableDiffusionSafetyChecker" and role is Role.SAFETY_CHECKER:
            layers = config["vision_config"]["num_hidden_layers"]
            return _vision(layers)
        if name == "CLIPVisionModelWithProjection" and role is Role.IMAGE_PROMPT_ENCODER:
            return _vision(config["num_hidden_layers"])
    except (KeyError, TypeError, ValueError, IndexError):
        return None  # parts that are not counted here, or a configuration that contradicts itself
    return None


def _counts(**counts: int) -> dict[str, int]:
    return {kind: counts.get(kind, 0) for kind in KINDS}


def _vision(layers: int) -> dict[str, int]:
    """The vision tower of CLIP: a norm before its layers and one behind them; its patches are a convolution."""
    return _counts(attention=layers, layer_norm=2 * layers + 2, convolution=1)


def _pixart(config: Mapping[str, Any]) -> dict[str, int]:
    """Blocks have two attentions, two norms and a gelu; the caption's projection a gelu, the patches a convolution."""
    if config["norm_type"] != "ada_norm_single" or config.get("activation_fn", _TANH) != _TANH:
        raise KeyError("norm_type or activation_fn")
    blocks = config["num_layers"]
    projects = config.get("caption_channels") is not None
    return _counts(attention=2 * blocks, layer_norm=2 * blocks + 1, fast_gelu=blocks + projects, convolution=1)


def _each(value: Any, blocks: int) -> list[int]:
    return list(value) if isinstance(value, Sequence) else [value] * blocks


def _unet(config: Mapping[str, Any]) -> dict[str, int]:
    channels = config["block_out_channels"]
    blocks = len(channels)
    layers = _each(config["layers_per_block"], blocks)
    depths = _each(config.get("transformer_layers_per_block", 1), blocks)
    up_depths = list(config.get("reverse_transformer_layers_per_block") or reversed(depths))
    down = [_DOWN[kind] for kind in config["down_block_types"]]
    up = [_UP[kind] for kind in config["up_block_types"]]
    for key, values in _PLAIN.items():
        if config.get(key, values[0]) not in values:
            raise KeyError(key)
    up_layers = [count + 1 for count in reversed(layers)]
    resnets = sum(layers) + 2 + sum(up_layers)
    transformers = sum(n for n, has in zip(layers, down, strict=True) if has) + 1
    transformers += sum(n for n, has in zip(up_layers, up, strict=True) if has)
    depth = sum(n * d for n, d, has in zip(layers, depths, down, strict=True) if has) + depths[-1]
    depth += sum(n * d for n, d, has in zip(up_layers, up_depths, up, strict=True) if has)
    # A 1x1 convolution where a resnet changes the channels: going up, each one takes a skip connection in.
    shortcuts = _changes(channels) + sum(up_layers)
    projections = 0 if config.get("use_linear_projection") else 2 * transformers
    return _counts(
        attention=(2 + config.get("ip_adapters", 0)) * depth,
        geglu=depth,
        layer_norm=3 * depth,
        group_norm=2 * resnets + transformers + 1,
        convolution=2 * resnets + shortcuts + projections + 2 + 2 * (blocks - 1),
    )


def _changes(channels: Sequence[int]) -> int:
    return sum(before != after for before, after in itertools.pairwise(channels))


def _autoencoder(config: Mapping[str, Any], decodes: bool) -> dict[str, int]:
    if set(config["up_block_types" if decodes else "down_block_types"]) != {_CODING[decodes]}:
        raise KeyError("block types")
    channels = config["block_out_channels"]
    blocks = len(channels)
    layers = config["layers_per_block"] + (1 if decodes else 0)
    attention = 1 if config.get("mid_block_add_attention", True) else 0
    resnets = blocks * layers + 2
    quantization = config.get("use_post_quant_conv" if decodes else "use_quant_conv", True)
    return _counts(
        attention=attention,
        group_norm=2 * resnets + attention + 1,
        convolution=2 * resnets + _changes(channels) + (blocks - 1) + 2 + (1 if quantization else 0),
    )
