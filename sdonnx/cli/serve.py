"""`sdonnx serve -m FOLDER`: an HTTP server with OpenAI's images API."""

from __future__ import annotations

import argparse
import contextlib
import os
import warnings
from functools import partial
from pathlib import Path

from sdonnx.errors import OptionError
from sdonnx.lora.lora_folder import list_loras
from sdonnx.serve.serve_settings import ServeLimits
from sdonnx.terminal import add_common, add_option, console

__all__ = ["add_arguments", "run"]

KEYS_VARIABLE = "SDONNX_API_KEYS"

_LIMITS = ServeLimits()
_LIMIT_OPTIONS = (
    "max_batch_size", "batch_wait_ms", "max_waiting", "max_wait_s", "max_images", "max_pixels", "max_steps",
)  # fmt: skip
_RAY_OPTIONS = ("provider", "replicas", "max_replicas", "gpus_per_replica")
_ONLY_HERE = ("warmup", "grace_s", "require_certificate")
_MEGABYTE = 1024 * 1024
_SIGNALLED = 128  # added to the number of a signal in the status of a process that it ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = partial(add_option, parser)
    parser.description = "Serve optimized folders over HTTP, with OpenAI's images API, health checks and metrics."
    add(
        "-m",
        "--model",
        required=True,
        action="append",
        metavar="FOLDER",
        help="optimized folder, or NAME=FOLDER; repeat it for several models, the default one first",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1; 0.0.0.0 for all)")
    add("--port", type=int, default=8000, help="port to listen on (default: 8000; 0 for a free one)")
    add("--provider", default=None, help="cuda or cpu (default: the provider that the folder was optimized for)")
    add("--warmup", nargs="+", default=[], metavar="WxH", help="sizes to capture first (default: the model's own)")
    add(
        "--max_batch_size", type=int, default=_LIMITS.max_batch_size, metavar="N", help="images of a batch (default: 4)"
    )
    wait = f"milliseconds to wait for a batch to fill (default: {_LIMITS.batch_wait_ms:g})"
    add("--batch_wait_ms", type=float, default=_LIMITS.batch_wait_ms, metavar="MS", help=wait)
    waiting = f"images that may wait; more are refused with status 429 (default: {_LIMITS.max_waiting})"
    add("--max_waiting", type=int, default=_LIMITS.max_waiting, metavar="N", help=waiting)
    expired = f"seconds after which a waiting request ends with status 503 (default: {_LIMITS.max_wait_s:g})"
    add("--max_wait_s", type=float, default=_LIMITS.max_wait_s, metavar="S", help=expired)
    add("--max_images", type=int, default=_LIMITS.max_images, metavar="N", help="images of a request (default: 10)")
    own = "four times the area of the model's own size"
    pixels = f"height times width of an image (default: {_LIMITS.pixel_limit}; on a CPU {own} at most)"
    add("--max_pixels", type=int, default=_LIMITS.max_pixels, metavar="N", help=pixels)
    add("--max_steps", type=int, default=_LIMITS.max_steps, metavar="N", help="steps of a request (default: 150)")
    add("--max_body", type=int, default=32, metavar="MB", help="megabytes of a request (default: 32)")
    add("--max_sizes", type=int, default=16, metavar="N", help="shapes that stay captured (default: 16)")
    keys = f"file with an API key a line; keys are also read from {KEYS_VARIABLE}, separated by commas"
    add("--api_key_file", type=Path, default=None, metavar="FILE", help=keys)
    loras = "offer the safetensors files of this folder to requests, by their names or those of their folders"
    add("--lora_folder", type=Path, default=None, metavar="FOLDER", help=loras)
    grace = "seconds to finish running requests after SIGTERM (default: until they are finished)"
    add("--grace_s", type=int, default=None, metavar="S", help=grace)
    add("--ray", action="store_true", help="serve with replicas on Ray Serve (extra ray)")
    add("--replicas", type=int, default=None, metavar="N", help="with --ray: replicas of each model (default: 1)")
    add("--max_replicas", type=int, default=None, metavar="N", help="with --ray: scale up to N by the queues")
    gpus = "with --ray: GPUs of a replica, 0 for a CPU (default: 1)"
    add("--gpus_per_replica", type=float, default=None, metavar="N", help=gpus)
    address = "with --ray: address of a running cluster (default: start Ray on this machine)"
    add("--ray_address", default=None, metavar="ADDRESS", help=address)
    add("--write_triton", default=None, help=argparse.SUPPRESS)  # of an older version
    add("--require_certificate", action="store_true", help="refuse a folder without a valid certificate")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    folders = _folders(options.model)
    if options.write_triton is not None:
        raise OptionError(
            "--write_triton, which has been removed",
            "a model repository made from examples/triton",
            "copy that folder, see docs/how-to/serve-with-triton.md",
        )
    if options.ray:
        return _run_on_ray(options, folders)
    _refuse_without_ray(options)
    limits = _limits(options)
    sizes = [_size(text) for text in options.warmup]
    for size in sizes:
        limits.check_size(*size)
    loras = {} if options.lora_folder is None else list_loras(options.lora_folder)
    from sdonnx.serve.serve_settings import ServeSettings, read_api_keys

    settings = ServeSettings(
        api_keys=read_api_keys(options.api_key_file, os.environ.get(KEYS_VARIABLE)),
        max_body_bytes=options.max_body * _MEGABYTE,
    )
    from sdonnx.serve.async_pipeline import AsyncPipeline
    from sdonnx.serve.http.application import create_app
    from sdonnx.serve.http.http_server import bind, serve
    from sdonnx.serve.prometheus_metrics import PrometheusMetrics

    metrics = PrometheusMetrics()
    with contextlib.closing(bind(options.host, options.port)) as bound:
        pipeline = AsyncPipeline.from_pretrained(
            folders,
            options.provider,
            limits=limits,
            observer=metrics,
            loras=loras,
            max_sizes=options.max_sizes,
            require_certificate=options.require_certificate,
        )
        pipeline.warmup(sizes or None, background=True)
        host, port = bound.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        out = console()
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about the files of clients
        forced_by = serve(
            create_app(pipeline, metrics, settings),
            partial(pipeline.aclose, finish=False),
            bound,
            grace_s=options.grace_s,
            log_level=options.log_level if options.log_level == "debug" else "warning",
            on_ready=lambda: out.print(f"ready at {address}, models: {', '.join(folders)}", markup=False),
        )
    return 0 if forced_by is None else _SIGNALLED + forced_by


