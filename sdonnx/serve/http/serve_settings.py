"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sdonnx.errors import OptionError

__all__ = ["ServeSettings", "read_api_keys"]


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
