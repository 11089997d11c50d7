"""The model that Triton's Python backend runs; `model.py` of a written repository imports it.

Source of the interface: docs of triton-inference-server/python_backend, "Usage". Each instance has one pipeline, and
all requests of a call are queued at once, so that equal ones share a batch.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError, SdonnxError
from sdonnx.serve.async_pipeline import AsyncPipeline
from sdonnx.serve.conditioning_images import CONDITIONING_IMAGES
from sdonnx.serve.http.serve_settings import ServeSettings
from sdonnx.serve.http.uploaded_images import read_conditioning
from sdonnx.serve.image_request import ImageRequest
from sdonnx.serve.serve_limits import ServeLimits
from sdonnx.serve.triton_repository import INPUTS

__all__ = ["TritonPythonModel"]

_IMAGES = frozenset(CONDITIONING_IMAGES)

Array = npt.NDArray[Any]


class TritonPythonModel:
    """A pipeline for Triton's Python backend."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load and warm up the pipeline.

        Args:
            args: Triton's description of the instance: `model_config`, `model_instance_kind`,
                `model_instance_device_id`, `model_repository`, `model_version`.

        Raises:
            SdonnxError: the folder cannot be loaded.
        """
        self._utils = importlib.import_module("triton_python_backend_utils")  # it exists in Triton only
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        # Relative paths start at the repository's model.
        folder = Path(args["model_repository"], parameters["folder"])
        files = json.loads(parameters.get("loras", "{}"))
        loras = {name: Path(args["model_repository"], path) for name, path in files.items()}
        provider = "cuda" if args["model_instance_kind"] == "GPU" else "cpu"
        limits = ServeLimits(**json.loads(parameters["limits"]))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sdonnx-triton", daemon=True)
        self._thread.start()
        device_index = int(args["model_instance_device_id"]) if provider == "cuda" else 0
        self._pipeline = AsyncPipeline.from_pretrained(
            {config["name"]: folder}, provider, limits=limits, loras=loras, device_index=device_index
        )
        self._pipeline.warmup(background=True)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response for each request; one that cannot be served has an error."""
        run = asyncio.run_coroutine_threadsafe(self._answer(requests), self._loop)
        return run.result()

    def finalize(self) -> None:
        """Release the pipeline."""
        asyncio.run_coroutine_threadsafe(self._pipeline.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, requests: Sequence[Any]) -> list[Any]:
        return list(await asyncio.gather(*(self._respond(request) for request in requests)))

    async def _respond(self, request: Any) -> Any:
        utils = self._utils
        try:
            columns = _columns(request, utils)
            if _IMAGES.isdisjoint(columns):
                asked = _image_requests(columns)
            else:  # decoding takes milliseconds, in which other requests may be queued
                asked = await asyncio.to_thread(_image_requests, columns)
            jobs = [self._pipeline.submit(each) for each in asked]
            results = await asyncio.gather(*jobs)
        except SdonnxError as error:
            return utils.InferenceResponse(output_tensors=[], error=utils.TritonError(str(error)))
        images = np.stack([np.asarray(result.images[0].convert("RGB"), np.uint8) for result in results])
        seeds = np.array([[result.seeds[0]] for result in results], np.int64)
        return utils.InferenceResponse(output_tensors=[utils.Tensor("image", images), utils.Tensor("used_seed", seeds)])


def _columns(request: Any, utils: Any) -> dict[str, Array]:
    """Return the inputs of a request by name: (rows,) for one value for each row, or (rows, values).

    Raises:
        OptionError: they have different numbers of rows.
    """
    columns: dict[str, Array] = {}
    for each in INPUTS:
        tensor = utils.get_input_tensor_by_name(request, each.name)
        if tensor is not None:
            values = tensor.as_numpy()
            columns[each.name] = values.reshape(len(values), -1) if each.is_list else values.reshape(-1)
    counts = {len(values) for values in columns.values()}
    if len(counts) != 1:
        raise OptionError(f"inputs have {sorted(counts)} rows", "as many of each", "send as many rows of each input")
    return columns


def _image_requests(columns: Mapping[str, Array]) -> list[ImageRequest]:
    """Return the requests for the rows of a batch.

    Raises:
        OptionError: a text is no UTF-8, or an image cannot be decoded.
    """
    count = len(next(iter(columns.values())))
    return [ImageRequest(**_fields({name: values[row] for name, values in columns.items()})) for row in range(count)]


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request from the values of a row."""
    files = {name: list(values) for name, values in row.items() if name in _IMAGES}
    fields = {name: _value(name, value) for name, value in row.items() if name not in _IMAGES}
    if (loras := fields.pop("loras", None)) is not None:
        fields["loras"] = _loras(loras)
    return fields | read_conditioning(files, ServeSettings().max_upload_pixels)


def _loras(text: str) -> Any:
    """Return weights by the names of LoRAs; None for an empty text."""
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError("loras is no JSON", 'a mapping such as {"style": 0.8}', "encode it as JSON") from error


def _value(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):  # as in the pipeline, one value is for all images
        return value.item() if value.size == 1 else value.tolist()
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise OptionError(f"{name} is no UTF-8", "a text in UTF-8") from error
    return value.item() if isinstance(value, np.generic) else value
