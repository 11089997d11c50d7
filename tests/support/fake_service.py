"""A queue without pipelines, for tests of the HTTP server: images are white, and wait until the test lets them go."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from functools import partial
from typing import Any

from PIL import Image

from sdonnx import ImageRequest, ServeLimits
from sdonnx.errors import UnavailableError
from sdonnx.serve.http.application import create_app
from sdonnx.serve.http.http_server import Server, bind
from sdonnx.serve.image_service import GeneratedImages, ServeObserver, StepProgress
from sdonnx.serve.prometheus_metrics import PrometheusMetrics
from sdonnx.serve.serve_settings import ServeSettings
from support.serving import TIMEOUT_S, until


class FakeJob:
    """A request that ends when its service lets it."""

    def __init__(self, request: ImageRequest, going: asyncio.Event) -> None:
        self.model, self.size, self.num_images = "fake", (8, 8), request.num_images
        self._seed, self._going = request.seed or 0, going
        self.error: UnavailableError | None = None
        self.is_cancelled = False

    def __await__(self) -> Generator[Any, None, GeneratedImages]:
        return self._result().__await__()

    async def _result(self) -> GeneratedImages:
        await self._going.wait()
        if self.error is not None:
            raise self.error
        images = [Image.new("RGB", (8, 8), "white")] * self.num_images
        return GeneratedImages(images, [self._seed] * self.num_images, None, 0.0, 0.0)

    async def progress(self) -> AsyncIterator[StepProgress]:
        await self._going.wait()
        for step in () if self.error else (1,):
            yield StepProgress(0, step, 1)

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeService:
    """Accepts requests.

    Args:
        holds: whether images wait for `let_go`.

    Attributes:
        accepted: the requests, in order.
        jobs: their jobs.
    """

    def __init__(self, *, holds: bool = False) -> None:
        self.limits, self.observer = ServeLimits(), ServeObserver()
        self.models, self.loras = ["fake"], list[str]()
        self.waiting, self.batch_age_s, self.failure = 0, 0.0, None
        self.accepted: list[ImageRequest] = []
        self.jobs: list[FakeJob] = []
        self._holds, self._going = holds, asyncio.Event()

    async def known_inputs(self, model: str) -> list[str] | None:
        return None

    async def accept(self, request: ImageRequest) -> FakeJob:
        self.accepted.append(request)
        job = FakeJob(request, self._going)
        self.jobs.append(job)
        if not self._holds:
            self._going.set()
        return job

    async def aclose(self, *, finish: bool = True) -> None:
        for job in () if finish else self.jobs:
            job.error = UnavailableError("the server is stopping", "a server that runs", "try again on another one")
        self._going.set()


@contextlib.contextmanager
def serving_fake(
    service: FakeService, settings: ServeSettings | None = None, grace_s: float | None = None
) -> Iterator[tuple[Server, int]]:
    """Serve in a thread; yield the server and its port."""
    app = create_app(service, PrometheusMetrics(), settings or ServeSettings())
    server = Server(app, partial(service.aclose, finish=False), grace_s=grace_s)
    with contextlib.closing(bind("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            until(lambda: server.started)
            yield server, port
        finally:
            server.should_exit = True
            server.forced_by = server.forced_by or 2
            thread.join(TIMEOUT_S)
    assert not thread.is_alive()
