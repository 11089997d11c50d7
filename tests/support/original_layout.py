"""Write a diffusers folder as one file in the layout of the original repositories.

The mapping goes from diffusers' names to the original ones, and is independent of the one that the exporter uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["original_clip", "original_open_clip", "original_unet", "original_vae", "write_original"]

Tensors = dict[str, torch.Tensor]


def write_original(
    folder: Path,
    file: Path,
    *,
    dtype: torch.dtype = torch.float32,
    vae: bool = True,
    open_clip: bool = False,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write the pipeline in `folder` to `file`, and return it.

    Args:
        folder: A diffusers folder of Stable Diffusion or Stable Diffusion XL.
        file: The file to write.
        dtype: Type of all weights.
        vae: Whether the file contains the autoencoder.
        open_clip: Whether the text encoder of a pipeline with one encoder has OpenCLIP's layout, with one more layer.
        extra: Further tensors, which replace tensors of the same name.
    """
    tensors = _prefixed("model.diffusion_model.", original_unet(_load(folder, "unet"), _config(folder, "unet")))
    if vae:
        tensors |= _prefixed("first_stage_model.", original_vae(_load(folder, "vae")))
    if (folder / "text_encoder_2").is_dir():
        has_first = (folder / "text_encoder").is_dir()
        if has_first:
            tensors |= _prefixed("conditioner.embedders.0.transformer.", original_clip(_load(folder, "text_encoder")))
        second = original_open_clip(_load(folder, "text_encoder_2"))
        tensors |= _prefixed(f"conditioner.embedders.{int(has_first)}.model.", second)
    elif open_clip:
        text = original_open_clip(_load(folder, "text_encoder"))
        layers = _config(folder, "text_encoder")["num_hidden_layers"]
        last = f"transformer.resblocks.{layers - 1}."
        text |= {key.replace(last, f"transformer.resblocks.{layers}."): value + 1 for key, value in text.items()}
        text["text_projection"] = torch.eye(text["ln_final.weight"].shape[0])
        text["logit_scale"] = torch.tensor(1.0)
        tensors |= _prefixed("cond_stage_model.model.", text)
    else:
        tensors |= _prefixed("cond_stage_model.transformer.", original_clip(_load(folder, "text_encoder")))
    tensors |= extra or {}
    save_file({key: value.to(dtype).contiguous() for key, value in tensors.items()}, file)
    return file


def original_unet(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a UNet's tensors, or anything else by the same names, with the original names."""
    per_block = config["layers_per_block"] + 1
    attends = [kind.startswith("CrossAttn") for kind in config["up_block_types"]]
    tops = {
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
    }
    resnet = {
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "time_emb_proj": "emb_layers.1",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "conv_shortcut": "skip_connection",
    }
    renamed = {}
    for name, value in tensors.items():
        module, end = name.rsplit(".", 1)
        parts = module.split(".")
        if module in tops:
            renamed[f"{tops[module]}.{end}"] = value
            continue
        if parts[0] == "mid_block":
            part, layer, rest = parts[1], int(parts[2]), parts[3:]
            place = f"middle_block.{1 if part == 'attentions' else 2 * layer}"
        else:
            block, part, layer, rest = int(parts[1]), parts[2], int(parts[3]), parts[4:]
            if part == "downsamplers":
                renamed[f"input_blocks.{(block + 1) * per_block}.0.op.{end}"] = value
                continue
            if part == "upsamplers":
                place = f"output_blocks.{(block + 1) * per_block - 1}.{1 + attends[block]}.conv"
                renamed[f"{place}.{end}"] = value
                continue
            number = block * per_block + layer + (parts[0] == "down_blocks")
            side = "input" if parts[0] == "down_blocks" else "output"
            place = f"{side}_blocks.{number}.{int(part == 'attentions')}"
        inner = resnet[rest[0]] if part == "resnets" else ".".join(rest)
        renamed[f"{place}.{inner}.{end}"] = value
    return renamed


def original_vae(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return an autoencoder's tensors with the original names; attention has 1x1 convolutions."""
    blocks = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("decoder.up_blocks."))
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    renamed = {}
    for name, value in tensors.items():
        parts = name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out").split(".")
        if parts[1] == "mid_block" and parts[2] == "attentions":
            inner, end = ".".join(parts[4:-1]), parts[-1]
            shaped = value[:, :, None, None] if isinstance(value, torch.Tensor) and value.ndim == 2 else value
            renamed[f"{parts[0]}.mid.attn_1.{attention[inner]}.{end}"] = shaped
            continue
        if parts[1] == "mid_block":
            parts[1:4] = ["mid", f"block_{int(parts[3]) + 1}"]
        elif parts[1] in ("down_blocks", "up_blocks"):
            number = int(parts[2]) if parts[1] == "down_blocks" else blocks - 1 - int(parts[2])
            layer = ["block", parts[4]] if parts[3] == "resnets" else [parts[3].removesuffix("rs")]
            parts[1:5] = [parts[1].removesuffix("_blocks"), str(number), *layer]
        renamed[".".join(parts)] = value
    return renamed


def original_clip(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a CLIP text encoder's tensors with the names of older versions of transformers."""
    return {f"text_model.{name.removeprefix('text_model.')}": value for name, value in tensors.items()}


def original_open_clip(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return a text encoder's tensors in OpenCLIP's layout."""
    named = {name.removeprefix("text_model."): value for name, value in tensors.items()}
    renamed = {
        "positional_embedding": named["embeddings.position_embedding.weight"],
        "token_embedding.weight": named["embeddings.token_embedding.weight"],
        "ln_final.weight": named["final_layer_norm.weight"],
        "ln_final.bias": named["final_layer_norm.bias"],
    }
    if "text_projection.weight" in named:
        renamed["text_projection"] = named["text_projection.weight"].t()
    for layer in range(1 + max(int(name.split(".")[2]) for name in named if name.startswith("encoder.layers."))):
        old, new = f"transformer.resblocks.{layer}", f"encoder.layers.{layer}"
        for end in ("weight", "bias"):
            qkv = [named[f"{new}.self_attn.{each}_proj.{end}"] for each in "qkv"]
            renamed[f"{old}.attn.in_proj_{end}"] = torch.cat(qkv)
            renamed[f"{old}.attn.out_proj.{end}"] = named[f"{new}.self_attn.out_proj.{end}"]
            renamed[f"{old}.ln_1.{end}"] = named[f"{new}.layer_norm1.{end}"]
            renamed[f"{old}.ln_2.{end}"] = named[f"{new}.layer_norm2.{end}"]
            renamed[f"{old}.mlp.c_fc.{end}"] = named[f"{new}.mlp.fc1.{end}"]
            renamed[f"{old}.mlp.c_proj.{end}"] = named[f"{new}.mlp.fc2.{end}"]
    return renamed


def _load(folder: Path, component: str) -> Tensors:
    return load_file(next((folder / component).glob("*.safetensors")))


def _config(folder: Path, component: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / component / "config.json").read_text())
    return config


def _prefixed(prefix: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {prefix + key: value for key, value in tensors.items()}
