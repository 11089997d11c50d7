"""Configurations of a checkpoint's components: the published pipeline's, with sizes from the file's shapes.

Shapes contain no number of attention heads or of groups in a GroupNorm: these are the published ones, or follow from
the published size of a head. A configuration with the published sizes is the published configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count
from typing import Any

from sdonnx.export.stored_tensors import Shape

__all__ = ["text_encoder_config", "unet_config", "vae_config"]

Shapes = Mapping[str, Shape]
"""Shapes of parameters, by their names in diffusers or transformers."""

_HEAD = 64
"""Channels of an attention head in UNets with linear projections in their attention (Stable Diffusion 2 and XL)."""


def unet_config(shapes: Shapes, published: Mapping[str, Any], pooled: int | None, sizes: int) -> dict[str, Any]:
    """Return the configuration of a UNet2DConditionModel.

    Args:
        shapes: Shapes of its parameters.
        published: Configuration of the published UNet.
        pooled: Width of the pooled text embedding, if the UNet receives one.
        sizes: Number of sizes of images that the UNet receives next to it.
    """
    # The middle block is as deep as the last block, also where the last block has no attention.
    middle = _count(shapes, "mid_block.attentions.0.transformer_blocks.{}.attn1.to_q.weight")
    channels, depths = [], []
    for block in range(_count(shapes, "down_blocks.{}.resnets.0.conv1.weight")):
        channels.append(_size(shapes, f"down_blocks.{block}.resnets.0.conv1.weight", 0) or 0)
        attention = f"down_blocks.{block}.attentions.0.transformer_blocks"
        depths.append(_count(shapes, attention + ".{}.attn1.to_q.weight"))
    changes: dict[str, Any] = {
        "block_out_channels": channels,
        "down_block_types": ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths],
        "up_block_types": ["CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(depths)],
        "layers_per_block": _count(shapes, "down_blocks.0.resnets.{}.conv1.weight"),
        "in_channels": _size(shapes, "conv_in.weight", 1),
        "out_channels": _size(shapes, "conv_out.weight", 0),
        "cross_attention_dim": _size(shapes, r".*\.attn2\.to_k\.weight", 1),
    }
    linear = any(len(shape) == 2 for name, shape in shapes.items() if name.endswith(".proj_in.weight"))
    if linear != published.get("use_linear_projection", False):
        changes["use_linear_projection"] = linear
    if published.get("use_linear_projection"):
        changes["attention_head_dim"] = [max(1, each // _HEAD) for each in channels]
    if (layers := _layers(published, depths, middle)) is not None:
        changes["transformer_layers_per_block"] = layers
    if pooled is not None and (embedded := _size(shapes, "add_embedding.linear_1.weight", 1)) is not None:
        changes["projection_class_embeddings_input_dim"] = embedded
        changes["addition_time_embed_dim"] = (embedded - pooled) // sizes
    return _changed(published, changes)


def _layers(published: Mapping[str, Any], depths: list[int], middle: int) -> list[int] | None:
    """Return the number of transformer layers by block, or None if it is the published one."""
    known = published.get("transformer_layers_per_block", 1)
    usual = list(known) if isinstance(known, list) else [known] * len(depths)
    if len(usual) != len(depths):
        usual = [1] * len(depths)
    layers = [depth or default for depth, default in zip(depths, usual, strict=True)]
    if depths and not depths[-1] and middle:
        layers[-1] = middle
    return None if layers == known or layers == [known] * len(layers) else layers


def vae_config(shapes: Shapes, published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an AutoencoderKL.

    Args:
        shapes: Shapes of its parameters.
        published: Configuration of the published autoencoder.
    """
    blocks = range(_count(shapes, "encoder.down_blocks.{}.resnets.0.conv1.weight"))
    changes = {
        "block_out_channels": [
            _size(shapes, f"encoder.down_blocks.{block}.resnets.0.conv1.weight", 0) for block in blocks
        ],
        "down_block_types": ["DownEncoderBlock2D"] * len(blocks),
        "up_block_types": ["UpDecoderBlock2D"] * len(blocks),
        "layers_per_block": _count(shapes, "encoder.down_blocks.0.resnets.{}.conv1.weight"),
        "in_channels": _size(shapes, "encoder.conv_in.weight", 1),
        "out_channels": _size(shapes, "decoder.conv_out.weight", 0),
        "latent_channels": _size(shapes, "decoder.conv_in.weight", 1),
    }
    return _changed(published, changes)


def text_encoder_config(shapes: Shapes, published: Mapping[str, Any], unused: int = 0) -> dict[str, Any]:
    """Return the configuration of a CLIPTextModel or CLIPTextModelWithProjection.

    Args:
        shapes: Shapes of its parameters, without the prefix "text_model.".
        published: Configuration of the published encoder.
        unused: Number of last layers that its file may have in addition, and that are not used.
    """
    width = _size(shapes, "embeddings.token_embedding.weight", 1)
    head = published["hidden_size"] // published["num_attention_heads"]
    layers = _count(shapes, "encoder.layers.{}.layer_norm1.weight")
    changes = {
        "hidden_size": width,
        "intermediate_size": _size(shapes, "encoder.layers.0.mlp.fc1.weight", 0),
        "num_attention_heads": None if width is None else max(1, width // head),
        "num_hidden_layers": layers - unused if layers == published["num_hidden_layers"] + unused else layers,
        "vocab_size": _size(shapes, "embeddings.token_embedding.weight", 0),
        "max_position_embeddings": _size(shapes, "embeddings.position_embedding.weight", 0),
    }
    if "CLIPTextModelWithProjection" in published["architectures"]:
        changes["projection_dim"] = _size(shapes, "text_projection.weight", 0)
    return _changed(published, changes)


def _changed(published: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the sizes that were found; missing tensors are reported when weights are checked."""
    return {**published, **{key: value for key, value in changes.items() if value or value is False}}


def _count(shapes: Shapes, pattern: str) -> int:
    """Return the number of layers, numbered from 0, that have a parameter with this name."""
    return next(number for number in count() if pattern.format(number) not in shapes)


def _size(shapes: Shapes, pattern: str, axis: int) -> int | None:
    """Return the size of an axis of the first parameter with a matching name, or None if there is none."""
    for name, shape in shapes.items():
        if re.fullmatch(pattern, name) and axis < len(shape):
            return shape[axis]
    return None
