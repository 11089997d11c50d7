"""Export of PixArt: wrappers of its components, and changes to its transformer for tracing.

The transformer accepts any image size, and has one modulation for the whole batch. All images of a batch share the step
and the size, so adaLN-single (arXiv:2310.00426, section 2.3) computes one row of shifts, scales and gates. A single row
can be folded into a norm or a bias; one row per image could not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from sdonnx.errors import FolderError
from sdonnx.export.t5_encoder import MaskedTextEncoder
from sdonnx.export.wrappers import VAE_WRAPPERS, Wrapper
from sdonnx.models.spec import CAPTION_MASK

__all__ = ["WRAPPERS", "TransformerDenoiser"]

_MASKED = -10000.0  # PixArtTransformer2DModel.forward


def _make_traceable(transformer: Any) -> None:
    """Change how a PixArtTransformer2DModel computes, in place. Parameters and results do not change.

    The changed model is called with sample (B,C,H,W), timestep (1,), caption (B,L,E), mask (B,L), which is 1 for tokens
    of the caption, and a dictionary with resolution (1,2) and aspect_ratio (1,1), or with neither.

    Raises:
        FolderError: The transformer has other parts than PixArt's.
    """
    transformer.forward = partial(_transformer, transformer)
    transformer.pos_embed.forward = partial(_embedded, transformer.pos_embed)
    for block in transformer.transformer_blocks:
        if getattr(block, "fuser", None) is not None or block.attn2 is None or block.pos_embed is not None:
            raise FolderError(
                "the transformer's blocks have other parts", "the parts of PixArt's blocks", "use a PixArt pipeline"
            )
        block.forward = partial(_block, block)
        for attention in (block.attn1, block.attn2):
            attention.forward = partial(_attention, attention)


def _transformer(
    transformer: Any,
    sample: torch.Tensor,
    timestep: torch.Tensor,
    caption: torch.Tensor,
    mask: torch.Tensor,
    sizes: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Run a transformer, as diffusers' PixArtTransformer2DModel.forward does."""
    size, channels = transformer.config.patch_size, transformer.out_channels
    height, width = sample.shape[-2] // size, sample.shape[-1] // size
    if transformer.caption_projection is not None:
        caption = transformer.caption_projection(caption)
    caption, allowed = _tokens_first(caption, mask)
    # One value per score of a head: ONNX Runtime's kernels broadcast only over heads.
    row = torch.where(allowed, 0.0, _MASKED).to(sample.dtype)
    bias = row[:, None].expand(-1, height * width, -1)
    hidden_states = transformer.pos_embed(sample)
    adaln = transformer.adaln_single
    conditions = {"resolution": sizes.get("resolution"), "aspect_ratio": sizes.get("aspect_ratio")}
    embedded = adaln.emb(timestep, **conditions, batch_size=1, hidden_dtype=sample.dtype)
    modulation = adaln.linear(adaln.silu(embedded)).reshape(1, 6, -1)
    # For all blocks at once, because one row is too little work for a kernel.
    tables = torch.stack([block.scale_shift_table for block in transformer.transformer_blocks])
    # A row is (shift, scale, gate) twice. A norm's output is multiplied by 1 + scale.
    ones = (torch.arange(6) % 3 == 1).to(sample.dtype)[None, :, None]
    rows = (tables + ones + modulation).flatten(0, 1)[:, None].split(1)
    for index, block in enumerate(transformer.transformer_blocks):
        hidden_states = block(hidden_states, caption, bias, rows[6 * index : 6 * index + 6])
    shift, scale = (transformer.scale_shift_table[None] + embedded[:, None]).chunk(2, dim=1)
    hidden_states = transformer.proj_out(transformer.norm_out(hidden_states) * (1 + scale) + shift)
    patches = hidden_states.reshape(-1, height, width, size, size, channels)
    prediction: torch.Tensor = patches.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, height * size, width * size)
    return prediction


