"""Attention to image prompts in each cross-attention of a UNet, with adapter weights as graph inputs.

diffusers' IPAdapterAttnProcessor2_0 multiplies the attention's result by a Python number, which tracing would store in
the graph as a constant. Here the tokens that become values are multiplied instead. The result is the same, because
attention is linear in its values, and it needs a matmul over a few tokens per block instead of a matmul over an
image per attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sdonnx.models.ip_adapter import is_cross_attention

__all__ = ["ImageAttention", "ImagePrompt", "attend_to_images"]


@dataclass(frozen=True)
class ImagePrompt:
    """Tokens of one adapter's images that the denoiser attends to.

    Attributes:
        tokens: Tokens (B,T,D), for keys.
        by_block: Tokens times the adapter's weight in each block, for values.
    """

    tokens: torch.Tensor
    by_block: tuple[torch.Tensor, ...]

    @classmethod
    def weighted(cls, tokens: torch.Tensor, weights: torch.Tensor) -> ImagePrompt:
        """Return the prompt of `tokens` (B,T,D) with a weight per block (N)."""
        products = tokens.unsqueeze(0) * weights.to(tokens.dtype).reshape(-1, 1, 1, 1)
        return cls(tokens, tuple(products.unbind(0)))


class ImageAttention(torch.nn.Module):
    """An attention processor of diffusers that attends to the text, and to the tokens of each adapter's images.

    Args:
        block: Index of the block, which selects its weights.
        to_k_ip: Projections of each adapter's tokens to keys, as in IPAdapterAttnProcessor2_0.
        to_v_ip: Projections to values.
    """

    def __init__(self, block: int, to_k_ip: torch.nn.ModuleList, to_v_ip: torch.nn.ModuleList) -> None:
        super().__init__()
        self.block = block
        # The same names as in IPAdapterAttnProcessor2_0.
        self.to_k_ip = to_k_ip
        self.to_v_ip = to_v_ip

    def forward(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: tuple[torch.Tensor, Sequence[ImagePrompt]],
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of hidden states (B,S,C) to (text, images), (B,S,C)."""
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
    """Split (B,S,N*H) into heads (B,N,S,H)."""
    batch, length, width = values.shape
    return values.view(batch, length, heads, width // heads).transpose(1, 2)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (B,S,N*H) for queries (B,N,S,H), keys and values (B,T,N*H)."""
    result = scaled_dot_product_attention(query, _heads(key, heads), _heads(value, heads))
    return result.transpose(1, 2).flatten(2)


class _Identity(torch.nn.Module):
    """Replaces diffusers' projection of images, which is another component here."""

    def forward(self, images: Sequence[ImagePrompt]) -> Sequence[ImagePrompt]:
        return images


def attend_to_images(unet: Any, adapters: int) -> list[str]:
    """Change every cross-attention of a UNet2DConditionModel to attend to images, and return the names of its blocks.

    Attentions are in the order of `unet.attn_processors`, which also numbers an adapter's weights
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
        sizes = attention.cross_attention_dim, attention.inner_dim, adapters
        processors[name] = ImageAttention(blocks.index(block), _projections(*sizes), _projections(*sizes))
    unet.set_attn_processor(processors)
    unet.encoder_hid_proj = _Identity()
    unet.config.encoder_hid_dim_type = "ip_image_proj"
    return blocks
