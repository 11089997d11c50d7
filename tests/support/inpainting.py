"""A sample pipeline with an inpainting denoiser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import diffusers
import torch

from support.pipeline_cache import PipelineCache


def inpainting_pipeline(pipelines: PipelineCache, micro: Path) -> Path:
    """Return `micro` with a UNet of 9 input channels, a diffusers folder."""
    return pipelines.derived("inpainting", micro, _make_inpainting)


def _make_inpainting(source: Path) -> None:
    index = json.loads((source / "model_index.json").read_text())
    (source / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionInpaintPipeline"}))
    torch.manual_seed(0)
    config = diffusers.UNet2DConditionModel.load_config(source / "unet")
    shutil.rmtree(source / "unet")
    # One block with attention: what differs from other pipelines are the inputs.
    changes = {"in_channels": 9, "block_out_channels": (64,), "attention_head_dim": 2}
    changes |= {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("UpBlock2D",)}
    diffusers.UNet2DConditionModel.from_config({**config, **changes}).save_pretrained(source / "unet")
