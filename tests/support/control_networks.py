"""ControlNets and T2I-Adapters with random weights for a sample pipeline; no convolution is zero."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from sdonnx.sample.sample_weights import seeded_weights

__all__ = ["picture", "write_adapter", "write_controlnet"]

_WEIGHTS = "diffusion_pytorch_model.safetensors"
# Channels of the convolutions of the control image: as published, the first one and three that halve it.
_EMBEDDING = (8, 16, 16, 32)


def picture(seed: int, size: tuple[int, int] = (90, 70)) -> Image.Image:
    """Return a smooth image in random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def write_controlnet(source: Path, out: Path, seed: int, *, union: bool = False, **changes: Any) -> Path:
    """Write a ControlNet for the UNet of a diffusers folder, and return its folder.

    Args:
        source: the diffusers folder.
        out: the folder to write.
        seed: any integer; two ControlNets have different weights.
        union: whether to write a ControlNet-Union of three types.
        changes: entries of its configuration.
    """
    unet = json.loads((source / "unet" / "config.json").read_text())
    names = (
        "act_fn", "addition_embed_type", "addition_time_embed_dim", "attention_head_dim", "block_out_channels",
        "cross_attention_dim", "down_block_types", "downsample_padding", "flip_sin_to_cos", "freq_shift",
        "layers_per_block", "norm_eps", "norm_num_groups", "projection_class_embeddings_input_dim",
        "transformer_layers_per_block", "use_linear_projection",
    )  # fmt: skip
    config = {name: unet[name] for name in names if name in unet}
    config |= {"conditioning_embedding_out_channels": _EMBEDDING, "in_channels": unet["out_channels"]}
    if union:
        width = unet["block_out_channels"][0]
        config |= {"num_control_type": 3, "num_trans_channel": width, "num_proj_channel": width, "num_trans_head": 4}
    kind: Any = diffusers.ControlNetUnionModel if union else diffusers.ControlNetModel
    return _write(kind.from_config(config | changes), out, seed)


def write_adapter(source: Path, out: Path, seed: int, **changes: Any) -> Path:
    """Write a T2I-Adapter for the UNet of a diffusers folder, and return its folder."""
    unet = json.loads((source / "unet" / "config.json").read_text())
    xl = unet.get("addition_embed_type") is not None
    channels = list(unet["block_out_channels"])
    config: dict[str, Any] = {"adapter_type": "full_adapter", "channels": channels, "num_res_blocks": 1}
    if xl:
        config |= {"adapter_type": "full_adapter_xl", "channels": [*channels, channels[-1]], "downscale_factor": 16}
    kind: Any = diffusers.T2IAdapter
    return _write(kind(**(config | changes)), out, seed)


def _write(model: Any, out: Path, seed: int) -> Path:
    out.mkdir(parents=True)
    with torch.no_grad():
        weights = seeded_weights(type(model).__name__, model, seed)
    save_file(weights, out / _WEIGHTS, metadata={"format": "pt"})
    model.save_config(out)
    return out
