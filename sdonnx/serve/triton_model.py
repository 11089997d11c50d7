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
from sdonnx.serve.image_request import ImageRequest
from sdonnx.serve.serve_limits import ServeLimits
from sdonnx.serve.triton_repository import INPUTS

__all__ = ["TritonPythonModel"]

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
        # A relative folder is that of the repository's model.
        folder = Path(args["model_repository"], parameters["folder"])
        provider = "cuda" if args["model_instance_kind"] == "GPU" else "cpu"
        limits = ServeLimits(**json.loads(parameters["limits"]))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sdonnx-triton", daemon=True)
        self._thread.start()
        device_index = int(args["model_instance_device_id"]) if provider == "cuda" else 0
        self._pipeline = AsyncPipeline.from_pretrained(
            {config["name"]: folder}, provider, limits=limits, device_index=device_index
        )
        self._pipeline.warmup()

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
            jobs = [self._pipeline.submit(each) for each in _image_requests(request, utils)]
            results = await asyncio.gather(*jobs)
        except SdonnxError as error:
            return utils.InferenceResponse(output_tensors=[], error=utils.TritonError(str(error)))
        images = np.stack([np.asarray(result.images[0].convert("RGB"), np.uint8) for result in results])
        seeds = np.array([[result.seeds[0]] for result in results], np.int64)
        return utils.InferenceResponse(output_tensors=[utils.Tensor("image", images), utils.Tensor("used_seed", seeds)])


def _image_requests(request: Any, utils: Any) -> list[ImageRequest]:
    """Return the requests for the rows of a batch.

    Raises:
        OptionError: the inputs have different numbers of rows, or a text is no UTF-8.
    """
    columns: dict[str, Array] = {}
    for each in INPUTS:
        tensor = utils.get_input_tensor_by_name(request, each.name)
        if tensor is not None:
            columns[each.field] = tensor.as_numpy().reshape(-1)
    counts = {len(values) for values in columns.values()}
    if len(counts) != 1:
        raise OptionError(f"inputs have {sorted(counts)} rows", "as many of each", "send inputs of one shape")
    (count,) = counts
    return [
        ImageRequest(**{name: _value(name, values[row]) for name, values in columns.items()}) for row in range(count)
    ]


def _value(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise OptionError(f"{name} is no UTF-8", "a text in UTF-8", "encode it") from error
    return value.item() if isinstance(value, np.generic) else value
