"""Configurations of networks that several families share; the defaults are from Stable Diffusion 1.5."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from sdonnx.sample.architecture import ClassSpec

__all__ = ["CLIP_TINY", "VAE_TINY", "VAE_XL", "clip_text", "scheduler", "unet", "vae"]

# force_upcast: activations of the published autoencoder exceed float16's range.
VAE_XL = {"force_upcast": True, "sample_size": 1024, "scaling_factor": 0.13025}
"""Changes for the autoencoder of Stable Diffusion XL."""

# 4 channels per group, because the kernels require an even number. Four blocks, so a latent is 8x8 pixels.
VAE_TINY = {"block_out_channels": [32, 32, 64, 64], "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 128}

CLIP_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "projection_dim": 64,
}


def unet(**changes: Any) -> ClassSpec:
    """Return the UNet of Stable Diffusion 1.5, with these changes to its configuration."""
    config = {
        "act_fn": "silu",
        "attention_head_dim": 8,
        "block_out_channels": [320, 640, 1280, 1280],
        "center_input_sample": False,
        "cross_attention_dim": 768,
        "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
        "downsample_padding": 1,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "in_channels": 4,
        "layers_per_block": 2,
        "mid_block_scale_factor": 1,
        "norm_eps": 1e-05,
        "norm_num_groups": 32,
        "out_channels": 4,
        "sample_size": 64,
        "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    }
    return ClassSpec("diffusers", "UNet2DConditionModel", MappingProxyType(config | changes))


def vae(**changes: Any) -> ClassSpec:
    """Return the autoencoder of Stable Diffusion 1.5, with these changes to its configuration."""
    config = {
        "act_fn": "silu",
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "in_channels": 3,
        "latent_channels": 4,
        "layers_per_block": 2,
        "norm_num_groups": 32,
        "out_channels": 3,
        "sample_size": 512,
        "scaling_factor": 0.18215,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
    }
    return ClassSpec("diffusers", "AutoencoderKL", MappingProxyType(config | changes))


def clip_text(name: str = "CLIPTextModel", **changes: Any) -> ClassSpec:
    """Return the text encoder of Stable Diffusion 1.5 (CLIP ViT-L/14), with class `name` and these changes."""
    config = {
        "architectures": [name],
        "attention_dropout": 0.0,
        # The published values, which differ from the tokenizer's ids: with 2, transformers pools at the largest id.
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "dtype": "float32",
        "hidden_act": "quick_gelu",
        "hidden_size": 768,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 77,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "projection_dim": 768,
        "vocab_size": 49408,
    }
    return ClassSpec("transformers", name, MappingProxyType(config | changes))


def scheduler(name: str, **changes: Any) -> ClassSpec:
    """Return a scheduler of class `name` with the noise schedule of Stable Diffusion and these changes."""
    config = {
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "clip_sample": False,
        "num_train_timesteps": 1000,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "trained_betas": None,
    }
    return ClassSpec("diffusers", name, MappingProxyType(config | changes))
