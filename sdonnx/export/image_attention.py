"""The second attention that IP-Adapters give each cross-attention, its weight being an input.

diffusers' IPAdapterAttnProcessor2_0 multiplies what it attended to by a Python number, which tracing would write into
the graph. Here the tokens that become values are multiplied instead, which is the same, attention being linear in
its values: a few tokens for each block of the denoiser, in place of an image for each attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sdonnx.adapters import is_cross_attention

__all__ = ["ImageAttention", "ImagePrompt", "attend_to_images"]


@dataclass(frozen=True)
class ImagePrompt:
    """What one adapter lets the denoiser attend to.

    Attributes:
        tokens: (B,T,D), for keys.
        by_block: the same times the adapter's weight in each block, for values.
    """

    tokens: torch.Tensor
    by_block: tuple[torch.Tensor, ...]

    @classmethod
    def weighted(cls, tokens: torch.Tensor, weights: torch.Tensor) -> ImagePrompt:
        """Return the prompt of `tokens` (B,T,D) with a weight for each block (N)."""
        products = tokens.unsqueeze(0) * weights.to(tokens.dtype).reshape(-1, 1, 1, 1)
        return cls(tokens, tuple(products.unbind(0)))


class ImageAttention(torch.nn.Module):
    """An attention processor of diffusers: attends to the text, and to what each adapter makes of its images.

    Args:
        width: of the tokens.
        hidden_size: of keys and values.
        block: the number of the block whose weights count.
        adapters: how many there are.
    """

    def __init__(self, width: int, hidden_size: int, block: int, adapters: int) -> None:
        super().__init__()
        self.block = block
        # Named as in IPAdapterAttnProcessor2_0.
        self.to_k_ip = _projections(width, hidden_size, adapters)
        self.to_v_ip = _projections(width, hidden_size, adapters)

    def forward(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: tuple[torch.Tensor, Sequence[ImagePrompt]],
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (B,S,C) for hidden states (B,S,C) that attend to (text, images)."""
        text, images = encoder_hidden_states
        query = _heads(attn.to_q(hidden_states), attn.heads)
        attended = _attend(query, attn.to_k(text), attn.to_v(text), attn.heads)
        for image, to_k, to_v in zip(images, self.to_k_ip, self.to_v_ip, strict=True):
            attended = attended + _attend(query, to_k(image.tokens), to_v(image.by_block[self.block]), attn.heads)
        projected: torch.Tensor = attn.to_out[0](attended)
        return projected


def _projections(width: int, hidden_size: int, adapters: int) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(torch.nn.Linear(width, hidden_size, bias=False) for _ in range(adapters))


def _heads(values: torch.Tensor, heads: int) -> torch.Tensor:
    """(B,S,N*H) -> (B,N,S,H)."""
    batch, length, width = values.shape
    return values.view(batch, length, heads, width // heads).transpose(1, 2)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (B,S,N*H) for queries (B,N,S,H), keys and values (B,T,N*H)."""
    result = scaled_dot_product_attention(query, _heads(key, heads), _heads(value, heads))
    return result.transpose(1, 2).flatten(2)


class _AsGiven(torch.nn.Module):
    """Stands where diffusers projects images: here another component did."""

    def forward(self, images: Sequence[ImagePrompt]) -> Sequence[ImagePrompt]:
        return images


def attend_to_images(unet: Any, adapters: int) -> list[str]:
    """Let every cross-attention of a UNet2DConditionModel attend to images, and return its blocks' names.

    The order of attentions is that of `unet.attn_processors`, which numbers an adapter's weights
    (`UNet2DConditionLoadersMixin._convert_ip_adapter_attn_to_diffusers`).
    """
    processors = dict(unet.attn_processors)
    blocks: list[str] = []
    for name in processors:
        if not is_cross_attention(name):
            continue
        block = name.partition(".transformer_blocks.")[0]
        if block not in blocks:
            blocks.append(block)
        attention = unet.get_submodule(name.removesuffix(".processor"))
        processors[name] = ImageAttention(
            attention.cross_attention_dim, attention.inner_dim, blocks.index(block), adapters
        )
    unet.set_attn_processor(processors)
    unet.encoder_hid_proj = _AsGiven()
    unet.config.encoder_hid_dim_type = "ip_image_proj"
    return blocks
