"""`sdonnx serve --ray`: start Ray Serve on this machine, or use a cluster, and run the application on it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sdonnx.installation import requiring

with requiring("sdonnx serve --ray", "ray"):
    import ray
    from ray import serve

    from sdonnx.serve.ray_proxy import CALLBACK_VARIABLE, middlewares

__all__ = ["serve_on_ray"]


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
    from sdonnx.serve.ray import app

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
