"""The smallest pipelines of their families: for tests that make, break and open one many times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from sdonnx.sample import write_sample as sample

__all__ = ["write_micro"]

_CHANGES: dict[str, dict[str, Any]] = {
    "text_encoder": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": 32,
    },
    "unet": {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "cross_attention_dim": 32,
        "attention_head_dim": 2,
    },
    "vae": {
        "block_out_channels": (32, 32),
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
        "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
        "layers_per_block": 1,
    },
}


def write_micro(folder: Path, overflow: str | None = None) -> Path:
    """Write Stable Diffusion with 32 channels, a diffusers folder, of which something may overflow fp16; return it."""
    tiny = sample.ARCHITECTURES["tiny"]
    networks = {
        name: replace(network, config={**network.config, **_CHANGES[name]}) for name, network in tiny.networks.items()
    }
    with mock.patch.object(sample, "ARCHITECTURES", {"micro": replace(tiny, networks=networks)}):
        sample.write_sample("micro", folder, overflow=overflow)
    return folder
