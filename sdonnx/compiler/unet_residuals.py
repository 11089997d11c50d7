"""Residuals of ControlNet and T2I-Adapter: their shapes, as the blocks of a UNet2DConditionModel define them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from sdonnx.models.spec import TensorSpec

__all__ = [
    "ADAPTER",
    "CONTROLNET",
    "CONTROLNET_MID",
    "EXAMPLE_SIZES",
    "adapter_inputs",
    "controlnet_inputs",
    "has_sizes_of",
]

CONTROLNET = "down_block_additional_residuals"
CONTROLNET_MID = "mid_block_additional_residual"
ADAPTER = "down_intrablock_additional_residuals"

_MAX_LEVEL = 5  # halvings with different example sizes; the UNet of Stable Diffusion 1 has three


def _halved(size: int, level: int) -> int:
    """Return the size after convolutions of stride 2, each of which rounds up."""
    return -(-size >> level)


def _axes(level: int) -> tuple[str, str]:
    """Return the names of height and width after some halvings, such as `height4`."""
    suffix = str(2**level) if level else ""
    return f"height{suffix}", f"width{suffix}"


EXAMPLE_SIZES: Mapping[str, int] = MappingProxyType(
    {
        name: _halved(size, level)
        for level in range(_MAX_LEVEL + 1)
        for name, size in zip(_axes(level), (37, 43), strict=True)
    }
)
"""Example sizes of the axes of residuals while a UNet is traced, for latents of 37x43."""


def controlnet_inputs(unet: Any) -> tuple[TensorSpec, ...]:
    """Return the residuals of ControlNet: one for each skip connection, and that of the middle block.

    A UNet that halves its latents more than five times has none.
    """
    shapes = list(_skip_shapes(unet))
    named = [(f"{CONTROLNET}.{index}", *shape) for index, shape in enumerate(shapes)]
    return _specs([*named, (CONTROLNET_MID, *shapes[-1])])


def adapter_inputs(unet: Any) -> tuple[TensorSpec, ...]:
    """Return the residuals of T2I-Adapter: one for each down block, and that of the middle block.

    An adapter may have fewer: those of Stable Diffusion have none for the middle block. A UNet that halves its latents
    more than five times has none.
    """
    shapes, level = [], 0
    for block in unet.down_blocks:
        before, level = level, level + _downsamples(block)
        # Blocks with attention add the residual before they downsample, others after it.
        shapes.append((_channels(block), before if getattr(block, "has_cross_attention", False) else level))
    if unet.mid_block is not None:
        shapes.append((shapes[-1][0], level))
    return _specs([(f"{ADAPTER}.{index}", *shape) for index, shape in enumerate(shapes)])


def has_sizes_of(sample: torch.Tensor, tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Return whether a residual has the height and width that belong to those of the sample (B,C,H,W)."""
    return all(
        _axes(level) != spec.dims[2:] or tensor.shape[2:] == tuple(_halved(size, level) for size in sample.shape[2:])
        for level in range(_MAX_LEVEL + 1)
    )


def _skip_shapes(unet: Any) -> Iterator[tuple[int, int]]:
    """Yield channels and the number of halvings of each skip connection."""
    level = 0
    yield int(unet.conv_in.out_channels), level
    for block in unet.down_blocks:
        for resnet in block.resnets:
            yield int(resnet.out_channels), level
        if _downsamples(block):
            level += 1
            yield _channels(block), level


def _channels(block: Any) -> int:
    return int(block.resnets[-1].out_channels)


def _downsamples(block: Any) -> bool:
    return getattr(block, "downsamplers", None) is not None


def _specs(shapes: list[tuple[str, int, int]]) -> tuple[TensorSpec, ...]:
    if max(level for _, _, level in shapes) > _MAX_LEVEL:
        return ()
    return tuple(TensorSpec(name, ("batch_size", channels, *_axes(level))) for name, channels, level in shapes)
