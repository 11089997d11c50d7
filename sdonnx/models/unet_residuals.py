"""Residuals of ControlNet and T2I-Adapter: their shapes, as the configuration of a UNet2DConditionModel defines them.

ControlNet (Zhang et al. 2023, arXiv:2302.05543) adds a residual to each skip connection of the UNet and to the output
of its middle block. T2I-Adapter (Mou et al. 2023, arXiv:2302.08453) adds one to the output of each down block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sdonnx.models.spec import Config, TensorSpec

__all__ = [
    "ADAPTER",
    "CONTROLNET",
    "CONTROLNET_MID",
    "EXAMPLE_SIZES",
    "Residual",
    "adapter_inputs",
    "adapter_residuals",
    "controlnet_inputs",
    "controlnet_residuals",
    "has_sizes_of",
    "level_sizes",
]

CONTROLNET = "down_block_additional_residuals"
CONTROLNET_MID = "mid_block_additional_residual"
ADAPTER = "down_intrablock_additional_residuals"

# A broken configuration can ask for a billion layers.
_MAX_LAYERS = 1000

_MAX_LEVEL = 5  # halvings with different example sizes; the UNet of Stable Diffusion 1 has three


@dataclass(frozen=True)
class Residual:
    """A residual that is added to a value of the UNet.

    Attributes:
        channels: Number of channels.
        level: Number of times that the latents' height and width are halved.
        skip: Index of the skip connection that has the same value; None for the output of the middle block.
    """

    channels: int
    level: int
    skip: int | None

    @property
    def axes(self) -> tuple[str, str]:
        """Names of height and width, such as `height4`."""
        return _axes(self.level)


def _halved(size: int, level: int) -> int:
    """Return the size after convolutions of stride 2, each of which rounds up."""
    return -(-size >> level)


def _axes(level: int) -> tuple[str, str]:
    """Return the names of height and width after some halvings, such as `height4`."""
    suffix = str(2**level) if level else ""
    return f"height{suffix}", f"width{suffix}"


def level_sizes(height: int, width: int) -> dict[str, int]:
    """Return the sizes of the axes of residuals by name, for latents of that height and width."""
    return {
        name: _halved(size, level)
        for level in range(_MAX_LEVEL + 1)
        for name, size in zip(_axes(level), (height, width), strict=True)
    }


EXAMPLE_SIZES: Mapping[str, int] = MappingProxyType(level_sizes(37, 43))
"""Example sizes of the axes of residuals while a UNet is traced, for latents of 37x43."""


def controlnet_residuals(config: Config) -> tuple[Residual, ...]:
    """Return the residuals of ControlNet: one for each skip connection, and one for the middle block.

    Args:
        config: Configuration of the UNet or of the ControlNet.

    Raises:
        ValueError: It describes more than a thousand layers.
    """
    skips = [residual for block in _blocks(config) for residual in block]
    return (*skips, Residual(skips[-1].channels, skips[-1].level, None))


def adapter_residuals(config: Config) -> tuple[Residual, ...]:
    """Return the residuals of T2I-Adapter: one for each down block, and one for the middle block.

    Blocks with cross-attention add the residual before they downsample, others after it. Adapters of Stable Diffusion
    have none for the middle block.

    Args:
        config: Configuration of the UNet.
    """
    residuals = []
    for index, (kind, block) in enumerate(zip(config["down_block_types"], list(_blocks(config))[1:], strict=True)):
        downsamples = index + 1 < len(config["down_block_types"])
        residuals.append(block[-2 if downsamples and "CrossAttn" in kind else -1])
    if config.get("mid_block_type", "UNetMidBlock2DCrossAttn") is not None:
        residuals.append(Residual(residuals[-1].channels, len(residuals) - 1, None))
    return tuple(residuals)


def controlnet_inputs(config: Config) -> tuple[TensorSpec, ...]:
    """Return `controlnet_residuals` as inputs of a UNet that is traced with them.

    A UNet that halves its latents more than five times has none.
    """
    *skips, middle = controlnet_residuals(config)
    named = [(f"{CONTROLNET}.{index}", residual) for index, residual in enumerate(skips)]
    return _specs([*named, (CONTROLNET_MID, middle)])


def adapter_inputs(config: Config) -> tuple[TensorSpec, ...]:
    """Return `adapter_residuals` as inputs of a UNet that is traced with them.

    A UNet that halves its latents more than five times has none.
    """
    return _specs([(f"{ADAPTER}.{index}", residual) for index, residual in enumerate(adapter_residuals(config))])


def has_sizes_of(sample: Sequence[int], shape: Sequence[int], spec: TensorSpec) -> bool:
    """Return whether a residual's shape has the height and width that belong to the shape of the sample, (B,C,H,W)."""
    return all(
        _axes(level) != spec.dims[2:] or tuple(shape[2:]) == tuple(_halved(size, level) for size in sample[2:])
        for level in range(_MAX_LEVEL + 1)
    )


def _blocks(config: Config) -> Iterator[list[Residual]]:
    """Yield the skip connections of the first convolution, then of each down block."""
    channels = list(config["block_out_channels"])
    layers = config.get("layers_per_block", 2)
    counts = list(layers) if isinstance(layers, Sequence) else [layers] * len(channels)
    number = 0
    if sum(counts) > _MAX_LAYERS:
        raise ValueError(f"layers_per_block is {layers}")

    def residual(width: int, level: int) -> Residual:
        nonlocal number
        number += 1
        return Residual(int(width), level, number - 1)

    yield [residual(channels[0], 0)]
    for level, (width, count) in enumerate(zip(channels, counts, strict=True)):
        block = [residual(width, level) for _ in range(count)]
        yield block if level + 1 == len(channels) else [*block, residual(width, level + 1)]


def _specs(named: Sequence[tuple[str, Residual]]) -> tuple[TensorSpec, ...]:
    if max(residual.level for _, residual in named) > _MAX_LEVEL:
        return ()
    return tuple(TensorSpec(name, ("batch_size", residual.channels, *residual.axes)) for name, residual in named)
