"""The server on Ray Serve: `sdonnx serve --ray`, or `serve run sdonnx.serve.ray:app folder=fast replicas=2`.

A deployment speaks HTTP, and one deployment for each model generates images: a pipeline for each replica, with a queue
of its own. The first one sends a request again if its replica is lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sdonnx.installation import requiring
from sdonnx.serve.async_pipeline import AsyncPipeline
from sdonnx.serve.image_request import BatchKey, ImageRequest
from sdonnx.serve.image_service import ServeObserver
from sdonnx.serve.remote_pipeline import RemoteEvent, RemotePipeline, replica_events
from sdonnx.serve.serve_settings import ServeLimits

with requiring("sdonnx serve --ray", "ray"):
    import ray
    from ray import serve
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import RayServeException
    from ray.util.metrics import Counter, Gauge, Histogram

    from sdonnx.serve.ray_proxy import CALLBACK_VARIABLE, RayOptions, middlewares

__all__ = ["Front", "Generator", "app", "serve_on_ray"]

KEYS_VARIABLE = "SDONNX_API_KEYS"

# Requests that a replica holds beyond its own queue: health checks, and the batch that runs.
_SPARE_REQUESTS = 64

_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250]
_IMAGES = [1, 2, 4, 8, 16, 32]


class RayMetrics(ServeObserver):
    """Counts the events of a replica, which Ray exports for Prometheus under the prefix `ray_`."""

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

    def queued(self, images: int) -> None:
        self._waiting.set(images)

    def batch_started(self, key: BatchKey, queue_s: list[float]) -> None:
        tags = {"model": key.model}
        self._batch.observe(len(queue_s), tags=tags)
        for seconds in queue_s:
            self._queue_s.observe(seconds, tags=tags)

    def stepped(self, key: BatchKey, images: int) -> None:
        self._image_steps.inc(images, tags={"model": key.model})

    def stage_ended(self, model: str, stage: str, seconds: float) -> None:
        self._stages.observe(seconds, tags={"model": model, "stage": stage})

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:
        self._requests.inc(1, tags={"model": model, "outcome": outcome})

    def loras_changed(self, model: str, seconds: float) -> None:
        self._loras.observe(seconds, tags={"model": model})

    def captures_pending(self, shapes: int) -> None:
        self._pending.set(shapes)

    def captured(self, model: str, shapes: int, size_bytes: int, free_bytes: int | None) -> None:
        self._shapes.set(shapes, tags={"model": model})
        if free_bytes is not None:
            self._free.set(free_bytes)


class Generator:
    """A replica: the pipeline of one model.

    Args:
        name: name of the model.
        folder: its folder, on the machine of the replica.
        provider: "cuda" or "cpu"; None for the folder's.
        limits: limits of the queue.
        max_batch_s: seconds after which a batch counts as hanging.
        loras: LoRA files by name, on the machine of the replica.
    """

    def __init__(
        self,
        name: str,
        folder: str,
        provider: str | None,
        limits: ServeLimits,
        max_batch_s: float,
        loras: Mapping[str, str],
    ) -> None:
        self._pipeline = AsyncPipeline.from_pretrained(
            {name: folder}, provider, limits=limits, observer=RayMetrics(), loras=loras
        )
        self._pipeline.warmup(background=True)
        self._max_batch_s = max_batch_s
        self._last_image = time.monotonic()

    async def generate(self, request: ImageRequest) -> AsyncIterator[RemoteEvent]:
        """Yield the events of a request."""
        async for event in replica_events(self._pipeline, request):
            self._last_image = time.monotonic()
            yield event

    async def inputs(self) -> list[str]:
        """Return the fields for images next to the prompt that the model accepts."""
        (model,) = self._pipeline.models
        return self._pipeline.inputs(model)

    async def check_health(self) -> None:
        """Generate an image of one step if the replica is idle; Ray replaces it if this raises or takes too long.

        Raises:
            RuntimeError: the pipeline has failed, or its batch hangs.
        """
        if self._pipeline.failure is not None:
            raise RuntimeError(self._pipeline.failure)
        if self._pipeline.batch_age_s > self._max_batch_s:
            raise RuntimeError(f"a batch runs for more than {self._max_batch_s:g} s")
        if self._pipeline.batch_age_s == 0 and self._pipeline.waiting == 0:
            await self._pipeline.check()

    async def __del__(self) -> None:
        """Finish accepted requests when the replica stops."""
        if hasattr(self, "_pipeline"):
            await self._pipeline.aclose()


@serve.ingress()
class Front:
    """The HTTP server; it has no pipeline.

    Args:
        handles: handles of the models' deployments, by name.
        limits: limits of the queues.
        loras: names of the LoRAs that the replicas serve.
    """

    def __init__(self, handles: Mapping[str, Any], limits: ServeLimits, loras: Sequence[str]) -> None:
        self._handles, self._limits, self._loras = handles, limits, loras

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application; called by Ray after the constructor."""
        from sdonnx.serve.http.application import create_app
        from sdonnx.serve.prometheus_metrics import PrometheusMetrics
        from sdonnx.serve.serve_settings import ServeSettings, read_api_keys

        metrics = PrometheusMetrics()
        calls = {name: partial(_events_of, handle) for name, handle in self._handles.items()}
        settings = ServeSettings(api_keys=read_api_keys(None, os.environ.get(KEYS_VARIABLE)))
        ask_inputs = {name: handle.inputs.remote for name, handle in self._handles.items()}
        pipeline = RemotePipeline(calls, _is_lost, self._limits, metrics, self._loras, ask_inputs)
        return create_app(pipeline, metrics, settings)


