"""Metrics of a server for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from sdonnx.serve.image_request import BatchKey
from sdonnx.serve.image_service import ServeObserver

__all__ = ["PrometheusMetrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_IMAGES = (1, 2, 3, 4, 6, 8, 12, 16, 32)


class PrometheusMetrics(ServeObserver):
    """Counts the events of a server.

    Attributes:
        registry: the registry of its metrics and of the process's metrics.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        model, stage = ["model"], ["model", "stage"]
        self._waiting = Gauge("sdonnx_queue_images", "Images that wait", registry=registry)
        self._queue_s = Histogram(
            "sdonnx_queue_seconds", "Time that an image waits for its batch", model, registry=registry, buckets=_SECONDS
        )
        self._batch = Histogram("sdonnx_batch_images", "Images of a batch", model, registry=registry, buckets=_IMAGES)
        self._stages = Histogram(
            "sdonnx_stage_seconds", "Time of a stage of a batch or a file", stage, registry=registry, buckets=_SECONDS
        )
        self._requests = Counter("sdonnx_requests_total", "Ended requests", ["model", "outcome"], registry=registry)
        self._request_s = Histogram(
            "sdonnx_request_seconds", "Time of a completed request", model, registry=registry, buckets=_SECONDS
        )
        self._steps = Counter("sdonnx_steps_total", "Calls of the denoiser", model, registry=registry)
        self._image_steps = Counter(
            "sdonnx_image_steps_total", "Calls of the denoiser times images", model, registry=registry
        )
        self._shapes = Gauge("sdonnx_captured_shapes", "Shapes with captured graphs", model, registry=registry)
        self._pending = Gauge("sdonnx_pending_captures", "Shapes to capture in the background", registry=registry)
        self._buffers = Gauge("sdonnx_captured_bytes", "Buffers of captured shapes", model, registry=registry)
        self._free = Gauge("sdonnx_device_free_bytes", "Free memory of the GPU", registry=registry)
        self._loras = Histogram(
            "sdonnx_lora_change_seconds", "Time of a change of LoRAs", model, registry=registry, buckets=_SECONDS
        )
        self._responses = Counter(
            "sdonnx_http_responses_total", "HTTP responses", ["path", "status"], registry=registry
        )

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def responded(self, path: str, status: int) -> None:
        """Note an HTTP response; `path` is the route's path, so that there are few."""
        self._responses.labels(path, str(status)).inc()

    def queued(self, images: int) -> None:  # noqa: D102  the base class says it
        self._waiting.set(images)

    def batch_started(self, key: BatchKey, queue_s: list[float]) -> None:  # noqa: D102
        self._batch.labels(key.model).observe(len(queue_s))
        for seconds in queue_s:
            self._queue_s.labels(key.model).observe(seconds)

    def stepped(self, key: BatchKey, images: int) -> None:  # noqa: D102
        self._steps.labels(key.model).inc()
        self._image_steps.labels(key.model).inc(images)

    def stage_ended(self, model: str, stage: str, seconds: float) -> None:  # noqa: D102
        self._stages.labels(model, stage).observe(seconds)

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:  # noqa: D102
        self._requests.labels(model, outcome).inc()
        if outcome == "completed":
            self._request_s.labels(model).observe(seconds)

    def loras_changed(self, model: str, seconds: float) -> None:  # noqa: D102
        self._loras.labels(model).observe(seconds)

    def captures_pending(self, shapes: int) -> None:  # noqa: D102
        self._pending.set(shapes)

    def captured(self, model: str, shapes: int, size_bytes: int, free_bytes: int | None) -> None:  # noqa: D102
        self._shapes.labels(model).set(shapes)
        self._buffers.labels(model).set(size_bytes)
        if free_bytes is not None:
            self._free.set(free_bytes)
