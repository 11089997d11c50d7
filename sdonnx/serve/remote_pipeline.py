"""Requests that replicas in other processes serve: each is sent again if its replica is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdonnx.errors import OptionError, QueueFullError, SdonnxError, UnavailableError
from sdonnx.runtime.sampling.noise import fresh_seed
from sdonnx.serve.async_pipeline import AsyncPipeline
from sdonnx.serve.image_request import ImageRequest
from sdonnx.serve.image_service import GeneratedImages, ServeObserver, StepProgress
from sdonnx.serve.serve_settings import ServeLimits

__all__ = ["Accepted", "RemoteEvent", "RemotePipeline", "replica_events"]

_LOG = logging.getLogger("sdonnx")

_ANSWER_S = 2.0  # for a replica to say which inputs it accepts
_TRIES = 6
_PAUSE_S = 0.1  # before the second try; doubled for each further one


@dataclass(frozen=True)
class Accepted:
    """The first event of a request: the size of its images."""

    height: int
    width: int


RemoteEvent = Accepted | StepProgress | GeneratedImages | SdonnxError
"""Events of a request, in order: Accepted, any number of StepProgress, and GeneratedImages; or an error at any time."""


async def replica_events(pipeline: AsyncPipeline, request: ImageRequest) -> AsyncIterator[RemoteEvent]:
    """Yield the events of a request in the process that serves it; the request ends if the iteration does.

    Errors are events, since they have to reach another process unchanged.
    """
    try:
        job = pipeline.submit(request)
    except SdonnxError as error:
        yield error
        return
    try:
        yield Accepted(*job.size)
        async for progress in job.progress():
            yield progress
        yield await job
    except SdonnxError as error:
        yield error
    finally:
        job.cancel()  # without effect once it has ended


class RemoteJob:
    """A request that a replica serves. Await it for its images.

    Args:
        model: name of the model.
        request: the request, with a seed: each try generates the same images.
        call: sends the request and yields its events.
        is_lost: returns whether an exception means that the replica is lost.
        observer: receives the end of the request.
    """

    def __init__(
        self,
        model: str,
        request: ImageRequest,
        call: Callable[[ImageRequest], AsyncIterator[RemoteEvent]],
        is_lost: Callable[[Exception], bool],
        observer: ServeObserver,
    ) -> None:
        self.model, self.num_images = model, request.num_images
        self._request, self._call, self._is_lost, self._observer = request, call, is_lost, observer
        self._size: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._events: asyncio.Queue[StepProgress | None] = asyncio.Queue()
        self._steps: dict[int, int] = {}  # image -> last step that was reported
        self._started = time.monotonic()
        self.task = asyncio.create_task(self._run())

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        accepted = self._size.result()
        return accepted.height, accepted.width

    def __await__(self) -> Generator[Any, None, GeneratedImages]:
        """Return the images."""
        return self.task.__await__()

    async def accepted(self) -> None:
        """Wait until a replica has accepted the request, or raise its error."""
        either: set[asyncio.Future[Any]] = {self.task, self._size}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._size.done():
            self.task.result()

    async def progress(self) -> AsyncIterator[StepProgress]:
        """Iterate over the steps of all images as they are done; those that a second try repeats are left out."""
        while (event := await self._events.get()) is not None:
            yield event

    def cancel(self) -> None:
        """End the request."""
        self.task.cancel()

    async def _run(self) -> GeneratedImages:
        outcome = "failed"
        try:
            result = await self._with_tries()
            outcome = "completed"
            return result
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except (QueueFullError, UnavailableError):
            raise
        except SdonnxError:
            outcome = "refused"
            raise
        finally:
            self._events.put_nowait(None)
            self._observer.request_ended(self.model, outcome, time.monotonic() - self._started)

    async def _with_tries(self) -> GeneratedImages:
        reason = ""
        for number in range(_TRIES):
            if number:
                await asyncio.sleep(_PAUSE_S * 2 ** (number - 1))
            try:
                return await self._try()
            except UnavailableError as error:  # the replica stops or has failed; another one may work
                reason = error.found
            except Exception as error:
                if not self._is_lost(error):
                    raise
                reason = f"its replica was lost, {type(error).__name__}"
        raise UnavailableError(
            f"the request failed {_TRIES} times ({reason})", "a replica that works", "try again later"
        )

    async def _try(self) -> GeneratedImages:
        async for event in self._call(self._request):
            if isinstance(event, SdonnxError):
                raise event
            if isinstance(event, GeneratedImages):
                return event
            if isinstance(event, Accepted):
                if not self._size.done():
                    self._size.set_result(event)
            elif event.step > self._steps.get(event.index, 0):
                self._steps[event.index] = event.step
                self._events.put_nowait(event)
        raise UnavailableError("the replica ended without images", "images", "try again")


class RemotePipeline:
    """Pipelines in other processes, with the interface of `AsyncPipeline` that the HTTP server uses.

    Args:
        calls: for each model, a function that sends a request and yields its events.
        is_lost: returns whether an exception of such a function means that the replica is lost.
        limits: limits of requests, which the replicas check.
        observer: receives the ends of requests.
        loras: names of the LoRAs that the replicas serve.
        ask_inputs: for each model, a function that asks a replica for `AsyncPipeline.inputs`.
    """

    batch_age_s = 0.0
    """Replicas check their own batches."""

    failure: str | None = None
    """Replicas that fail are replaced."""

    def __init__(
        self,
        calls: Mapping[str, Callable[[ImageRequest], AsyncIterator[RemoteEvent]]],
        is_lost: Callable[[Exception], bool],
        limits: ServeLimits,
        observer: ServeObserver,
        loras: Sequence[str] = (),
        ask_inputs: Mapping[str, Callable[[], Awaitable[list[str]]]] | None = None,
    ) -> None:
        self.loras, self._ask_inputs = list(loras), ask_inputs or {}
        self._calls, self._is_lost, self.limits, self.observer = calls, is_lost, limits, observer
        self._jobs: set[asyncio.Task[GeneratedImages]] = set()

    @property
    def models(self) -> list[str]:
        """Names of the models, the default one first."""
        return list(self._calls)

    async def known_inputs(self, model: str) -> list[str] | None:
        """Ask a replica, since the folders may be on other machines; None if none answers within 2 s.

        Answers are not kept: replicas of another folder may replace them.
        """
        if model not in self._ask_inputs:
            return None
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._ask_inputs[model]()
        except Exception as error:
            _LOG.warning("the inputs of %s are not known: no replica answers (%s)", model, type(error).__name__)
            return None

    @property
    def waiting(self) -> int:
        """0: the replicas have the queues."""
        return 0

    async def accept(self, request: ImageRequest) -> RemoteJob:
        """Send a request to a replica, and return it once it is accepted."""
        model = self.models[0] if request.model is None else request.model
        if model not in self._calls:
            raise OptionError(f"the model {model!r} is unknown", f"one of {self.models}")
        if request.seed is None:
            request = replace(request, seed=fresh_seed())
        job = RemoteJob(model, request, self._calls[model], self._is_lost, self.observer)
        self._jobs.add(job.task)
        job.task.add_done_callback(self._jobs.discard)
        try:
            await job.accepted()
        except BaseException:
            job.cancel()
            raise
        return job

    async def aclose(self, *, finish: bool = True) -> None:
        """Wait for the requests that run, or cancel them."""
        for job in () if finish else self._jobs:
            job.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs)
