"""Stable Diffusion 1 and 2 (Rombach et al. 2022, arXiv:2112.10752), LCM (Luo et al. 2023, arXiv:2310.04378), and XL.

Stable Diffusion XL (Podell et al. 2023, arXiv:2307.01952) has a base model and a refiner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sdonnx.models.autoencoder import LATENTS_MEAN, LATENTS_STD
from sdonnx.models.layer_counts import clip_text, clip_vision, require_class, unet
from sdonnx.models.shared_components import (
    ENCODER_HIDDEN_STATES,
    HIDDEN_STATES,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    OUT_SAMPLE,
    POOLER_OUTPUT,
    SAMPLE,
    TIMESTEP,
    UPCAST_VAE_DECODER,
    UPCAST_VAE_ENCODER,
    VAE_DECODER,
    VAE_ENCODER,
    clip_text_encoder,
)
from sdonnx.models.spec import CallDefaults, ComponentSpec, Config, Family, Role, TensorSpec

__all__ = ["STABLE_DIFFUSION", "STABLE_DIFFUSION_XL"]


def _count_safety_checker(config: Config) -> dict[str, int]:
    require_class(config, "StableDiffusionSafetyChecker")
    return clip_vision(config["vision_config"]["num_hidden_layers"])


# Inputs and outputs are as in diffusers' scripts/convert_stable_diffusion_checkpoint_to_onnx.py, so that
# OnnxStableDiffusionPipeline runs the graph. Images are channels last; flagged images are returned black.
_CHECKED_IMAGES = ("batch_size", "height", "width", 3)
_CLIP_EDGE = "config:vision_config.image_size"
_SAFETY_CHECKER = ComponentSpec(
    "safety_checker",
    "safety_checker",
    Role.SAFETY_CHECKER,
    (TensorSpec("clip_input", ("batch_size", 3, _CLIP_EDGE, _CLIP_EDGE)), TensorSpec("images", _CHECKED_IMAGES)),
    (TensorSpec("out_images", _CHECKED_IMAGES), TensorSpec("has_nsfw_concepts", ("batch_size",))),
    ("feature_extractor", "preprocessor_config.json"),
    count_layers=_count_safety_checker,
)

_CONSISTENCY_CLASSES = ("LatentConsistencyModelPipeline", "ORTLatentConsistencyModelPipeline")

STABLE_DIFFUSION = Family(
    "stable-diffusion",
    frozenset(
        {
            "StableDiffusionPipeline",
            "StableDiffusionImg2ImgPipeline",
            "StableDiffusionInpaintPipeline",
            "OnnxStableDiffusionPipeline",
            "StableDiffusionOnnxPipeline",
            "OnnxStableDiffusionImg2ImgPipeline",
            "OnnxStableDiffusionInpaintPipeline",
            "ORTStableDiffusionPipeline",
            "ORTStableDiffusionImg2ImgPipeline",
            "ORTStableDiffusionInpaintPipeline",
            *_CONSISTENCY_CLASSES,
        }
    ),
    (
        clip_text_encoder(LAST_HIDDEN_STATE, POOLER_OUTPUT),
        ComponentSpec(
            "unet",
            "unet",
            Role.DENOISER,
            (SAMPLE, TIMESTEP, ENCODER_HIDDEN_STATES),
            (OUT_SAMPLE,),
            count_layers=unet,
            takes_lora=True,
        ),
        VAE_ENCODER,
        VAE_DECODER,
        _SAFETY_CHECKER,
    ),
    optional=frozenset({"safety_checker"}),
    class_defaults=dict.fromkeys(_CONSISTENCY_CLASSES, CallDefaults(guidance_scale=8.5, num_inference_steps=4)),
)


_TEXT_ENCODERS = ("text_encoder", "text_encoder_2")


def _join_config(config: Config, config_of: Callable[[str], Config | None]) -> dict[str, Any]:
    """Add the text encoders' configurations and `time_ids`, the number of sizes that the denoiser is conditioned on.

    That number is the width of the denoiser's added embedding without the pooled text, divided by the width of one
    size's embedding (diffusers: `UNet2DConditionModel`, addition_embed_type "text_time").
    """
    found = {name: config_of(name) for name in _TEXT_ENCODERS}
    joined: dict[str, Any] = dict(config) | {name: other for name, other in found.items() if other is not None}
    width, total = config.get("addition_time_embed_dim"), config.get("projection_class_embeddings_input_dim")
    pooled = (found["text_encoder_2"] or {}).get("projection_dim")
    if isinstance(width, int) and isinstance(total, int) and isinstance(pooled, int) and width > 0:
        joined["time_ids"] = (total - pooled) // width
    return joined


STABLE_DIFFUSION_XL = Family(
    "stable-diffusion-xl",
    frozenset(
        {
            "StableDiffusionXLPipeline",
            "StableDiffusionXLImg2ImgPipeline",
            "StableDiffusionXLInpaintPipeline",
            "ORTStableDiffusionXLPipeline",
            "ORTStableDiffusionXLImg2ImgPipeline",
            "ORTStableDiffusionXLInpaintPipeline",
        }
    ),
    (
        # diffusers' pipelines read the last but one of the hidden states.
        clip_text_encoder(LAST_HIDDEN_STATE, POOLER_OUTPUT, HIDDEN_STATES),
        ComponentSpec(
            "text_encoder_2",
            "text_encoder_2",
            Role.TEXT_ENCODER_2,
            (INPUT_IDS,),
            (TensorSpec("text_embeds", ("batch_size", "config:projection_dim")), LAST_HIDDEN_STATE, HIDDEN_STATES),
            ("tokenizer_2", "tokenizer_config.json"),
            count_layers=clip_text,
            takes_lora=True,
        ),
        ComponentSpec(
            "unet",
            "unet",
            Role.DENOISER,
            (
                SAMPLE,
                TIMESTEP,
                ENCODER_HIDDEN_STATES,
                TensorSpec("text_embeds", ("batch_size", "config:text_encoder_2.projection_dim")),
                # Sizes in pixels: float16 cannot represent odd numbers beyond 2048.
                TensorSpec("time_ids", ("batch_size", "config:time_ids"), keeps_float32=True),
            ),
            (OUT_SAMPLE,),
            count_layers=unet,
            takes_lora=True,
        ),
        UPCAST_VAE_ENCODER,
        UPCAST_VAE_DECODER,
    ),
    optional=frozenset({"text_encoder"}),
    defaults=CallDefaults(guidance_scale=5.0, strength=0.3, inpaint_strength=0.9999),
    joins=_join_config,
    latent_entries=frozenset({LATENTS_MEAN, LATENTS_STD}),
)
