"""Sample pipelines of Stable Diffusion XL.

`sdxl` is stabilityai/stable-diffusion-xl-base-1.0, `sdxl-turbo` is stabilityai/sdxl-turbo and `sdxl-refiner` is
stabilityai/stable-diffusion-xl-refiner-1.0. `sdxl-tiny` and `sdxl-refiner-tiny` are not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sdonnx.sample.architecture import Architecture, ClassSpec, TokenizerSpec
from sdonnx.sample.sample_networks import CLIP_TINY, VAE_TINY, VAE_XL, clip_text, scheduler, unet, vae

__all__ = ["STABLE_DIFFUSION_XL"]


def _stable_diffusion_xl(
    unet: ClassSpec, vae: ClassSpec, text_encoder: ClassSpec, text_encoder_2: ClassSpec, scheduler: ClassSpec
) -> Architecture:
    return Architecture(
        "StableDiffusionXLPipeline",
        MappingProxyType({"unet": unet, "vae": vae, "text_encoder": text_encoder, "text_encoder_2": text_encoder_2}),
        MappingProxyType({"tokenizer": TokenizerSpec("<|endoftext|>"), "tokenizer_2": TokenizerSpec("!")}),
        scheduler,
        options=MappingProxyType({"force_zeros_for_empty_prompt": True, "add_watermarker": False}),
    )


def _refiner(unet: ClassSpec, vae: ClassSpec, text_encoder_2: ClassSpec, scheduler: ClassSpec) -> Architecture:
    absent = {"text_encoder": None, "tokenizer": None, "add_watermarker": False}
    scored = {"force_zeros_for_empty_prompt": False, "requires_aesthetics_score": True}
    return Architecture(
        "StableDiffusionXLImg2ImgPipeline",
        MappingProxyType({"unet": unet, "vae": vae, "text_encoder_2": text_encoder_2}),
        MappingProxyType({"tokenizer_2": TokenizerSpec("!")}),
        scheduler,
        options=MappingProxyType(absent | scored),
    )


_UNET_XL = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}

_UNET_XL_TINY = _UNET_XL | {
    "addition_time_embed_dim": 32,
    "attention_head_dim": [5, 10],
    "block_out_channels": [320, 640],
    "cross_attention_dim": 128,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "layers_per_block": 1,
    "projection_class_embeddings_input_dim": 64 + 6 * 32,
    "sample_size": 16,
    "transformer_layers_per_block": [1, 2],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
}

_UNET_REFINER = _UNET_XL | {
    "attention_head_dim": [6, 12, 24, 24],
    "block_out_channels": [384, 768, 1536, 1536],
    "cross_attention_dim": 1280,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "projection_class_embeddings_input_dim": 2560,
    "transformer_layers_per_block": 4,
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
}

# OpenCLIP ViT-bigG/14.
_OPEN_CLIP_G = clip_text(
    "CLIPTextModelWithProjection",
    hidden_act="gelu",
    hidden_size=1280,
    intermediate_size=5120,
    num_attention_heads=20,
    num_hidden_layers=32,
    projection_dim=1280,
)
_OPEN_CLIP_TINY = clip_text(
    "CLIPTextModelWithProjection", **(CLIP_TINY | {"hidden_act": "gelu", "num_hidden_layers": 3})
)

_EULER_XL = {
    "interpolation_type": "linear",
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "timestep_spacing": "leading",
    "use_karras_sigmas": False,
}

STABLE_DIFFUSION_XL: Mapping[str, Architecture] = {
    "sdxl": _stable_diffusion_xl(
        unet(**_UNET_XL),
        vae(**VAE_XL),
        clip_text(),
        _OPEN_CLIP_G,
        scheduler("EulerDiscreteScheduler", **_EULER_XL),
    ),
    "sdxl-turbo": _stable_diffusion_xl(
        unet(**(_UNET_XL | {"sample_size": 64})),
        vae(**VAE_XL),
        clip_text(),
        _OPEN_CLIP_G,
        scheduler("EulerAncestralDiscreteScheduler", **(_EULER_XL | {"timestep_spacing": "trailing"})),
    ),
    "sdxl-refiner": _refiner(
        unet(**_UNET_REFINER),
        vae(**VAE_XL),
        _OPEN_CLIP_G,
        scheduler("EulerDiscreteScheduler", **_EULER_XL),
    ),
    "sdxl-tiny": _stable_diffusion_xl(
        unet(**_UNET_XL_TINY),
        vae(**(VAE_XL | VAE_TINY)),
        clip_text(**CLIP_TINY),
        _OPEN_CLIP_TINY,
        scheduler("EulerDiscreteScheduler", **_EULER_XL),
    ),
    "sdxl-refiner-tiny": _refiner(
        unet(**_UNET_XL_TINY | {"cross_attention_dim": 64, "projection_class_embeddings_input_dim": 64 + 5 * 32}),
        vae(**(VAE_XL | VAE_TINY)),
        _OPEN_CLIP_TINY,
        scheduler("EulerDiscreteScheduler", **_EULER_XL),
    ),
}
