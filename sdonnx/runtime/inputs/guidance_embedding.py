"""The guidance scale as an input of denoisers with distilled guidance, such as latent consistency models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["guidance_embedding"]


def guidance_embedding(guidance_scales: Sequence[float], size: int) -> NDArray[np.float32]:
    """Return the embedding of each guidance scale, (B, size).

    Source: `get_guidance_scale_embedding` of diffusers' pipelines, with w = guidance_scale - 1, which computes in
    single precision. The angles reach 1000 * w, so the rounding of the frequencies decides the third digit of sines.

    Args:
        guidance_scales: weight of the prompt for each of B images.
        size: numbers of an embedding: sines, then cosines, and a 0 if it is odd.
    """
    half = size // 2
    step = np.float32(np.log(10000.0)) / np.float32(max(half - 1, 1))
    exponents = np.arange(half, dtype=np.float32) * -step
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
    scaled = np.array([scale - 1 for scale in guidance_scales], np.float32) * np.float32(1000)
    angles = (scaled[:, None] * frequencies).astype(np.float64)
    embedding = np.zeros((len(scaled), size), np.float32)
    embedding[:, :half], embedding[:, half : 2 * half] = np.sin(angles), np.cos(angles)
    return embedding
