"""Settings of a server: limits, which hold before anything of a request's size is allocated, and the HTTP server's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sdonnx.errors import OptionError

__all__ = ["ServeLimits", "ServeSettings", "read_api_keys"]

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


_MAX_BODIES = 8  # of the largest size, in progress at the same time


@dataclass(frozen=True)
class ServeSettings:
    """Settings of the HTTP server.

    Attributes:
        api_keys: keys of which a request to /v1 has to name one; empty for no keys.
        max_body_bytes: maximum size of a request's body.
        body_timeout_s: seconds in which a body has to arrive.
        max_requests: maximum number of requests in progress, except for health and metrics.
        max_upload_pixels: maximum height times width of an uploaded image.
        max_batch_s: seconds without a step after which a batch counts as hanging, and the server as not alive.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 1024 * 1024
    body_timeout_s: float = 60.0
    max_requests: int = 1000
    max_upload_pixels: int = 4096 * 4096
    max_batch_s: float = 600.0

    @property
    def max_bodies_bytes(self) -> int:
        """Maximum size of the bodies of all requests in progress."""
        return _MAX_BODIES * self.max_body_bytes


def read_api_keys(file: Path | None, variable: str | None) -> tuple[str, ...]:
    """Return the API keys of a file, one a line, and of the value of an environment variable, separated by commas.

    Raises:
        OptionError: the file cannot be read, or has no keys.
    """
    keys = [key.strip() for key in (variable or "").split(",")]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise OptionError(f"{file} cannot be read ({error})", "a file with a key a line") from error
        if not any(lines):
            raise OptionError(f"{file} has no keys", "a key a line", "write one into it")
        keys += lines
    return tuple(key for key in keys if key)