def _tokens_first(caption: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caption (B,L,E) with tokens before padding, and a mask (B,L) that is true for tokens.

    Attention does not depend on the order of its keys. With the padding last, a kernel needs only the number of tokens.
    """
    places = torch.arange(mask.shape[1])
    kept = mask.cumsum(dim=1)
    count = kept[:, -1:]
    # Tokens keep their order, and so does padding.
    target = torch.where(mask > 0, kept, count + places + 1 - kept) - 1
    # A product with a permutation matrix moves finite values exactly. CUDA graphs can capture it, but not sorting.
    moves = (target[:, None, :] == places[:, None]).to(caption.dtype)
    return moves @ caption, places < count


def _embedded(patches: Any, latent: torch.Tensor) -> torch.Tensor:
    """Return the embedded patches of latents (B,C,H,W) plus their positions, (B,H/p*W/p,D).

    Source: diffusers' PatchEmbed and get_2d_sincos_pos_embed, which compute tables of a fixed size; arXiv:2310.00426,
    section 2.4, for the scale of positions.
    """
    height, width = latent.shape[-2] // patches.patch_size, latent.shape[-1] // patches.patch_size
    quarter = patches.proj.out_channels // 4
    exponents = torch.arange(quarter, dtype=torch.float32) / quarter
    frequencies = 1.0 / 10000.0**exponents

    def table(count: int) -> torch.Tensor:
        places = torch.arange(count, dtype=torch.float32)
        # Not divided by `count`: sizes are on the host, and CUDA graphs cannot capture copies from the host.
        positions = places / ((places[-1:] + 1) / patches.base_size)
        angles = torch.outer(positions / patches.interpolation_scale, frequencies)
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    columns = table(width)[None].expand(height, -1, -1)
    rows = table(height)[:, None].expand(-1, width, -1)
    positions = torch.cat([columns, rows], dim=2).flatten(0, 1)[None]
    flat: torch.Tensor = patches.proj(latent).flatten(2).transpose(1, 2)
    return flat + positions.to(flat.dtype)


def _block(
    block: Any,
    hidden_states: torch.Tensor,
    caption: torch.Tensor,
    bias: torch.Tensor,
    modulation: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Run a block, as diffusers' BasicTransformerBlock with norm_type "ada_norm_single" does.

    Rows (1,1,D) of the modulation are shift, 1 + scale and gate of the self-attention, and then of the
    feed-forward layers.
    """
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
    normed = block.norm1(hidden_states) * scale + shift
    hidden_states = hidden_states + gate * block.attn1(normed, normed, None)
    hidden_states = hidden_states + block.attn2(hidden_states, caption, bias)
    normed = block.norm2(hidden_states) * mlp_scale + mlp_shift
    feed_forward: torch.Tensor = hidden_states + mlp_gate * block.ff(normed)
    return feed_forward


def _attention(attention: Any, queries: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Run an attention of queries (B,Q,D) to keys (B,L,D); all heads share the bias (B,Q,L)."""

    def split(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(*values.shape[:2], attention.heads, -1).transpose(1, 2)

    result = torch.nn.functional.scaled_dot_product_attention(
        split(attention.to_q(queries)),
        split(attention.to_k(keys)),
        split(attention.to_v(keys)),
        attn_mask=None if bias is None else bias[:, None],
    )
    joined: torch.Tensor = attention.to_out[0](result.transpose(1, 2).flatten(2))
    return joined


class TransformerDenoiser(Wrapper):
    """sample (B,C,H,W), timestep (1,), encoder_hidden_states (B,S,D), encoder_attention_mask (B,S) -> (B,2C,H,W).

    The mask is 1 for tokens of the caption. Transformers that are conditioned on the image size have the inputs
    resolution (1,2) and aspect_ratio (1,1) float32, which all images of a batch share. The second half of the output's
    channels is the learned variance.
    """

    example_sizes: ClassVar = {"height": 38, "width": 46}  # whole patches, an odd number of them

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__(model, names)
        _make_traceable(model)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the transformer."""
        named = dict(zip(self.names, inputs, strict=True))
        first = [named.pop(name) for name in ("sample", "timestep", "encoder_hidden_states", CAPTION_MASK)]
        prediction: torch.Tensor = self.model(*first, named)
        return prediction


WRAPPERS: Mapping[str, type[Wrapper]] = {
    **VAE_WRAPPERS,
    "text_encoder": MaskedTextEncoder,
    "transformer": TransformerDenoiser,
}