def app(args: Mapping[str, Any]) -> Any:
    """Return the application for `serve run` or for a configuration of `serve deploy`.

    Args:
        args: options, see `RayOptions`.

    Raises:
        OptionError: an option cannot be used.
    """
    options = RayOptions.read(args)
    limits, loras = options.limits(), options.loras()
    scaling: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scaling = {
            "autoscaling_config": {
                "min_replicas": options.replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": 2 * limits.max_batch_size,
            }
        }
    handles = {}
    for name, folder in options.folders().items():
        deployment = serve.deployment(
            name=f"sdonnx-{name}",
            max_ongoing_requests=limits.max_waiting + _SPARE_REQUESTS,
            ray_actor_options={"num_gpus": options.gpus_per_replica, "num_cpus": options.cpus_per_replica},
            health_check_period_s=options.health_period_s,
            graceful_shutdown_timeout_s=options.max_wait_s,
            **scaling,
        )(Generator)
        handles[name] = deployment.bind(name, folder, options.provider, limits, options.max_batch_s, loras)
    front = serve.deployment(
        name="sdonnx-http",
        num_replicas=options.front_replicas,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": _keys()}},
    )(Front)
    return front.bind(handles, limits, list(loras))


def serve_on_ray(
    options: Mapping[str, Any], *, host: str, port: int, address: str | None, on_ready: Callable[[], None]
) -> None:
    """Serve until SIGINT or SIGTERM; accepted requests are finished first.

    Args:
        options: options of the application, see `RayOptions`.
        host: address to listen on.
        port: port to listen on.
        address: address of a running cluster; None to start Ray on this machine, which ends with the command.
        on_ready: called once every replica is ready.

    Raises:
        OptionError: an option cannot be used.
    """
    application = app(options)
    # Read by the proxies; a running cluster has its own environment.
    os.environ.setdefault(CALLBACK_VARIABLE, f"{middlewares.__module__}.{middlewares.__name__}")
    stopping = threading.Event()
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    before = {number: signal.signal(number, lambda *_: stopping.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application, name="sdonnx", route_prefix="/")
        on_ready()
        stopping.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if address is None:
            serve.shutdown()
        else:
            serve.delete("sdonnx")
        ray.shutdown()


def _keys() -> dict[str, str]:
    return {KEYS_VARIABLE: os.environ[KEYS_VARIABLE]} if KEYS_VARIABLE in os.environ else {}


async def _events_of(handle: Any, request: ImageRequest) -> AsyncIterator[RemoteEvent]:
    """Yield the events of a request that a replica serves; the request ends if the iteration does."""
    response = handle.options(stream=True).generate.remote(request)
    is_complete = False
    try:
        async for event in response:
            yield event
        is_complete = True
    finally:
        if not is_complete:
            response.cancel()


def _is_lost(error: Exception) -> bool:
    """Return whether an exception is one of Ray's own, such as a lost replica, and none of our code."""
    return isinstance(error, RayError | RayServeException) and not isinstance(error, RayTaskError)
