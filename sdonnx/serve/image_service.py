"""What the HTTP server needs of the queue behind it, which may be in this process or on other machines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import Any, Protocol

from sdonnx.serve.image_job import GeneratedImages, StepProgress
from sdonnx.serve.image_request import ImageRequest
from sdonnx.serve.serve_limits import ServeLimits
from sdonnx.serve.serve_observer import ServeObserver

__all__ = ["ImageService", "ServiceJob"]


class ServiceJob(Protocol):
    """A request that was accepted; await it for its images."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        ...

    @property
    def num_images(self) -> int:
        """Number of images."""
        ...

    def __await__(self) -> Generator[Any, None, GeneratedImages]:
        """Return the images."""
        ...

    def progress(self) -> AsyncIterator[StepProgress]:
        """Iterate over the steps of all images as they are done."""
        ...

    def cancel(self) -> None:
        """End the request."""
        ...


class ImageService(Protocol):
    """A queue for requests.

    Attributes:
        limits: limits of the queue and of requests.
        observer: receives events.
    """

    limits: ServeLimits
    observer: ServeObserver

    @property
    def models(self) -> list[str]:
        """Names of the models, the default one first."""
        ...

    @property
    def loras(self) -> list[str]:
        """Names of the LoRAs that requests may use."""
        ...

    async def known_inputs(self, model: str) -> list[str] | None:
        """Return the fields for images next to the prompt that a model accepts; None if they are not known."""
        ...

    @property
    def waiting(self) -> int:
        """Number of images that wait."""
        ...

    @property
    def batch_age_s(self) -> float:
        """Seconds since the current batch started or made its last step; 0 if there is none."""
        ...

    @property
    def failure(self) -> str | None:
        """Reason why no images can be generated any more; None if they can."""
        ...

    async def accept(self, request: ImageRequest) -> ServiceJob:
        """Queue a request and return it; raise the same errors as `AsyncPipeline.submit`."""
        ...

    async def aclose(self, *, finish: bool = True) -> None:
        """Finish accepted requests or end them with UnavailableError, and release the pipelines."""
        ...
