"""Run the HTTP server in a thread of the test's process, wait for conditions, and record events of the queue."""

from __future__ import annotations

import base64
import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from sdonnx import AsyncPipeline, ServeLimits
from sdonnx.serve.http.application import create_app
from sdonnx.serve.http.http_server import Server, bind
from sdonnx.serve.image_request import BatchKey
from sdonnx.serve.image_service import ServeObserver
from sdonnx.serve.prometheus_metrics import PrometheusMetrics
from sdonnx.serve.serve_settings import ServeSettings

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Running:
    """A server that runs in this process.

    Attributes:
        url: its address.
        port: its port.
        pipeline: the queue behind it.
        client: a client of its address.
    """

    url: str
    port: int
    pipeline: AsyncPipeline
    client: httpx.Client

    def value(self, name: str, **labels: str) -> float:
        """Return a value of /metrics, 0 if there is none yet."""
        lines = self.client.get("/metrics").text.splitlines()
        for line in lines:
            if line.startswith(name + ("{" if labels else " ")) and all(
                f'{label}="{value}"' in line for label, value in labels.items()
            ):
                return float(line.rpartition(" ")[2])
        return 0.0

    def post(self, **fields: Any) -> httpx.Response:
        """Ask for images."""
        return self.client.post("/v1/images/generations", json={"prompt": "a red circle", **fields})


@contextlib.contextmanager
def serving(pipeline: AsyncPipeline, metrics: PrometheusMetrics, settings: ServeSettings) -> Iterator[Running]:
    """Serve a pipeline; it is closed at the end."""
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    server = Server(create_app(pipeline, metrics, settings), partial(pipeline.aclose, finish=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: server.started)
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
            yield Running(url, port, pipeline, client)
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
        bound.close()
    assert not thread.is_alive()


@contextlib.contextmanager
def serving_folder(
    folder: Path, limits: ServeLimits | None = None, settings: ServeSettings | None = None
) -> Iterator[Running]:
    """Load a folder as the model `shapes` and serve it."""
    metrics = PrometheusMetrics()
    pipeline = AsyncPipeline.from_pretrained({"shapes": folder}, limits=limits, observer=metrics)
    with serving(pipeline, metrics, settings or ServeSettings()) as running:
        yield running


def until(condition: Callable[[], Any], seconds: float = TIMEOUT_S) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: it is not in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


class Recorder(ServeObserver):
    """Keeps the events of a queue: keys and sizes of batches, outcomes of requests, changes of LoRAs and captures."""

    def __init__(self) -> None:
        self.keys: list[BatchKey] = []
        self.batches: list[int] = []
        self.steps = 0
        self.outcomes: list[str] = []
        self.changes: list[float] = []
        self.shapes: list[int] = []
        self.pending: list[int] = []

    def batch_started(self, key: BatchKey, queue_s: list[float]) -> None:
        self.keys.append(key)
        self.batches.append(len(queue_s))

    def stepped(self, key: BatchKey, images: int) -> None:
        self.steps += 1

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:
        self.outcomes.append(outcome)

    def loras_changed(self, model: str, seconds: float) -> None:
        self.changes.append(seconds)

    def captured(self, model: str, shapes: int, size_bytes: int, free_bytes: int | None) -> None:
        self.shapes.append(shapes)

    def captures_pending(self, shapes: int) -> None:
        self.pending.append(shapes)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the content of an image's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def opened(text: str | None) -> Image.Image:
    """Return the image of an answer, a file in base64."""
    image = Image.open(io.BytesIO(base64.b64decode(text or "")))
    image.load()
    return image
