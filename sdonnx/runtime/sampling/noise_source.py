"""Noise of one call, sampled in the same order as in diffusers' pipelines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.runtime.sampling.noise import TorchCpuGenerator, fresh_seed

__all__ = ["Generator", "NoiseSource"]

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
