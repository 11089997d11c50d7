"""Seeded Gaussian noise without torch, equal to the noise of `torch.Generator("cpu")`.

Source: PyTorch's `aten/src/ATen/native/cpu/DistributionTemplates.h` (`normal_fill` for 16 values or more,
`normal_distribution<double>` below) and `aten/src/ATen/core/DistributionsHelper.h`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError

__all__ = ["TorchCpuGenerator", "fresh_seed"]

# torch samples 16 values at a time: eight radii, then their eight angles.
_BLOCK = 16
_HALF = _BLOCK // 2


def fresh_seed() -> int:
    """Return a random seed from 0 to 2**32 - 1, the bits that the generator uses."""
    return secrets.randbits(32)


class TorchCpuGenerator:
    """Generator of the random numbers of `torch.Generator("cpu").manual_seed(seed)`.

    Successive calls continue one stream, as with a torch generator.
    """

    def __init__(self, seed: int | np.integer[Any]) -> None:
        """Seed the stream.

        Args:
            seed: -2**63 to 2**64 - 1. As in torch, only the low 32 bits (two's complement) are used.

        Raises:
            OptionError: the seed is not an integer or out of range.
        """
        whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
        if not whole or not -(2**63) <= int(seed) < 2**64:
            raise OptionError(f"the seed is {seed!r}", "an integer from -2**63 to 2**64 - 1")
        # Both seed the Mersenne Twister by Matsumoto and Nishimura's init_genrand.
        self._engine = np.random.RandomState(int(seed) & 0xFFFFFFFF)
        self._spare: float | None = None

    def randn(self, shape: Sequence[int]) -> NDArray[np.float32]:
        """Return `torch.randn(shape, generator=generator)`, to 1e-6.

        Raises:
            OptionError: a dimension is negative.
        """
        if any(size < 0 for size in shape):
            raise OptionError(f"the shape is {tuple(shape)}", "sizes from 0 on")
        count = math.prod(shape)
        values = self._many(count) if count >= _BLOCK else self._few(count)
        return values.reshape(tuple(shape))

    def _words(self, count: int) -> NDArray[np.uint32]:
        return self._engine.randint(0, 2**32, size=count, dtype=np.uint32)

    def _many(self, count: int) -> NDArray[np.float32]:
        words = self._words(count)
        whole = count // _BLOCK * _BLOCK
        values = np.empty(count, np.float32)
        values[:whole] = _box_muller(words[:whole])
        if whole < count:
            # For a partial block, torch samples the last 16 values again.
            values[-_BLOCK:] = _box_muller(self._words(_BLOCK))
        return values

    def _few(self, count: int) -> NDArray[np.float32]:
        return np.array([self._one() for _ in range(count)], np.float32)

    def _one(self) -> float:
        """Return one value of a pair computed in double precision; keep the other for the next call."""
        if self._spare is not None:
            value, self._spare = self._spare, None
            return value
        angle, tail = 2 * math.pi * self._double(), self._double()
        radius = math.sqrt(-2 * math.log1p(-tail))
        self._spare = radius * math.sin(angle)
        return radius * math.cos(angle)

    def _double(self) -> float:
        """Return a uniform number from the low 53 bits of two words."""
        high, low = (int(word) for word in self._words(2))
        return ((high << 32 | low) & (2**53 - 1)) * 2.0**-53


def _box_muller(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return Gaussian numbers from words, (n,) with n a multiple of 16 (Box and Muller, 1958)."""
    uniform = (words & 0xFFFFFF).astype(np.float32) * np.float32(2.0**-24)
    blocks = uniform.reshape(-1, 2, _HALF)
    radius = np.sqrt(-2 * np.log((1 - blocks[:, 0]).astype(np.float64)))
    # As in torch, the angle is rounded to single precision. That is visible, since radii reach 5.8.
    angle = (np.float32(2 * math.pi) * blocks[:, 1]).astype(np.float64)
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs.astype(np.float32).reshape(-1)