def _limits(options: argparse.Namespace) -> ServeLimits:
    return ServeLimits(**{name: getattr(options, name) for name in _LIMIT_OPTIONS})


def _run_on_ray(options: argparse.Namespace, folders: dict[str, str]) -> int:
    """Run the command with replicas on Ray Serve."""
    for name in _ONLY_HERE:
        if getattr(options, name):
            raise OptionError(f"--{name} with --ray", "a server of one process", f"leave out --{name}")
    given = {name: getattr(options, name) for name in (*_RAY_OPTIONS, *_LIMIT_OPTIONS)}
    values = {name: value for name, value in given.items() if value is not None}
    if options.lora_folder is not None:
        values["lora_folder"] = str(options.lora_folder.resolve())
    models = ",".join(f"{name}={Path(folder).resolve()}" for name, folder in folders.items())
    from sdonnx.serve.serve_settings import read_api_keys

    keys = read_api_keys(options.api_key_file, os.environ.get(KEYS_VARIABLE))
    if keys:
        os.environ[KEYS_VARIABLE] = ",".join(keys)
    from sdonnx.serve.ray import serve_on_ray

    port = options.port
    if port == 0 and options.ray_address is None:
        from sdonnx.serve.http.http_server import bind

        with contextlib.closing(bind(options.host, 0)) as bound:  # Ray does not say which port it chose
            port = bound.getsockname()[1]
    address = f"http://{options.host}:{port}"
    out = console()
    serve_on_ray(
        {"models": models, **values},
        host=options.host,
        port=port,
        address=options.ray_address,
        on_ready=lambda: out.print(f"ready at {address}, models: {', '.join(folders)}", markup=False),
    )
    return 0


def _refuse_without_ray(options: argparse.Namespace) -> None:
    for name in ("replicas", "max_replicas", "gpus_per_replica", "ray_address"):
        if getattr(options, name) is not None:
            raise OptionError(f"--{name} without --ray", "both", "add --ray")


def _folders(models: list[str]) -> dict[str, str]:
    """Return folders by the names of their models.

    Raises:
        OptionError: a name is empty, or two models have the same one.
    """
    folders: dict[str, str] = {}
    for text in models:
        name, equals, folder = text.partition("=")
        if not equals or os.path.isdir(text):
            name, folder = Path(text).resolve().name, text
        if not name or not folder:
            raise OptionError(f"--model is {text!r}", "FOLDER or NAME=FOLDER")
        if name in folders:
            raise OptionError(f"two models have the name {name!r}", "a name for each", "pass NAME=FOLDER")
        folders[name] = folder
    return folders


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not all(edge.isascii() and edge.isdigit() and int(edge) for edge in (width, height)):
        raise OptionError(f"--warmup has {text!r}", "WIDTHxHEIGHT", "pass for example 512x512")
    return int(height), int(width)
