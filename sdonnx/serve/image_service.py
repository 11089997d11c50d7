"""Accepted requests, and the queue behind the HTTP server, which may be in this process or on other machines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sdonnx.errors import SdonnxError
from sdonnx.serve.image_request import BatchKey, ImageRequest, PlannedRequest
from sdonnx.serve.serve_settings import ServeLimits

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["GeneratedImages", "ImageJob", "ImageService", "ServeObserver", "ServiceJob", "StepProgress"]


class ServeObserver:
    """Receives the events of a server; every method may be called by any thread, and does nothing here."""

    def queued(self, images: int) -> None:
        """Note the number of images that wait."""

    def batch_started(self, key: BatchKey, queue_s: list[float]) -> None:
        """Note a batch.

        Args:
            key: its key.
            queue_s: seconds that each of its images waited.
        """

    def stepped(self, key: BatchKey, images: int) -> None:
        """Note a call of the denoiser for a number of images."""

    def stage_ended(self, model: str, stage: str, seconds: float) -> None:
        """Note the time of a stage: "denoise" (text encoders and steps), "decode" or "encode_file"."""

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:
        """Note the end of a request.

        Args:
            model: name of the model.
            outcome: "completed", "cancelled", "refused" (its arguments), "expired" or "failed".
            seconds: time since it was accepted.
        """

    def loras_changed(self, model: str, seconds: float) -> None:
        """Note a change of a model's LoRAs, and the seconds that it took to read them and to compute the weights."""

    def captures_pending(self, shapes: int) -> None:
        """Note the number of shapes that are still to be captured in the background."""

    def captured(self, model: str, shapes: int, size_bytes: int, free_bytes: int | None) -> None:
        """Note the captured shapes of a model, their bytes, and the device's free memory; None on a CPU."""


@dataclass(frozen=True)
class StepProgress:
    """Progress of one image.

    Attributes:
        index: number of the image in its request, from 0.
        step: number of calls of the denoiser that are done.
        steps: number of all calls.
        preview: the image so far, at the steps for which previews were requested.
    """

    index: int
    step: int
    steps: int
    preview: Image.Image | None = None


@dataclass(frozen=True)
class GeneratedImages:
    """Images of a request.

    Attributes:
        images: PIL images or arrays, see `ImageRequest.output_type`.
        seeds: the seed of each image.
        flagged: for each image whether the safety checker flagged it, in which case it is black; None if none ran.
        queue_s: seconds from the request to the start of its first batch.
        total_s: seconds from the request to its last image.
    """

    images: list[Any]
    seeds: list[int]
    flagged: list[bool] | None
    queue_s: float
    total_s: float


