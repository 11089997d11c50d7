"""Components and tensors that several families share: CLIP's text encoder, the UNet's inputs, and the VAE.

A UNet with distilled guidance (Meng et al. 2023, arXiv:2210.03142) reads the guidance scale as an embedding, so it
computes no rows of negative prompts; diffusers: the option `time_cond_proj_dim` of `UNet2DConditionModel`.
"""

from __future__ import annotations

from dataclasses import replace

from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.layer_counts import clip_text, vae_decoder, vae_encoder
from sdonnx.models.spec import ComponentSpec, Config, Family, Role, TensorSpec

__all__ = [
    "ENCODER_HIDDEN_STATES",
    "HIDDEN_STATES",
    "INPUT_IDS",
    "LAST_HIDDEN_STATE",
    "OUT_SAMPLE",
    "POOLER_OUTPUT",
    "SAMPLE",
    "TIMESTEP",
    "TIMESTEP_COND",
    "TOKENIZER",
    "UPCAST_VAE_DECODER",
    "UPCAST_VAE_ENCODER",
    "VAE_DECODER",
    "VAE_ENCODER",
    "clip_text_encoder",
    "with_distilled_guidance",
]

INPUT_IDS = TensorSpec("input_ids", ("batch_size", "sequence_length"), integer=True)
LAST_HIDDEN_STATE = TensorSpec("last_hidden_state", ("batch_size", "sequence_length", "config:hidden_size"))
POOLER_OUTPUT = TensorSpec("pooler_output", ("batch_size", "config:hidden_size"))
# The input of each layer, and the output of the last one.
HIDDEN_STATES = TensorSpec(
    "hidden_states.{}", ("batch_size", "sequence_length", "config:hidden_size"), series="num_hidden_layers"
)
TOKENIZER = ("tokenizer", "tokenizer_config.json")

SAMPLE = TensorSpec("sample", ("batch_size", "config:in_channels", "height", "width"))
# float32 in every precision: samplers with continuous noise levels use fractional steps, which float16 cannot
# represent beyond 1024.
TIMESTEP = TensorSpec("timestep", ("steps",), keeps_float32=True, once=True)
ENCODER_HIDDEN_STATES = TensorSpec(
    "encoder_hidden_states", ("batch_size", "sequence_length", "config:cross_attention_dim")
)
OUT_SAMPLE = TensorSpec("out_sample", ("batch_size", "config:out_channels", "height", "width"))

_IMAGE = ("batch_size", 3, "height", "width")
VAE_DECODER = ComponentSpec(
    "vae_decoder",
    "vae",
    Role.IMAGE_DECODER,
    (TensorSpec("latent_sample", ("batch_size", "config:latent_channels", "height_latent", "width_latent")),),
    (TensorSpec("sample", _IMAGE),),
    count_layers=vae_decoder,
)
VAE_ENCODER = ComponentSpec(
    "vae_encoder",
    "vae",
    Role.IMAGE_ENCODER,
    (TensorSpec("sample", _IMAGE),),
    (TensorSpec("latent_parameters", ("batch_size", "latent_parameter_channels", "height_latent", "width_latent")),),
    count_layers=vae_encoder,
)


def _forces_upcast(config: Config) -> bool:
    """Return whether an AutoencoderKL has activations beyond float16's range, which render black images.

    `force_upcast` is true by default. diffusers' pipelines of Stable Diffusion 1 and 2 do not read it, so only
    families with pipelines that read it use this predicate.
    """
    return bool(config.get("force_upcast"))


# docs/decisions/0143-scale-what-group-norms-read.md: values up to 8.4e6 fit, 27 times the largest one that was reported
# for Stable Diffusion XL. Weights keep their digits: those around 0.015 stay above 6.1e-5, the smallest normal number.
_NORM_SCALE = 2.0**-7

UPCAST_VAE_DECODER = replace(VAE_DECODER, float32_if=_forces_upcast, norm_scale=_NORM_SCALE)
UPCAST_VAE_ENCODER = replace(VAE_ENCODER, float32_if=_forces_upcast, norm_scale=_NORM_SCALE)


def clip_text_encoder(*outputs: TensorSpec) -> ComponentSpec:
    """Return the first CLIP text encoder of a pipeline, with these outputs."""
    return ComponentSpec(
        "text_encoder",
        "text_encoder",
        Role.TEXT_ENCODER,
        (INPUT_IDS,),
        outputs,
        TOKENIZER,
        count_layers=clip_text,
        takes_lora=True,
    )


TIMESTEP_COND = "timestep_cond"
"""Input of the UNet: the embedding of the guidance scale, named as in diffusers and in optimum's export."""

_SIZE = "time_cond_proj_dim"
_INPUT = TensorSpec(TIMESTEP_COND, ("batch_size", f"config:{_SIZE}"))


def with_distilled_guidance(family: Family, folder: PipelineFolder) -> Family:
    """Return the family with a UNet that reads the guidance scale, if the configuration of the UNet says so.

    Raises:
        FolderError: The configuration of the UNet is broken.
    """
    denoiser = family.with_role(Role.DENOISER)
    name = denoiser.name if (folder.path / denoiser.name).is_dir() else denoiser.source
    # Other exporters may write no configuration; optimization infers it from the graph.
    if not (folder.path / name / "config.json").is_file() or folder.config(name).get(_SIZE) is None:
        return family
    reading = replace(denoiser, inputs=(*denoiser.inputs, _INPUT))
    return replace(family, components=tuple(reading if spec is denoiser else spec for spec in family.components))
