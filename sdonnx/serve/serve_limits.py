"""Limits of a server, which hold before anything of a request's size is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sdonnx.errors import OptionError

__all__ = ["ServeLimits"]

_MAX_PIXELS = 2048 * 2048
_MAX_ENLARGEMENT = 4  # of a model's own area on a CPU, which takes minutes for a step of 2048x2048


@dataclass(frozen=True)
class ServeLimits:
    """Limits of the queue and of each request.

    Attributes:
        max_batch_size: maximum number of images that are generated at once.
        max_batch_pixels: maximum height times width of all images of a batch; a larger single image is a batch.
        batch_wait_ms: milliseconds that a request may wait for others to fill its batch.
        max_waiting: maximum number of images that wait.
        max_wait_s: seconds after which a request that has not started is refused.
        max_images: maximum number of images of a request.
        max_pixels: maximum height times width of an image. None for 2048x2048 on a GPU, and on a CPU for four times
            the area of the models' own size, if that is less.
        max_edge: maximum height and width of an image.
        max_steps: maximum number of denoising steps.
        max_prompt: maximum number of characters of a prompt.
    """

    max_batch_size: int = 4
    max_batch_pixels: int = 4 * 1024 * 1024
    batch_wait_ms: float = 2.0
    max_waiting: int = 64
    max_wait_s: float = 300.0
    max_images: int = 10
    max_pixels: int | None = None
    max_edge: int = 8192
    max_steps: int = 150
    max_prompt: int = 4000

    def __post_init__(self) -> None:
        """Raise OptionError if a limit cannot be used."""
        for name, value in vars(self).items():
            if name == "max_pixels" and value is None:
                continue
            minimum = 0 if name == "batch_wait_ms" else 1
            if isinstance(value, bool) or not minimum <= value < float("inf"):
                raise OptionError(f"{name} is {value!r}", f"a number from {minimum} on")

    @property
    def pixel_limit(self) -> int:
        """Maximum height times width of an image."""
        return _MAX_PIXELS if self.max_pixels is None else self.max_pixels

    def on_cpu(self, edge: int) -> ServeLimits:
        """Return the limits for models on a CPU.

        Args:
            edge: largest default height and width of the models in pixels.
        """
        return replace(self, max_pixels=self.max_pixels or min(_MAX_PIXELS, _MAX_ENLARGEMENT * edge**2))

    def check_size(self, height: int, width: int) -> None:
        """Check the size of an image.

        Args:
            height: height in pixels, at least 1.
            width: width in pixels, at least 1.

        Raises:
            OptionError: the image has more than `pixel_limit` pixels, or an edge of more than `max_edge`.
        """
        found = f"an image of {width}x{height} pixels"
        if height * width > self.pixel_limit:
            raise OptionError(found, f"at most {self.pixel_limit} pixels (max_pixels)")
        if max(height, width) > self.max_edge:  # images are resized in two passes, with a large one between
            raise OptionError(found, f"edges of at most {self.max_edge} pixels", "ask for another shape")

    def batch_sizes(self, pixels: int = 1) -> list[int]:
        """Return the numbers of images that a batch may have: powers of two and the maximum.

        Few sizes, since each is captured once and keeps its buffers.

        Args:
            pixels: height times width of one image.
        """
        largest = max(1, min(self.max_batch_size, self.max_batch_pixels // pixels))
        powers = [2**exponent for exponent in range(largest.bit_length()) if 2**exponent < largest]
        return [*powers, largest]
