"""Modules of diffusers and transformers with random weights, small enough to be traced in seconds."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, PixArtTransformer2DModel, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPVisionConfig, CLIPVisionModelWithProjection

from sdonnx.operators.kernel_case import Array

__all__ = [
    "TEXT_WIDTH",
    "small_autoencoder",
    "small_image_encoder",
    "small_text_encoder",
    "small_transformer",
    "small_unet",
    "unet_inputs",
    "unet_output",
    "wide_unet",
]

TEXT_WIDTH = 16
"""Size of the text states that the UNet reads."""


def small_unet(**options: Any) -> Any:
    """Return a UNet with one block; options change its configuration."""
    # Spinning threads of both torch and ONNX Runtime on a few shared cores take ten times as long.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "block_out_channels": (32,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("UpBlock2D",),
        "attention_head_dim": 2,
        "norm_num_groups": 8,
        "layers_per_block": 1,
    }
    model: Any = UNet2DConditionModel(sample_size=16, cross_attention_dim=TEXT_WIDTH, **(sizes | options))
    return model.eval().requires_grad_(False)


def wide_unet() -> Any:
    """Return a UNet with layer sizes that our operators accept."""
    return small_unet(block_out_channels=(64, 128), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                      up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=64)  # fmt: skip


def unet_inputs() -> tuple[torch.Tensor, int, torch.Tensor]:
    """Return arguments of a `small_unet`: latents, a timestep and text states of two images."""
    generator = torch.manual_seed(3)
    return torch.randn(2, 4, 8, 8, generator=generator), 7, torch.randn(2, 7, TEXT_WIDTH, generator=generator)


def unet_output(unet: Any) -> Array:
    """Return the output of a `small_unet` for `unet_inputs`."""
    with torch.inference_mode():
        found: Array = unet(*unet_inputs()).sample.numpy()
    return found


def small_autoencoder(**options: Any) -> Any:
    """Return an autoencoder; options change its configuration."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "block_out_channels": (16, 32),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 8,
        "sample_size": 32,
    }
    model: Any = AutoencoderKL(**(sizes | options))
    return model.eval().requires_grad_(False)


def small_text_encoder(kind: Any = CLIPTextModel, **options: Any) -> Any:
    """Return a text encoder of CLIP; options change its configuration."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "projection_dim": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 77, "bos_token_id": 97, "eos_token_id": 98,
    }  # fmt: skip
    return kind(CLIPTextConfig(**(sizes | options))).eval().requires_grad_(False)


def small_image_encoder(**options: Any) -> Any:
    """Return an image encoder of CLIP; options change its configuration."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "projection_dim": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
    }  # fmt: skip
    return CLIPVisionModelWithProjection(CLIPVisionConfig(**(sizes | options))).eval().requires_grad_(False)


def small_transformer(**options: Any) -> Any:
    """Return a transformer of PixArt with text states of 24 values; options change its configuration."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 24,
        "num_layers": 2, "sample_size": 16,
    }  # fmt: skip
    model: Any = PixArtTransformer2DModel(**(sizes | options))
    return model.eval().requires_grad_(False)
