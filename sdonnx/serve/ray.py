"""The server on Ray Serve: `serve run sdonnx.serve.ray:app folder=fast replicas=2`.

A deployment speaks HTTP, and one deployment for each model generates images: a pipeline for each replica, with a queue
of its own. The first one sends a request again if its replica is lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from sdonnx.installation import requiring
from sdonnx.serve.async_pipeline import AsyncPipeline
from sdonnx.serve.image_request import ImageRequest
from sdonnx.serve.remote_pipeline import RemoteEvent, RemotePipeline, replica_events
from sdonnx.serve.serve_limits import ServeLimits

with requiring("sdonnx.serve.ray", "ray"):
    from ray import serve
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import RayServeException

    from sdonnx.serve.ray_metrics import RayMetrics
    from sdonnx.serve.ray_options import RayOptions

__all__ = ["Front", "Generator", "app"]

KEYS_VARIABLE = "SDONNX_API_KEYS"

# Requests that a replica holds beyond its own queue: health checks, and the batch that runs.
_SPARE_REQUESTS = 64


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
        from sdonnx.serve.http.serve_settings import ServeSettings, read_api_keys
        from sdonnx.serve.prometheus_metrics import PrometheusMetrics

        metrics = PrometheusMetrics()
        calls = {name: partial(_events_of, handle) for name, handle in self._handles.items()}
        settings = ServeSettings(api_keys=read_api_keys(None, os.environ.get(KEYS_VARIABLE)))
        ask_inputs = {name: partial(_inputs_of, handle) for name, handle in self._handles.items()}
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


async def _inputs_of(handle: Any) -> list[str]:
    """Ask a replica for the fields for images that it accepts."""
    inputs: list[str] = await handle.inputs.remote()
    return inputs


def _is_lost(error: Exception) -> bool:
    """Return whether an exception is one of Ray's own, such as a lost replica, and none of our code."""
    return isinstance(error, RayError | RayServeException) and not isinstance(error, RayTaskError)
