"""Entries of configurations: the ones that diffusers reads are known, and others are refused."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
from support.pipelines import refused

from sdonnx.errors import FolderError
from sdonnx.export.config_entries import KNOWN, KNOWN_IN_INDEX, require_known_entries, require_known_index
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.registry import FAMILIES
from sdonnx.models.spec import Family
from sdonnx.sample.write_sample import ARCHITECTURES

# Entries of diffusers' classes that need inputs that its pipelines of these families do not pass, or that are only at
# their default in published files of PixArt.
REFUSED = {
    "class_embed_type", "num_class_embeds", "encoder_hid_dim", "encoder_hid_dim_type", "global_pool_conditions",
    "double_self_attention", "num_vector_embeds",
}  # fmt: skip

# Entries that diffusers' pipelines of our families read, and where they are computed.
READ = {
    "self": KNOWN_IN_INDEX,
    "vae": {"block_out_channels", "force_upcast", "latent_channels", "latents_mean", "latents_std", "scaling_factor"},
    "unet": {"_diffusers_version", "addition_time_embed_dim", "in_channels", "sample_size", "time_cond_proj_dim"}
    | {"time_embedding_type"},  # in a message
    "transformer": {"in_channels", "out_channels", "sample_size"},
    "text_encoder": {"use_attention_mask"},  # refused
    "text_encoder_2": {"projection_dim"},
}

# transformer/config.json of PixArt-alpha/PixArt-XL-2-1024-MS, which names an older class.
PIXART = {
    "_class_name": "Transformer2DModel", "_diffusers_version": "0.22.0.dev0", "activation_fn": "gelu-approximate",
    "attention_bias": True, "attention_head_dim": 72, "attention_type": "default", "caption_channels": 4096,
    "cross_attention_dim": 1152, "double_self_attention": False, "dropout": 0.0, "in_channels": 4,
    "norm_elementwise_affine": False, "norm_eps": 1e-06, "norm_num_groups": 32, "norm_type": "ada_norm_single",
    "num_attention_heads": 16, "num_embeds_ada_norm": 1000, "num_layers": 28, "num_vector_embeds": None,
    "only_cross_attention": False, "out_channels": 8, "patch_size": 2, "sample_size": 128, "upcast_attention": False,
    "use_linear_projection": False,
}  # fmt: skip


def require(config: dict[str, Any], class_name: str = "AutoencoderKL", library: str = "diffusers") -> None:
    require_known_entries(Path("vae/config.json"), config, library, class_name)


@pytest.mark.parametrize("class_name", KNOWN)
def test_entries_of_the_installed_diffusers(class_name: str) -> None:
    """A newer diffusers that adds one fails here: find out which pipelines read it."""
    signature = set(inspect.signature(getattr(diffusers, class_name).__init__).parameters) - {"self"}
    if class_name == "Transformer2DModel":
        signature -= {"only_cross_attention", "use_linear_projection"}  # not of PixArt's transformer
    assert signature - KNOWN[class_name] <= REFUSED
    assert KNOWN[class_name] <= signature


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_entries_that_the_pipelines_of_the_installed_diffusers_read(family: Family) -> None:
    found = set()
    for name in sorted(family.pipeline_classes):
        if (pipeline := getattr(diffusers, name, None)) is None:
            continue  # of optimum, or of another project
        source = inspect.getsource(pipeline)
        found |= set(re.findall(r"\b(?:self\.)?(\w+)\.config\.(\w+)", source))
        found |= set(re.findall(r'hasattr\(self\.(\w+)\.config, "(\w+)"\)', source))
    assert {("vae", "scaling_factor"), ("vae", "block_out_channels")} <= found
    known = {(component, entry) for component in READ for entry in READ[component]}
    assert {(component, entry) for component, entry in found if component != "scheduler"} <= known


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_published_configurations(arch: str) -> None:
    for spec in ARCHITECTURES[arch].networks.values():
        require(dict(spec.config), spec.name, spec.library)


def test_entries_at_their_defaults() -> None:
    require(PIXART, "Transformer2DModel")
    require(PIXART, "PixArtTransformer2DModel")
    require({"_anything": 3, "new": None, "newer": False, "newest": [], "global_pool_conditions": False})
    require({"num_class_embeds": None, "sample_size": 32, "_diffusers_version": "0.10.0"}, "UNet2DConditionModel")
    require(
        {"top_k": 50, "use_attention_mask": False, "task_specific_params": {"a": 1}}, "T5EncoderModel", "transformers"
    )


@pytest.mark.parametrize(
    ("class_name", "config", "words"),
    [
        ("AutoencoderKL", {"latents_median": [1, 2]}, ["vae/config.json has latents_median=[1, 2]", "not supported"]),
        ("UNet2DConditionModel", {"num_class_embeds": 10}, ["num_class_embeds=10"]),
        ("UNet2DConditionModel", {"encoder_hid_dim_type": "ip_image_proj"}, ["encoder_hid_dim_type='ip_image_proj'"]),
        ("ControlNetModel", {"global_pool_conditions": True}, ["global_pool_conditions=True"]),
        ("Transformer2DModel", PIXART | {"double_self_attention": True}, ["double_self_attention=True"]),
        (
            "UNet2DConditionModel",
            {"sample_size": 32, "_diffusers_version": "0.6.0"},
            ["reads as 64", "set sample_size"],
        ),
        ("AutoencoderTiny", {}, ["is of a AutoencoderTiny", "one of AutoencoderKL"]),
        ("AutoencoderKL", {"quantization_config": {"quant_method": "torchao"}}, ["quant_method='torchao'"]),
        ("AutoencoderKL", {"quantization_config": "fp8"}, ["quant_method=None"]),
    ],
)
def test_other_entries_are_refused(class_name: str, config: dict[str, Any], words: list[str]) -> None:
    with refused(FolderError, *words):
        require(config, class_name)


@pytest.mark.parametrize(
    ("quantization", "known"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, False),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, True),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, False),
    ],
)
def test_quantization(quantization: dict[str, Any], known: bool) -> None:
    config = {"quantization_config": quantization}
    if known:
        require(config, "T5EncoderModel", "transformers")
        return
    with refused(FolderError, f"quant_method={quantization['quant_method']!r}"):
        require(config, "T5EncoderModel", "transformers")


def test_masks_of_padding_are_refused() -> None:
    with refused(FolderError, "use_attention_mask=True"):
        require({"use_attention_mask": True}, "CLIPTextModel", "transformers")


def test_options_of_the_index(tmp_path: Path) -> None:
    known = {"_name_or_path": "a", "requires_safety_checker": True, "force_zeros_for_empty_prompt": True, "note": "a"}
    components = {"unet": ["diffusers", "UNet2DConditionModel"], "safety_checker": [None, None], "image_encoder": None}
    index = {"_class_name": "StableDiffusionXLPipeline", **known, **components, "is_cosxl_edit": False}
    for is_edit in (False, True):
        (tmp_path / "model_index.json").write_text(json.dumps(index | {"is_cosxl_edit": is_edit}))
        folder = PipelineFolder.open(tmp_path)
        if not is_edit:
            require_known_index(folder)
            continue
        with refused(FolderError, "model_index.json has is_cosxl_edit=True", "not supported"):
            require_known_index(folder)
