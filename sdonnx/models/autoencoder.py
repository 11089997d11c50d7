"""Values from the configuration of diffusers' AutoencoderKL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DEFAULT_SCALING_FACTOR", "downsampling_factor"]

DEFAULT_SCALING_FACTOR = 0.18215
"""`scaling_factor` of configurations that do not set it: the default of diffusers' AutoencoderKL, and the value of
Stable Diffusion 1 and 2 (Rombach et al. 2022, arXiv:2112.10752, section G: latents of unit variance)."""


def downsampling_factor(config: Mapping[str, Any]) -> int:
    """Return the number of pixels per latent, in each direction; 8 without `block_out_channels`."""
    return int(2 ** (len(config.get("block_out_channels", (0,) * 4)) - 1))
