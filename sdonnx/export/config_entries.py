"""Entries of configurations that may change images: the ones that are known, and refusals of the others.

An entry is known if only the module reads it, which is exported, or if the run-time computes what diffusers' pipelines
compute with it. Another entry may be there at its default, as in files that a newer version of diffusers wrote.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import MODEL_INDEX, PipelineFolder

__all__ = ["KNOWN", "KNOWN_IN_INDEX", "QUANTIZATION", "require_known_entries", "require_known_index"]

QUANTIZATION = "quantization_config"
"""Entry that says how weights are stored."""

_UNET_AND_CONTROLNET = """
    act_fn addition_embed_type addition_embed_type_num_heads addition_time_embed_dim attention_head_dim
    block_out_channels cross_attention_dim down_block_types downsample_padding flip_sin_to_cos freq_shift in_channels
    layers_per_block mid_block_scale_factor norm_eps norm_num_groups num_attention_heads
    only_cross_attention projection_class_embeddings_input_dim resnet_time_scale_shift transformer_layers_per_block
    upcast_attention use_linear_projection
"""
_CONTROLNET = f"""
    {_UNET_AND_CONTROLNET} conditioning_channels conditioning_embedding_out_channels
    controlnet_conditioning_channel_order
"""
_PIXART = """
    activation_fn attention_bias attention_head_dim attention_type caption_channels cross_attention_dim dropout
    in_channels interpolation_scale norm_elementwise_affine norm_eps norm_num_groups norm_type num_attention_heads
    num_embeds_ada_norm num_layers out_channels patch_size sample_size upcast_attention use_additional_conditions
"""
_NAMES = {
    "AutoencoderKL": """
        act_fn block_out_channels down_block_types force_upcast in_channels latent_channels latents_mean latents_std
        layers_per_block mid_block_add_attention norm_num_groups out_channels sample_size scaling_factor shift_factor
        up_block_types use_post_quant_conv use_quant_conv
    """,
    "UNet2DConditionModel": f"""
        {_UNET_AND_CONTROLNET} attention_type center_input_sample class_embeddings_concat conv_in_kernel conv_out_kernel
        cross_attention_norm dropout dual_cross_attention mid_block_only_cross_attention mid_block_type out_channels
        resnet_out_scale_factor resnet_skip_time_act reverse_transformer_layers_per_block sample_size time_cond_proj_dim
        time_embedding_act_fn time_embedding_dim time_embedding_type timestep_post_act up_block_types
    """,
    "PixArtTransformer2DModel": _PIXART,
    "Transformer2DModel": _PIXART,  # the class that published files of PixArt name
    "ControlNetModel": f"{_CONTROLNET} mid_block_type",
    "ControlNetUnionModel": f"""
        {_CONTROLNET} num_control_type num_proj_channel num_trans_channel num_trans_head num_trans_layer
    """,
    "T2IAdapter": "adapter_type channels downscale_factor in_channels num_res_blocks",
}

KNOWN: Mapping[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in _NAMES.items()}
"""Known entries, by the class of a model of diffusers."""

# Configurations of transformers have hundreds of entries, which only their models read, except for this one: diffusers'
# pipelines of Stable Diffusion 1 and 2 pass the mask of the padding if it is true.
_UNKNOWN_OF_TRANSFORMERS = ("use_attention_mask",)

KNOWN_IN_INDEX = frozenset(
    {"add_watermarker", "force_zeros_for_empty_prompt", "requires_aesthetics_score", "requires_safety_checker"}
)
"""Known entries of model_index.json, next to the components."""


def require_known_entries(path: Path, config: Mapping[str, Any], library: str, class_name: str) -> None:
    """Raise FolderError if a model's configuration has an entry that is not known, and is not at its default.

    Args:
        path: The file, for the message.
        config: Its content.
        library: Library of the model's class, as model_index.json names it.
        class_name: The class.
    """
    _require_known_quantization(path, config.get(QUANTIZATION))
    if library != "diffusers":
        unknown = {name: config[name] for name in _UNKNOWN_OF_TRANSFORMERS if config.get(name)}
    elif class_name not in KNOWN:
        raise FolderError(f"{path} is of a {class_name}", f"one of {', '.join(KNOWN)}", "use a pipeline with these")
    else:
        others = config.keys() - KNOWN[class_name] - {QUANTIZATION}
        defaults = inspect.signature(getattr(diffusers, class_name).__init__).parameters
        unknown = {
            name: config[name]
            for name in sorted(others)
            if config[name] and not name.startswith("_") and config[name] != _default(defaults.get(name))
        }
    _refuse(path, unknown)
    version = re.match(r"0\.(\d+)", str(config.get("_diffusers_version")))
    size = config.get("sample_size")
    if class_name == "UNet2DConditionModel" and version and int(version[1]) < 9 and isinstance(size, int) and size < 64:
        raise FolderError(  # diffusers' StableDiffusionPipeline.__init__
            f"{path} has sample_size={size} of diffusers 0.{version[1]}, which diffusers reads as 64",
            "64",
            "set sample_size to 64",
        )


def require_known_index(folder: PipelineFolder) -> None:
    """Raise FolderError if model_index.json has an option that is not known, and is not off."""
    _refuse(
        folder.path / MODEL_INDEX,
        {
            name: value
            for name, value in folder.index.items()
            if isinstance(value, int | float) and value and not (name.startswith("_") or name in KNOWN_IN_INDEX)
        },
    )


def _default(parameter: inspect.Parameter | None) -> Any:
    """Return the default of an entry, as JSON has it."""
    if parameter is None:
        return None
    return list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default


def _refuse(path: Path, unknown: Mapping[str, Any]) -> None:
    for name, value in unknown.items():
        raise FolderError(
            f"{path} has {name}={value!r}, which is not supported",
            f"no {name}, or its default",
            "use another model, or remove the entry if it does not change images",
        )


def _require_known_quantization(path: Path, quantization: Any) -> None:
    """Raise FolderError if weights are stored in another way than `StoredTensors` reads."""
    if not quantization:
        return
    given = quantization if isinstance(quantization, Mapping) else {}
    known = {
        "bitsandbytes": given.get("load_in_8bit") is True,
        "compressed-tensors": given.get("format") in ("float-quantized", "naive-quantized"),
        "modelopt": given.get("quant_algo") == "FP8",
    }
    method = given.get("quant_method")
    if not known.get(str(method)):
        raise FolderError(
            f"{path} has a {QUANTIZATION} of quant_method={method!r} that is not supported",
            "weights in 16 or 32 bits, or in 8 bits of bitsandbytes, compressed-tensors or ModelOpt (float8)",
            "save the model again without quantization",
        )
