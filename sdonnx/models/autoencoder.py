"""Values from the configuration of diffusers' AutoencoderKL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sdonnx.errors import FolderError

__all__ = [
    "DEFAULT_SCALING_FACTOR",
    "LATENTS_MEAN",
    "LATENTS_STD",
    "SHIFT_FACTOR",
    "block_channels",
    "downsampling_factor",
    "largest_decoder_tensor",
    "largest_encoder_tensor",
    "latent_statistics",
    "tile_size",
]

DEFAULT_SCALING_FACTOR = 0.18215
"""`scaling_factor` of configurations that do not set it: the default of diffusers' AutoencoderKL, and the value of
Stable Diffusion 1 and 2 (Rombach et al. 2022, arXiv:2112.10752, section G: latents of unit variance)."""

SHIFT_FACTOR, LATENTS_MEAN, LATENTS_STD = "shift_factor", "latents_mean", "latents_std"
"""Entries that some of diffusers' pipelines read next to `scaling_factor`; see `Family.latent_entries`."""

# Stable Diffusion's, for configurations without them.
_CHANNELS = (128, 256, 512, 512)
_SAMPLE_SIZE = 512

# A tile is a multiple of this many latents, so that its overlap of a quarter is a whole number of latents.
_TILE_MULTIPLE = 4


def downsampling_factor(config: Mapping[str, Any]) -> int:
    """Return the number of pixels per latent, in each direction; 8 without `block_out_channels`."""
    return int(2 ** (len(config.get("block_out_channels", (0,) * 4)) - 1))


def latent_statistics(config: Mapping[str, Any]) -> tuple[list[float], list[float]] | None:
    """Return the mean and the standard deviation of each channel of the latents, or None if one of them is missing.

    diffusers' pipelines of Stable Diffusion XL normalize latents with them, for Playground 2.5.

    Raises:
        FolderError: They are not one finite number for each channel, or a deviation is not above 0.
    """
    mean, std = config.get(LATENTS_MEAN), config.get(LATENTS_STD)
    if mean is None or std is None:
        return None
    channels = config.get("latent_channels")
    for values in (mean, std):
        if not (isinstance(values, list | tuple) and len(values) == channels and all(map(_is_finite, values))):
            raise FolderError(
                f"the autoencoder's {LATENTS_MEAN} and {LATENTS_STD} are {mean!r} and {std!r}",
                f"{channels} numbers each, as it has channels",
                "copy its config.json again from the original pipeline",
            )
    if min(std) <= 0:
        raise FolderError(f"the autoencoder's {LATENTS_STD} is {std!r}", "numbers above 0", "copy config.json again")
    return [float(value) for value in mean], [float(value) for value in std]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def block_channels(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the channels of the encoder's blocks, starting with the block of the largest images.

    Raises:
        ValueError: `block_out_channels` is not a list of positive numbers.
    """
    channels = tuple(int(count) for count in config.get("block_out_channels") or _CHANNELS)
    if min(channels) < 1:
        raise ValueError(f"block_out_channels are {channels}")
    return channels


def largest_decoder_tensor(channels: Sequence[int], height: int, width: int) -> int:
    """Return the number of elements of the decoder's largest tensor, for one image.

    Source: diffusers' `Decoder` and `UpDecoderBlock2D`. Block i works on 2^i times the size of the latents with the
    channels of `block_out_channels` in reverse order. All but the last block end with an upsampling by 2 (an ONNX
    `Resize`) that keeps their channels, so that the last block reads the channels of the one before it.

    Args:
        channels: see `block_channels`.
        height: height of the latents.
        width: width of the latents.
    """
    deepest_first = tuple(reversed(channels))
    resized = [count << 2 * (index + 1) for index, count in enumerate(deepest_first[:-1])]
    return max(deepest_first[0], *resized, channels[0] << 2 * (len(channels) - 1)) * height * width


def largest_encoder_tensor(channels: Sequence[int], height: int, width: int) -> int:
    """Return the number of elements of the encoder's largest tensor, for one image.

    Source: diffusers' `Encoder` and `DownEncoderBlock2D`. Block i works on the size of the image divided by 2^i. All
    but the last block pad their output by a row and a column before they halve its size.

    Args:
        channels: see `block_channels`.
        height: height of the latents.
        width: width of the latents.
    """
    factor = 1 << (len(channels) - 1)
    return max(
        count * ((height * factor >> index) + 1) * ((width * factor >> index) + 1)
        for index, count in enumerate(channels)
    )


def tile_size(config: Mapping[str, Any]) -> int:
    """Return the height and width of a tile in latents: the autoencoder's training size, as in diffusers.

    Source: `AutoencoderKL.tile_latent_min_size`. It is rounded down to a multiple of 4 here: diffusers blends a quarter
    of a tile, and images of other sizes come out with another size than requested.
    """
    sample_size = config.get("sample_size")
    pixels = sample_size if isinstance(sample_size, int) and sample_size > 0 else _SAMPLE_SIZE
    latents = pixels // downsampling_factor(config)
    return max(latents // _TILE_MULTIPLE, 1) * _TILE_MULTIPLE
