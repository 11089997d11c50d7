"""Noise of one call without torch: equal to `torch.Generator("cpu")`, and sampled in the same order as in diffusers.

Source: PyTorch's `aten/src/ATen/native/cpu/DistributionTemplates.h` (`normal_fill` for 16 values or more,
`normal_distribution<double>` below) and `aten/src/ATen/core/DistributionsHelper.h`.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from sdonnx.errors import OptionError

__all__ = ["Generator", "NoiseSource", "TorchCpuGenerator", "fresh_seed"]

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


Generator = Any
"""A torch.Generator, a TorchCpuGenerator, or a list with one for each image."""


class NoiseSource:
    """Source of the noise of one call.

    Args:
        shape: shape (B,C,H,W) of the latents.
        seed: seed of the noise, or a list with one for each image; None for a random one, unless there is a generator.
        generator: a generator, or one for each image.
        named: whether the seed determines the images, so that `ImageOutput` reports a random one.
        make: creates the generator of a seed.

    Attributes:
        seed: seed or seeds that determine the images; None if the caller passed a generator or latents.
        generator: generator or generators that the noise is sampled with.

    Raises:
        OptionError: there are both a seed and a generator, or a generator is of an unknown type.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        seed: int | Sequence[int] | None,
        generator: Generator | None,
        *,
        named: bool,
        make: Callable[[int], Generator] = TorchCpuGenerator,
    ) -> None:
        if seed is not None and generator is not None:
            raise OptionError("both a seed and a generator", "one of them")
        # Samplers that add noise need a generator even if the caller passed latents.
        seeds = list(seed) if isinstance(seed, list | tuple) else None
        one: Any = None if seeds is not None else seed
        if seeds is not None:
            generator = [make(each) for each in seeds]
        used = fresh_seed() if one is None and generator is None else one
        self.seed: int | list[int] | None = seeds or (used if named else one)
        self._shape = shape
        if isinstance(generator, list | tuple):
            if len(generator) != shape[0]:
                raise OptionError(
                    f"{len(generator)} {'generators' if seeds is None else 'seeds'}",
                    f"one for each of {shape[0]} images",
                    "pass as many as images",
                )
            self._generators = list(generator)
        else:
            self._generators = [generator if generator is not None else make(used or 0)]
        self.generator = self._generators if len(self._generators) > 1 else self._generators[0]
        for each in self._generators:
            _require_generator(each)

    def sample(self) -> npt.NDArray[np.float32]:
        """Return fresh noise (B,C,H,W)."""
        if len(self._generators) == 1:
            return _sample(self._generators[0], self._shape)
        return self._one_each(self._generators)

    def posterior(self, images: int, *, each_row: bool) -> npt.NDArray[np.float32]:
        """Return the noise that samples the latents of `images` images, repeated to (B,C,H,W).

        Source: `prepare_latents` of diffusers' image-to-image pipelines and `_encode_vae_image` of its inpainting
        pipelines. A single generator samples noise for each distinct image.

        Args:
            images: number N of distinct images, which divides B.
            each_row: whether several generators sample noise for one row of the batch each, as in image to image. In
                inpainting, the first N generators sample noise for one image each.
        """
        if len(self._generators) == 1:
            sampled = _sample(self._generators[0], (images, *self._shape[1:]))
        else:
            sampled = self._one_each(self._generators if each_row else self._generators[:images])
        return np.concatenate([sampled] * (self._shape[0] // len(sampled)))

    def _one_each(self, generators: Sequence[Generator]) -> npt.NDArray[np.float32]:
        return np.concatenate([_sample(generator, (1, *self._shape[1:])) for generator in generators])


def _require_generator(generator: Generator) -> None:
    if isinstance(generator, TorchCpuGenerator):
        return
    torch = sys.modules.get("torch")  # a caller with a torch.Generator has imported torch
    if torch is None or not isinstance(generator, torch.Generator):
        raise OptionError(f"the generator is a {type(generator).__name__}", "a torch.Generator", "pass one, or a seed")


def _sample(generator: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if isinstance(generator, TorchCpuGenerator):
        return generator.randn(shape)
    torch = sys.modules["torch"]
    sampled = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return np.asarray(sampled.cpu().numpy(), np.float32)
