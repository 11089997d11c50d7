"""The ASGI application of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sdonnx._version import __version__
from sdonnx.errors import SdonnxError
from sdonnx.serve.http.images_api import ImagesApi
from sdonnx.serve.http.openai_errors import error_response, on_http_error, on_invalid, on_left, on_sdonnx_error
from sdonnx.serve.http.request_gate import RequestGate
from sdonnx.serve.image_service import ImageService
from sdonnx.serve.prometheus_metrics import PrometheusMetrics
from sdonnx.serve.serve_settings import ServeSettings

__all__ = ["create_app"]

_PAGE = {"/": ("try.html", "text/html"), "/try.css": ("try.css", "text/css"), "/try.js": ("try.js", "text/javascript")}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'"


def create_app(pipeline: ImageService, metrics: PrometheusMetrics, settings: ServeSettings) -> FastAPI:
    """Return the application; it closes the pipeline when it shuts down.

    Args:
        pipeline: generates the images; its observer is `metrics`.
        metrics: shown at /metrics.
        settings: the server's settings.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await pipeline.aclose()

    app = FastAPI(
        title="sdonnx",
        version=__version__,
        summary="Images from prompts, with OpenAI's images API.",
        lifespan=lifespan,
        docs_url=None,  # its scripts come from another server
        redoc_url=None,
    )
    app.add_exception_handler(SdonnxError, on_sdonnx_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(ClientDisconnect, on_left)
    app.add_exception_handler(Exception, _on_unexpected)
    ImagesApi(pipeline, settings).add_to(app)
    _add_health(app, pipeline, metrics, settings)
    for path, (name, kind) in _PAGE.items():
        app.add_api_route(path, _file(name, kind), include_in_schema=False)
    app.add_middleware(RequestGate, settings=settings, metrics=metrics)
    return app


def _add_health(app: FastAPI, pipeline: ImageService, metrics: PrometheusMetrics, settings: ServeSettings) -> None:
    async def live() -> Response:
        """Answer 503 if only a restart helps: the pipeline has failed, or a batch hangs."""
        if pipeline.failure is not None:
            return error_response(503, f"the pipeline has failed ({pipeline.failure}); restart the server")
        if pipeline.batch_age_s > settings.max_batch_s:
            message = f"a batch has made no step for more than {settings.max_batch_s:g} s; restart the server"
            return error_response(503, message)
        return JSONResponse({"status": "ok"})

    async def ready() -> Response:
        """Answer 503 if no request would be accepted."""
        if pipeline.waiting >= pipeline.limits.max_waiting:
            return error_response(503, "the queue is full; try again later", headers={"Retry-After": "1"})
        return await live()

    async def show_metrics() -> Response:
        """Return the metrics in Prometheus's text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    unavailable: dict[int | str, dict[str, Any]] = {503: {"description": "The server cannot generate images."}}
    app.add_api_route("/health/live", live, responses=unavailable)
    app.add_api_route("/health/ready", ready, responses=unavailable)
    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    app.add_api_route("/metrics", show_metrics, response_class=Response, responses=text)


def _file(name: str, kind: str) -> Callable[[], Any]:
    content = resources.files("sdonnx.serve.http").joinpath(name).read_bytes()
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def show() -> Response:
        return Response(content, media_type=kind, headers=headers)

    return show


async def _on_unexpected(_: Request, error: Exception) -> JSONResponse:
    return error_response(500, f"the server failed ({type(error).__name__}); its log has the details")
