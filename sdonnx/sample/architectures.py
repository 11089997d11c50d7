"""The architectures that `write_sample` can write, as a table.

An architecture is data: the classes of diffusers and transformers that make its components, and the
configurations that its published pipeline has. A new one is a new entry.

Sources, by the name of the published pipeline and the file in it (`unet/config.json` and so on):
`sd15` is runwayml/stable-diffusion-v1-5, `sd21` is stabilityai/stable-diffusion-2-1, `sd21-base` is
stabilityai/stable-diffusion-2-1-base, `sdxl` is stabilityai/stable-diffusion-xl-base-1.0, `sdxl-turbo` is
stabilityai/sdxl-turbo and `sdxl-refiner` is stabilityai/stable-diffusion-xl-refiner-1.0. `tiny`, `sdxl-tiny` and
`sdxl-refiner-tiny` are published nowhere. Those that end with `-ip-adapter` are the same with IP-Adapters beside them,
as h94/IP-Adapter has them. `pixart-alpha` is PixArt-alpha/PixArt-XL-2-1024-MS, `pixart-sigma` is
PixArt-alpha/PixArt-Sigma-XL-2-1024-MS with the other components of PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers, and
the names with `tiny` are published nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

__all__ = ["ARCHITECTURES", "AdapterSpec", "Architecture", "ClassSpec", "T5TokenizerSpec", "TokenizerSpec"]


@dataclass(frozen=True)
class ClassSpec:
    """A class of diffusers or transformers and the configuration that it is built from.

    Attributes:
        library: the package whose kind of class it is: how it is made, saved and loaded.
        name: the class.
        config: its configuration; what it leaves out has the class's default.
        module: where the class is; None for the package itself.
    """

    library: str
    name: str
    config: Mapping[str, Any]
    module: str | None = None


@dataclass(frozen=True)
class TokenizerSpec:
    """What differs between the published CLIP tokenizers.

    Attributes:
        pad_token: the token that fills a prompt up to `model_max_length`.
        model_max_length: the most tokens that the text encoder has positions for.
        vocab_size: the number of tokens, the two special ones included.
    """

    pad_token: str
    model_max_length: int = 77
    vocab_size: int = 49408


@dataclass(frozen=True)
class T5TokenizerSpec:
    """What differs between the published T5 tokenizers.

    Attributes:
        model_max_length: the length that captions are padded to.
        vocab_size: the number of tokens, special ones included; the encoder has room for a few more.
    """

    model_max_length: int
    vocab_size: int = 32100


@dataclass(frozen=True)
class Architecture:
    """A pipeline without its weights.

    Attributes:
        pipeline: its class in diffusers.
        networks: the components that have weights, by folder.
        tokenizers: the tokenizers, by folder.
        scheduler: the sampler it is published with.
        options: what else the pipeline's class is given.
        safety_checker: what it is published with to look at its images, where there is one.
        adapters: IP-Adapters that are written beside it, where there are some.
    """

    pipeline: str
    networks: Mapping[str, ClassSpec]
    tokenizers: Mapping[str, TokenizerSpec | T5TokenizerSpec]
    scheduler: ClassSpec
    options: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType(
            {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        )
    )
    safety_checker: ClassSpec | None = None
    adapters: AdapterSpec | None = None


@dataclass(frozen=True)
class AdapterSpec:
    """IP-Adapters, plain and Plus, and the image encoder that both read.

    Attributes:
        image_encoder: the encoder.
        hidden_size: of the resampler of Plus.
        heads: of its attentions, of 64 channels each.
        queries: how many tokens it makes of an image.
    """

    image_encoder: ClassSpec
    hidden_size: int
    heads: int
    queries: int = 16


def _unet(**changes: Any) -> ClassSpec:
    """Return the UNet of Stable Diffusion 1.5, changed."""
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


def _vae(**changes: Any) -> ClassSpec:
    """Return the autoencoder of Stable Diffusion 1.5, changed."""
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


def _clip_text(name: str = "CLIPTextModel", **changes: Any) -> ClassSpec:
    """Return the text encoder of Stable Diffusion 1.5 (CLIP ViT-L/14) under the class `name`, changed."""
    config = {
        "architectures": [name],
        "attention_dropout": 0.0,
        # Not the tokenizer's numbers, but the published ones: 2 makes transformers pool at the largest id.
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


def _safety_checker(**changes: Any) -> ClassSpec:
    """Return the safety checker of Stable Diffusion 1.5 (the vision tower of CLIP ViT-L/14), the tower changed."""
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


def _clip_vision(**changes: Any) -> ClassSpec:
    """Return the image encoder of the published IP-Adapters (OpenCLIP ViT-H/14), changed."""
    config = {
        "architectures": ["CLIPVisionModelWithProjection"],
        "attention_dropout": 0.0,
        "dtype": "float32",
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "image_size": 224,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "layer_norm_eps": 1e-05,
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 32,
        "patch_size": 14,
        "projection_dim": 1024,
    }
    return ClassSpec("transformers", "CLIPVisionModelWithProjection", MappingProxyType(config | changes))


def _scheduler(name: str, **changes: Any) -> ClassSpec:
    """Return the noise schedule of Stable Diffusion, changed, under the scheduler class `name`."""
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


_UNET_2_1 = {
    "attention_head_dim": [5, 10, 20, 20],
    "cross_attention_dim": 1024,
    "dual_cross_attention": False,
    "num_class_embeds": None,
    "only_cross_attention": False,
    "use_linear_projection": True,
}

# OpenCLIP ViT-H/14 without its last layer, whose output Stable Diffusion 2 does not use.
_OPEN_CLIP_H = _clip_text(
    hidden_act="gelu",
    hidden_size=1024,
    intermediate_size=4096,
    num_attention_heads=16,
    num_hidden_layers=23,
    projection_dim=512,
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

# force_upcast: activations of the published autoencoder go beyond what fp16 holds.
_VAE_XL = {"force_upcast": True, "sample_size": 1024, "scaling_factor": 0.13025}
_VAE_TINY = {"block_out_channels": [32, 32, 64, 64], "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 128}

# OpenCLIP ViT-bigG/14.
_OPEN_CLIP_G = _clip_text(
    "CLIPTextModelWithProjection",
    hidden_act="gelu",
    hidden_size=1280,
    intermediate_size=5120,
    num_attention_heads=20,
    num_hidden_layers=32,
    projection_dim=1280,
)
_CLIP_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "projection_dim": 64,
}
_OPEN_CLIP_TINY = _clip_text(
    "CLIPTextModelWithProjection", **(_CLIP_TINY | {"hidden_act": "gelu", "num_hidden_layers": 3})
)

_EULER_XL = {
    "interpolation_type": "linear",
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "timestep_spacing": "leading",
    "use_karras_sigmas": False,
}


def _t5(**changes: Any) -> ClassSpec:
    """Return the text encoder of PixArt (the encoder of T5 1.1 XXL), changed."""
    config = {
        "architectures": ["T5EncoderModel"],
        "classifier_dropout": 0.0,
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "dtype": "float32",
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0,
        "layer_norm_epsilon": 1e-06,
        "num_decoder_layers": 24,
        "num_heads": 64,
        "num_layers": 24,
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "tie_word_embeddings": False,
        "vocab_size": 32128,
    }
    return ClassSpec("transformers", "T5EncoderModel", MappingProxyType(config | changes))


def _pixart_transformer(**changes: Any) -> ClassSpec:
    """Return the transformer of PixArt-alpha at 1024x1024, changed."""
    config = {
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "attention_head_dim": 72,
        "attention_type": "default",
        "caption_channels": 4096,
        "cross_attention_dim": 1152,
        "dropout": 0.0,
        "in_channels": 4,
        "norm_elementwise_affine": False,
        "norm_eps": 1e-06,
        "norm_num_groups": 32,
        "norm_type": "ada_norm_single",
        "num_attention_heads": 16,
        "num_embeds_ada_norm": 1000,
        "num_layers": 28,
        "out_channels": 8,
        "patch_size": 2,
        "sample_size": 128,
        "upcast_attention": False,
    }
    return ClassSpec("diffusers", "PixArtTransformer2DModel", MappingProxyType(config | changes))


_DPM_SOLVER = ClassSpec(
    "diffusers",
    "DPMSolverMultistepScheduler",
    MappingProxyType(
        {
            "algorithm_type": "dpmsolver++",
            "beta_end": 0.02,
            "beta_schedule": "linear",
            "beta_start": 0.0001,
            "num_train_timesteps": 1000,
            "prediction_type": "epsilon",
            "solver_order": 2,
            "solver_type": "midpoint",
            "timestep_spacing": "linspace",
        }
    ),
)


def _pixart(name: str, transformer: ClassSpec, vae: ClassSpec, text_encoder: ClassSpec, tokens: int) -> Architecture:
    return Architecture(
        name,
        MappingProxyType({"transformer": transformer, "vae": vae, "text_encoder": text_encoder}),
        MappingProxyType({"tokenizer": T5TokenizerSpec(tokens)}),
        _DPM_SOLVER,
        options=MappingProxyType({}),
    )


_SIGMA = {"interpolation_scale": 2, "use_additional_conditions": False}
# Heads of 72 channels, as the published ones have, and a quarter of their number.
_PIXART_TINY = {"caption_channels": 64, "cross_attention_dim": 288, "num_attention_heads": 4, "num_layers": 2}
_T5_TINY = _t5(d_ff=256, d_kv=16, d_model=64, num_heads=4, num_layers=2)

_PLAIN: dict[str, Architecture] = {
    # The channels are real (320 and 640, so heads of 40 and 80 and feed-forward widths of 2560 and 5120,
    # all of which the fused kernels limit); what is small is the number of layers and of latents.
    "tiny": _stable_diffusion(
        _unet(
            block_out_channels=[320, 640],
            cross_attention_dim=64,
            down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
            layers_per_block=1,
            sample_size=16,
            up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
        ),
        # 4 channels a group: the kernels want an even number. Four blocks: a latent is 8x8 pixels.
        _vae(**_VAE_TINY),
        _clip_text(**_CLIP_TINY),
        _scheduler("PNDMScheduler"),
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
        _unet(), _vae(), _clip_text(), _scheduler("PNDMScheduler"), "<|endoftext|>", _safety_checker()
    ),
    "sd21": _stable_diffusion(
        _unet(**_UNET_2_1, sample_size=96, upcast_attention=True),
        _vae(sample_size=768),
        _OPEN_CLIP_H,
        _scheduler("DDIMScheduler", prediction_type="v_prediction"),
        pad_token="!",
    ),
    "sd21-base": _stable_diffusion(
        _unet(**_UNET_2_1),
        _vae(sample_size=768),
        _OPEN_CLIP_H,
        _scheduler("PNDMScheduler", prediction_type="epsilon"),
        pad_token="!",
    ),
    "sdxl": _stable_diffusion_xl(
        _unet(**_UNET_XL),
        _vae(**_VAE_XL),
        _clip_text(),
        _OPEN_CLIP_G,
        _scheduler("EulerDiscreteScheduler", **_EULER_XL),
    ),
    "sdxl-turbo": _stable_diffusion_xl(
        _unet(**(_UNET_XL | {"sample_size": 64})),
        _vae(**_VAE_XL),
        _clip_text(),
        _OPEN_CLIP_G,
        _scheduler("EulerAncestralDiscreteScheduler", **(_EULER_XL | {"timestep_spacing": "trailing"})),
    ),
    "sdxl-refiner": _refiner(
        _unet(**_UNET_REFINER),
        _vae(**_VAE_XL),
        _OPEN_CLIP_G,
        _scheduler("EulerDiscreteScheduler", **_EULER_XL),
    ),
    "sdxl-tiny": _stable_diffusion_xl(
        _unet(**_UNET_XL_TINY),
        _vae(**(_VAE_XL | _VAE_TINY)),
        _clip_text(**_CLIP_TINY),
        _OPEN_CLIP_TINY,
        _scheduler("EulerDiscreteScheduler", **_EULER_XL),
    ),
    "sdxl-refiner-tiny": _refiner(
        _unet(**_UNET_XL_TINY | {"cross_attention_dim": 64, "projection_class_embeddings_input_dim": 64 + 5 * 32}),
        _vae(**(_VAE_XL | _VAE_TINY)),
        _OPEN_CLIP_TINY,
        _scheduler("EulerDiscreteScheduler", **_EULER_XL),
    ),
    "pixart-alpha": _pixart("PixArtAlphaPipeline", _pixart_transformer(), _vae(), _t5(), 120),
    "pixart-sigma": _pixart("PixArtSigmaPipeline", _pixart_transformer(**_SIGMA), _vae(**_VAE_XL), _t5(), 300),
    "pixart-tiny": _pixart(
        "PixArtAlphaPipeline", _pixart_transformer(**_PIXART_TINY, sample_size=32), _vae(**_VAE_TINY), _T5_TINY, 120
    ),
    # Trained for 1024x1024, and so told the size.
    "pixart-alpha-tiny": _pixart(
        "PixArtAlphaPipeline", _pixart_transformer(**_PIXART_TINY), _vae(**_VAE_TINY), _T5_TINY, 120
    ),
    "pixart-sigma-tiny": _pixart(
        "PixArtSigmaPipeline",
        _pixart_transformer(**_PIXART_TINY, **_SIGMA, sample_size=32),
        _vae(**(_VAE_XL | _VAE_TINY)),
        _T5_TINY,
        300,
    ),
}

# h94/IP-Adapter: models/ip-adapter-plus_sd15.safetensors and sdxl_models/ip-adapter-plus_sdxl_vit-h.safetensors.
_ADAPTERS = {
    "sd15": AdapterSpec(_clip_vision(), hidden_size=768, heads=12),
    "sdxl": AdapterSpec(_clip_vision(), hidden_size=1280, heads=20),
}
_CLIP_VISION_TINY = _clip_vision(
    hidden_size=64,
    image_size=56,
    intermediate_size=256,
    num_attention_heads=4,
    num_hidden_layers=3,
    projection_dim=32,
)
_ADAPTERS |= dict.fromkeys(("tiny", "sdxl-tiny"), AdapterSpec(_CLIP_VISION_TINY, hidden_size=64, heads=1, queries=6))

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    _PLAIN | {f"{name}-ip-adapter": replace(_PLAIN[name], adapters=adapters) for name, adapters in _ADAPTERS.items()}
)
"""By the names that `--arch` takes."""
