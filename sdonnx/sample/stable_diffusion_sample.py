"""Sample pipelines of Stable Diffusion 1, 2 and XL.

`sd15` is runwayml/stable-diffusion-v1-5, `sd21` is stabilityai/stable-diffusion-2-1, and `sd21-base` is
stabilityai/stable-diffusion-2-1-base: the configurations are from the published files (`unet/config.json` and so
on). `sdxl` is stabilityai/stable-diffusion-xl-base-1.0, `sdxl-turbo` is stabilityai/sdxl-turbo and `sdxl-refiner` is
stabilityai/stable-diffusion-xl-refiner-1.0. Names with `tiny` are not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sdonnx.sample.architecture import (
    CLIP_TINY,
    VAE_TINY,
    VAE_XL,
    Architecture,
    ClassSpec,
    TokenizerSpec,
    clip_text,
    scheduler,
    unet,
    vae,
)

__all__ = ["STABLE_DIFFUSION", "STABLE_DIFFUSION_XL"]


def _safety_checker(**changes: Any) -> ClassSpec:
    """Return the safety checker of Stable Diffusion 1.5 (CLIP ViT-L/14), with these changes to its vision tower."""
    vision = {
        "attention_dropout": 0.0,
        "hidden_act": "quick_gelu",
        "hidden_size": 1024,
        "image_size": 224,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-05,
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 512,
    } | changes
    config = {
        "architectures": ["StableDiffusionSafetyChecker"],
        "dtype": "float32",
        "initializer_factor": 1.0,
        "logit_scale_init_value": 2.6592,
        "projection_dim": 768,
        "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        "vision_config": vision,
    }
    module = "diffusers.pipelines.stable_diffusion"
    return ClassSpec("transformers", "StableDiffusionSafetyChecker", MappingProxyType(config), module)


def _stable_diffusion(
    unet: ClassSpec,
    vae: ClassSpec,
    text_encoder: ClassSpec,
    scheduler: ClassSpec,
    pad_token: str,
    safety_checker: ClassSpec | None = None,
) -> Architecture:
    return Architecture(
        "StableDiffusionPipeline",
        MappingProxyType({"unet": unet, "vae": vae, "text_encoder": text_encoder}),
        MappingProxyType({"tokenizer": TokenizerSpec(pad_token)}),
        scheduler,
        safety_checker=safety_checker,
    )


_UNET_2_1 = {
    "attention_head_dim": [5, 10, 20, 20],
    "cross_attention_dim": 1024,
    "dual_cross_attention": False,
    "num_class_embeds": None,
    "only_cross_attention": False,
    "use_linear_projection": True,
}

# OpenCLIP ViT-H/14 without its last layer: Stable Diffusion 2 does not use the output of that layer.
_OPEN_CLIP_H = clip_text(
    hidden_act="gelu",
    hidden_size=1024,
    intermediate_size=4096,
    num_attention_heads=16,
    num_hidden_layers=23,
    projection_dim=512,
)

STABLE_DIFFUSION: Mapping[str, Architecture] = {
    # Numbers of channels are realistic (320 and 640, so heads of 40 and 80, and feed-forward widths of 2560 and 5120),
    # because the fused kernels limit all of them. Numbers of layers and latents are small.
    "tiny": _stable_diffusion(
        unet(
            block_out_channels=[320, 640],
            cross_attention_dim=64,
            down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
            layers_per_block=1,
            sample_size=16,
            up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
        ),
        vae(**VAE_TINY),
        clip_text(**CLIP_TINY),
        scheduler("PNDMScheduler"),
        "<|endoftext|>",
        _safety_checker(
            hidden_size=64,
            intermediate_size=256,
            num_attention_heads=4,
            num_hidden_layers=2,
            patch_size=32,
        ),
    ),
    "sd15": _stable_diffusion(
        unet(), vae(), clip_text(), scheduler("PNDMScheduler"), "<|endoftext|>", _safety_checker()
    ),
    "sd21": _stable_diffusion(
        unet(**_UNET_2_1, sample_size=96, upcast_attention=True),
        vae(sample_size=768),
        _OPEN_CLIP_H,
        scheduler("DDIMScheduler", prediction_type="v_prediction"),
        pad_token="!",
    ),
    "sd21-base": _stable_diffusion(
        unet(**_UNET_2_1),
        vae(sample_size=768),
        _OPEN_CLIP_H,
        scheduler("PNDMScheduler", prediction_type="epsilon"),
        pad_token="!",
    ),
}


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