class ImageJob:
    """A request that was accepted. Await it for its images.

    Create it in the event loop that awaits it. Methods that start with an underscore are for the worker's thread.

    Args:
        planned: the request.
        on_cancel: called once when the request is cancelled.

    Attributes:
        planned: the request, with the model's defaults.
    """

    def __init__(self, planned: PlannedRequest, on_cancel: Callable[[ImageJob], None]) -> None:
        self.planned = planned
        self._on_cancel = on_cancel
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[GeneratedImages] = self._loop.create_future()
        self._events: asyncio.Queue[StepProgress | None] = asyncio.Queue()
        self._lock = threading.Lock()
        self._accepted, self._started = time.monotonic(), 0.0
        count = planned.request.num_images
        self._images: list[Any] = [None] * count
        self._flags: list[bool | None] = [None] * count
        self._taken = self._done = 0
        self._ended = False

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.planned.key.model

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        return self.planned.key.height, self.planned.key.width

    @property
    def num_images(self) -> int:
        """Number of images."""
        return self.planned.request.num_images

    @property
    def seeds(self) -> list[int]:
        """The seed of each image."""
        return [self.planned.seed + index for index in range(self.planned.request.num_images)]

    @property
    def has_ended(self) -> bool:
        """Whether the images are there, or will not be."""
        return self._ended

    @property
    def has_started(self) -> bool:
        """Whether the first batch of the request has started."""
        return self._taken > 0

    @property
    def age_s(self) -> float:
        """Seconds since the request was accepted."""
        return time.monotonic() - self._accepted

    def __await__(self) -> Generator[Any, None, GeneratedImages]:
        """Return the images.

        Raises:
            SdonnxError: the request could not be served.
            asyncio.CancelledError: it was cancelled.
        """
        return self._result().__await__()

    async def progress(self) -> AsyncIterator[StepProgress]:
        """Iterate over the steps of all images as they are done; the iteration ends with the request."""
        while (event := await self._events.get()) is not None:
            yield event

    def cancel(self) -> None:
        """End the request. The device stops after the current step if no other request needs its batch."""
        if self._end():
            self._on_cancel(self)
            self._loop.call_soon_threadsafe(self._close, None, asyncio.CancelledError())

    async def _result(self) -> GeneratedImages:
        try:
            return await asyncio.shield(self._future)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _take(self) -> tuple[int, float]:
        """Return the number of the next image that starts, and the seconds that it has waited."""
        with self._lock:
            index = self._taken
            self._taken += 1
            if index == 0:
                self._started = time.monotonic()
            return index, self.age_s

    def _report(self, progress: StepProgress) -> None:
        self._post(self._events.put_nowait, progress)

    def _keep(self, index: int, image: Any, flagged: bool | None) -> bool:
        """Keep an image; return whether it was the last one, after which `_complete` has to be called."""
        with self._lock:
            self._images[index], self._flags[index] = image, flagged
            self._done += 1
            if self._done < len(self._images) or self._ended:
                return False
            self._ended = True
        return True

    def _complete(self) -> None:
        """Give the images to those who await them."""
        flags = None if None in self._flags else [bool(flag) for flag in self._flags]
        waited = self._started - self._accepted
        self._post(self._close, GeneratedImages(self._images, self.seeds, flags, waited, self.age_s), None)

    def _fail(self, error: SdonnxError) -> bool:
        """End the request with an error; return whether it had not ended yet."""
        if not self._end():
            return False
        self._post(self._close, None, error)
        return True

    def _end(self) -> bool:
        with self._lock:
            ended, self._ended = self._ended, True
        return not ended

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():  # the caller's program may have ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _close(self, result: GeneratedImages | None, error: BaseException | None) -> None:
        self._events.put_nowait(None)
        if self._future.done():
            return
        if isinstance(error, asyncio.CancelledError):
            self._future.cancel()
        elif error is not None:
            self._future.set_exception(error)
            self._future.exception()  # nobody has to await a request
        elif result is not None:
            self._future.set_result(result)


class ServiceJob(Protocol):
    """A request that was accepted; await it for its images."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""

    @property
    def num_images(self) -> int:
        """Number of images."""

    def __await__(self) -> Generator[Any, None, GeneratedImages]:
        """Return the images."""

    def progress(self) -> AsyncIterator[StepProgress]:
        """Iterate over the steps of all images as they are done."""

    def cancel(self) -> None:
        """End the request."""


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

    @property
    def loras(self) -> list[str]:
        """Names of the LoRAs that requests may use."""

    async def known_inputs(self, model: str) -> list[str] | None:
        """Return the fields for images next to the prompt that a model accepts; None if they are not known."""

    @property
    def waiting(self) -> int:
        """Number of images that wait."""

    @property
    def batch_age_s(self) -> float:
        """Seconds since the current batch started or made its last step; 0 if there is none."""

    @property
    def failure(self) -> str | None:
        """Reason why no images can be generated any more; None if they can."""

    async def accept(self, request: ImageRequest) -> ServiceJob:
        """Queue a request and return it; raise the same errors as `AsyncPipeline.submit`."""

    async def aclose(self, *, finish: bool = True) -> None:
        """Finish accepted requests or end them with UnavailableError, and release the pipelines."""
