"""Small UNets of diffusers with random weights."""

from __future__ import annotations

from typing import Any

__all__ = ["TEXT_WIDTH", "small_unet"]

TEXT_WIDTH = 16
"""Width of the text embeddings that the UNets read."""


def small_unet(**options: Any) -> Any:
    """Return a UNet2DConditionModel with one block, unless the options say otherwise."""
    import torch
    from diffusers import UNet2DConditionModel

    # Spinning threads of both torch and ONNX Runtime on a few shared cores take ten times as long.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "block_out_channels": (32,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("UpBlock2D",),
        "attention_head_dim": 2,
        "norm_num_groups": 8,
        "layers_per_block": 1,
    }
    model: Any = UNet2DConditionModel(sample_size=16, cross_attention_dim=TEXT_WIDTH, **(sizes | options))
    return model.eval().requires_grad_(False)
