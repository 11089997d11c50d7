"""Number of layers in modules of diffusers and transformers, as a reference for `sdonnx.models.layer_counts`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from diffusers.models.activations import GEGLU, GELU
from diffusers.models.attention_processor import Attention
from transformers.activations import NewGELUActivation
from transformers.models.clip.modeling_clip import CLIPAttention
from transformers.models.t5.modeling_t5 import T5Attention, T5LayerNorm

# Kind of layer -> classes of its modules.
CLASSES: dict[str, tuple[type, ...]] = {
    "attention": (Attention, CLIPAttention, T5Attention),
    "geglu": (GEGLU,),
    "fast_gelu": (GELU, torch.nn.GELU, NewGELUActivation),
    "group_norm": (torch.nn.GroupNorm,),
    "layer_norm": (torch.nn.LayerNorm,),
    "rms_norm": (T5LayerNorm,),
    "convolution": (torch.nn.Conv2d,),
}


def counted(modules: Iterable[torch.nn.Module | None]) -> dict[str, int]:
    """Return the number of layers of each kind in the modules."""
    layers = [layer for module in modules if module is not None for layer in module.modules()]
    # The gelu of OpenCLIP's text encoder is exact, and has no fused kernel.
    exact = [layer for layer in layers if getattr(layer, "approximate", "tanh") == "none"]
    return {
        kind: sum(isinstance(layer, classes) and layer not in exact for layer in layers)
        for kind, classes in CLASSES.items()
    }


def as_written(network: Any) -> dict[str, Any]:
    """Return the configuration as config.json contains it."""
    written = network.config if hasattr(network.config, "to_json_string") else network
    return dict(json.loads(written.to_json_string()))
