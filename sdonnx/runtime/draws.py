"""The noise of one image or batch: drawn in the order in which diffusers' pipelines draw it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.runtime.noise import TorchCpuGenerator, fresh_seed

__all__ = ["Draws", "Generator"]

Generator = Any
"""A torch.Generator, a TorchCpuGenerator, or a list with one for each image."""


class Draws:
    """Where the noise of one call comes from.

    Args:
        shape: (B,C,H,W) of the latents.
        seed: a number; None with `generator` None draws a fresh one.
        generator: a generator, or one for each image.
        named: whether the seed alone decides the images, so that it is worth telling.
        make: makes a generator of a seed.

    Attributes:
        seed: what decides the images, None where the caller gave a generator or latents.
        generator: what was given, or made of the seed.

    Raises:
        OptionError: there are a seed and a generator, or generators that do not suit.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        seed: int | None,
        generator: Generator | None,
        *,
        named: bool,
        make: Callable[[int], Generator] = TorchCpuGenerator,
    ) -> None:
        if seed is not None and generator is not None:
            raise OptionError("both a seed and a generator", "one of them", "leave one out")
        # Samplers that add noise need some even where the caller gave the latents.
        drawn = fresh_seed() if seed is None and generator is None else seed
        self.seed = drawn if named else seed
        self._shape = shape
        if isinstance(generator, list | tuple):
            if len(generator) != shape[0]:
                raise OptionError(
                    f"{len(generator)} generators", f"one for each of {shape[0]} images", "pass as many as images"
                )
            self._generators = list(generator)
        else:
            self._generators = [generator if generator is not None else make(drawn or 0)]
        self.generator = self._generators if len(self._generators) > 1 else self._generators[0]
        for each in self._generators:
            _require_generator(each)

    def noise(self) -> npt.NDArray[np.float32]:
        """Return fresh noise (B,C,H,W)."""
        if len(self._generators) == 1:
            return _draw(self._generators[0], self._shape)
        return np.concatenate([_draw(generator, (1, *self._shape[1:])) for generator in self._generators])

    def posterior(self, images: int) -> npt.NDArray[np.float32]:
        """Return the noise that draws the latents of `images` images, repeated to (B,C,H,W).

        Source: `retrieve_latents` in diffusers' image-to-image pipeline. One generator draws for the images that
        there are; several draw one each.
        """
        if len(self._generators) > 1:
            return self.noise()
        drawn = _draw(self._generators[0], (images, *self._shape[1:]))
        return np.concatenate([drawn] * (self._shape[0] // images))


def _require_generator(generator: Generator) -> None:
    if isinstance(generator, TorchCpuGenerator):
        return
    torch = sys.modules.get("torch")  # whoever passes a torch.Generator has imported it
    if torch is None or not isinstance(generator, torch.Generator):
        raise OptionError(f"the generator is a {type(generator).__name__}", "a torch.Generator", "pass one, or a seed")


def _draw(generator: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if isinstance(generator, TorchCpuGenerator):
        return generator.randn(shape)
    torch = sys.modules["torch"]
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return np.asarray(drawn.cpu().numpy(), np.float32)
