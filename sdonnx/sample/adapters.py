"""IP-Adapters with random weights, in the form in which they are published.

Names are those of github.com/tencent-ailab/IP-Adapter: `ImageProjModel`, `Resampler` and the numbered attentions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.adapters import is_cross_attention
from sdonnx.sample.architectures import AdapterSpec

if TYPE_CHECKING:
    import torch

__all__ = ["FILES", "write_adapters"]

FILES = ("ip-adapter.safetensors", "ip-adapter-plus.safetensors")
"""What `write_adapters` writes: four tokens of the image's embedding, and a resampler's tokens."""

# ImageProjModel's clip_extra_context_tokens, and Resampler's dim_head and depth.
_TOKENS = 4
_HEAD = 64
_DEPTH = 4


def write_adapters(spec: AdapterSpec, unet: Any, folder: Path, seed: int) -> None:
    """Write the adapters of a UNet into a folder.

    Args:
        spec: the adapters.
        unet: a UNet2DConditionModel, for its cross-attentions; it may be on the meta device.
        folder: where to.
        seed: any integer.
    """
    import torch
    from safetensors.torch import save_file

    from sdonnx.sample.weights import draw_weights

    encoder = spec.image_encoder.config
    width = int(unet.config.cross_attention_dim)
    with torch.device("meta"):
        projections = (_plain(encoder["projection_dim"], width), _plus(spec, encoder["hidden_size"], width))
        attentions = _attentions(unet, width)
        for file, projection in zip(FILES, projections, strict=True):
            module = torch.nn.ModuleDict({"image_proj": projection, "ip_adapter": attentions})
            save_file(draw_weights(file, module, seed), folder / file, metadata={"format": "pt"})
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
    """Keys and values of each cross-attention, numbered among all attentions as diffusers lists them."""
    from torch import nn

    modules = {}
    for number, name in enumerate(unet.attn_processors):
        if is_cross_attention(name):
            hidden_size = unet.get_submodule(name.removesuffix(".processor")).inner_dim
            pair = {part: nn.Linear(width, hidden_size, bias=False) for part in ("to_k_ip", "to_v_ip")}
            modules[str(number)] = nn.ModuleDict(pair)
    return nn.ModuleDict(modules)
