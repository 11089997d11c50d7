"""Stable Diffusion 1 and 2 (Rombach et al. 2022, arXiv:2112.10752), and LCM (Luo et al. 2023, arXiv:2310.04378)."""

from __future__ import annotations

from sdonnx.models.layer_counts import clip_vision, require_class, unet
from sdonnx.models.shared_components import (
    ENCODER_HIDDEN_STATES,
    LAST_HIDDEN_STATE,
    OUT_SAMPLE,
    POOLER_OUTPUT,
    SAMPLE,
    TIMESTEP,
    VAE_DECODER,
    VAE_ENCODER,
    clip_text_encoder,
)
from sdonnx.models.spec import CallDefaults, ComponentSpec, Config, Family, Role, TensorSpec

__all__ = ["STABLE_DIFFUSION"]


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
