"""Metrics of a replica, which Ray exports for Prometheus under the prefix `ray_`."""

from __future__ import annotations

from sdonnx.installation import requiring
from sdonnx.serve.image_request import BatchKey
from sdonnx.serve.serve_observer import ServeObserver

with requiring("sdonnx.serve.ray", "ray"):
    from ray.util.metrics import Counter, Gauge, Histogram

__all__ = ["RayMetrics"]

_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250]
_IMAGES = [1, 2, 4, 8, 16, 32]


class RayMetrics(ServeObserver):
    """Counts the events of a replica."""

    def __init__(self) -> None:
        model = ("model",)
        self._waiting = Gauge("sdonnx_queue_images", description="Images that wait")
        self._queue_s = Histogram("sdonnx_queue_seconds", boundaries=_SECONDS, tag_keys=model)
        self._batch = Histogram("sdonnx_batch_images", boundaries=_IMAGES, tag_keys=model)
        self._stages = Histogram("sdonnx_stage_seconds", boundaries=_SECONDS, tag_keys=("model", "stage"))
        self._requests = Counter("sdonnx_replica_requests_total", tag_keys=("model", "outcome"))
        self._image_steps = Counter("sdonnx_image_steps_total", tag_keys=model)
        self._loras = Histogram("sdonnx_lora_change_seconds", boundaries=_SECONDS, tag_keys=model)
        self._shapes = Gauge("sdonnx_captured_shapes", tag_keys=model)
        self._pending = Gauge("sdonnx_pending_captures", description="Shapes to capture in the background")
        self._free = Gauge("sdonnx_device_free_bytes", description="Free memory of the GPU")

    def queued(self, images: int) -> None:  # noqa: D102  the base class says it
        self._waiting.set(images)

    def batch_started(self, key: BatchKey, queue_s: list[float]) -> None:  # noqa: D102
        tags = {"model": key.model}
        self._batch.observe(len(queue_s), tags=tags)
        for seconds in queue_s:
            self._queue_s.observe(seconds, tags=tags)

    def stepped(self, key: BatchKey, images: int) -> None:  # noqa: D102
        self._image_steps.inc(images, tags={"model": key.model})

    def stage_ended(self, model: str, stage: str, seconds: float) -> None:  # noqa: D102
        self._stages.observe(seconds, tags={"model": model, "stage": stage})

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:  # noqa: D102
        self._requests.inc(1, tags={"model": model, "outcome": outcome})

    def loras_changed(self, model: str, seconds: float) -> None:  # noqa: D102
        self._loras.observe(seconds, tags={"model": model})

    def captures_pending(self, shapes: int) -> None:  # noqa: D102
        self._pending.set(shapes)

    def captured(self, model: str, shapes: int, size_bytes: int, free_bytes: int | None) -> None:  # noqa: D102
        self._shapes.set(shapes, tags={"model": model})
        if free_bytes is not None:
            self._free.set(free_bytes)
