"""IP-Adapters with random weights, in the published layout.

Names are as in github.com/tencent-ailab/IP-Adapter: `ImageProjModel`, `Resampler` and the numbered attentions.
Sample pipelines with names that end with `-ip-adapter` have adapters next to them, as in h94/IP-Adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sdonnx.models.ip_adapter import is_cross_attention
from sdonnx.sample.architecture import ADAPTER_FILES, AdapterSpec, Architecture, ClassSpec

if TYPE_CHECKING:
    import torch

__all__ = ["with_adapters", "write_adapters"]

# ImageProjModel's clip_extra_context_tokens, and Resampler's dim_head and depth.
_TOKENS = 4
_HEAD = 64
_DEPTH = 4


def _clip_vision(**changes: Any) -> ClassSpec:
    """Return the image encoder of the published adapters (OpenCLIP ViT-H/14), with these changes."""
    config = {
        "architectures": ["CLIPVisionModelWithProjection"],
        "attention_dropout": 0.0,
        "dtype": "float32",
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "image_size": 224,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "layer_norm_eps": 1e-05,
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 32,
        "patch_size": 14,
        "projection_dim": 1024,
    }
    return ClassSpec("transformers", "CLIPVisionModelWithProjection", MappingProxyType(config | changes))


# h94/IP-Adapter: models/ip-adapter-plus_sd15.safetensors and sdxl_models/ip-adapter-plus_sdxl_vit-h.safetensors.
_ADAPTERS = {
    "sd15": AdapterSpec(_clip_vision(), hidden_size=768, heads=12),
    "sdxl": AdapterSpec(_clip_vision(), hidden_size=1280, heads=20),
}
_CLIP_VISION_TINY = _clip_vision(
    hidden_size=64,
    image_size=56,
    intermediate_size=256,
    num_attention_heads=4,
    num_hidden_layers=3,
    projection_dim=32,
)
_ADAPTERS |= dict.fromkeys(("tiny", "sdxl-tiny"), AdapterSpec(_CLIP_VISION_TINY, hidden_size=64, heads=1, queries=6))


def with_adapters(architectures: Mapping[str, Architecture]) -> dict[str, Architecture]:
    """Return architectures extended by adapters, where there are some; their names end with `-ip-adapter`."""
    return {
        f"{name}-ip-adapter": replace(architectures[name], adapters=adapters) for name, adapters in _ADAPTERS.items()
    }


def write_adapters(spec: AdapterSpec, unet: Any, folder: Path, seed: int) -> None:
    """Write the adapters of a UNet into a folder.

    Args:
        spec: The adapters.
        unet: A UNet2DConditionModel with the cross-attentions to adapt; it may be on the meta device.
        folder: The folder to write to.
        seed: Any integer.
    """
    import torch
    from safetensors.torch import save_file

    from sdonnx.sample.sample_weights import seeded_weights

    encoder = spec.image_encoder.config
    width = int(unet.config.cross_attention_dim)
    with torch.device("meta"):
        projections = (_plain(encoder["projection_dim"], width), _plus(spec, encoder["hidden_size"], width))
        attentions = _attentions(unet, width)
        for file, projection in zip(ADAPTER_FILES, projections, strict=True):
            module = torch.nn.ModuleDict({"image_proj": projection, "ip_adapter": attentions})
            save_file(seeded_weights(file, module, seed), folder / file, metadata={"format": "pt"})
            (folder / file).chmod(0o644)


def _plain(embedding: int, width: int) -> torch.nn.Module:
    from torch import nn

    return nn.ModuleDict({"proj": nn.Linear(embedding, _TOKENS * width), "norm": nn.LayerNorm(width)})


def _plus(spec: AdapterSpec, embedding: int, width: int) -> torch.nn.Module:
    import torch
    from torch import nn

    size, inner = spec.hidden_size, spec.heads * _HEAD

    def linear(before: int, after: int) -> nn.Linear:
        return nn.Linear(before, after, bias=False)

    def layer() -> nn.Module:
        attention = {
            "norm1": nn.LayerNorm(size),
            "norm2": nn.LayerNorm(size),
            "to_q": linear(size, inner),
            "to_kv": linear(size, 2 * inner),
            "to_out": linear(inner, size),
        }
        forward = nn.Sequential(nn.LayerNorm(size), linear(size, 4 * size), nn.GELU(), linear(4 * size, size))
        return nn.ModuleList([nn.ModuleDict(attention), forward])

    parts = {
        "proj_in": nn.Linear(embedding, size),
        "proj_out": nn.Linear(size, width),
        "norm_out": nn.LayerNorm(width),
        "layers": nn.ModuleList(layer() for _ in range(_DEPTH)),
    }
    module = nn.ModuleDict(parts)
    module.register_parameter("latents", nn.Parameter(torch.empty(1, spec.queries, size)))
    return module


def _attentions(unet: Any, width: int) -> torch.nn.Module:
    """Return keys and values of each cross-attention, numbered by its position in diffusers' list of attentions."""
    from torch import nn

    modules = {}
    for number, name in enumerate(unet.attn_processors):
        if is_cross_attention(name):
            hidden_size = unet.get_submodule(name.removesuffix(".processor")).inner_dim
            pair = {part: nn.Linear(width, hidden_size, bias=False) for part in ("to_k_ip", "to_v_ip")}
            modules[str(number)] = nn.ModuleDict(pair)
    return nn.ModuleDict(modules)
