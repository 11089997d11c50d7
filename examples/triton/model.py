"""An sdonnx pipeline as a model of Triton's Python backend; see docs/how-to/serve-with-triton.md.

Source of the interface: docs of triton-inference-server/python_backend, "Usage". Each instance has one pipeline, and
all requests of a call are queued at once, so that equal ones share a batch.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

from sdonnx import AsyncPipeline, ImageRequest, OptionError, SdonnxError, ServeLimits
from sdonnx.serve.http.uploaded_images import read_conditioning

__all__ = ["TritonPythonModel"]

IMAGES = ("control_image", "adapter_image", "ip_adapter_image")
MAX_PIXELS = 4096 * 4096  # of the images of a row


class TritonPythonModel:
    """A pipeline for Triton's Python backend."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the pipeline of `parameters.folder`; relative paths start at the model's folder in the repository."""
        config = json.loads(args["model_config"])
        self._inputs = [each["name"] for each in config["input"]]
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        repository = Path(args["model_repository"])
        loras = json.loads(parameters.get("loras", "{}"))
        provider = "cuda" if args["model_instance_kind"] == "GPU" else "cpu"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sdonnx-triton", daemon=True)
        self._thread.start()
        self._pipeline = AsyncPipeline.from_pretrained(
            {config["name"]: repository / parameters["folder"]},
            provider,
            limits=ServeLimits(**json.loads(parameters.get("limits", "{}"))),
            loras={name: repository / path for name, path in loras.items()},
            device_index=int(args["model_instance_device_id"]) if provider == "cuda" else 0,
        )
        self._pipeline.warmup(background=True)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response for each request; one that cannot be served has an error."""
        return asyncio.run_coroutine_threadsafe(self._answer(requests), self._loop).result()

    def finalize(self) -> None:
        """Release the pipeline."""
        asyncio.run_coroutine_threadsafe(self._pipeline.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, requests: Sequence[Any]) -> list[Any]:
        return list(await asyncio.gather(*map(self._respond, requests)))

    async def _respond(self, request: Any) -> Any:
        try:
            rows = await asyncio.to_thread(self._rows, request)  # decoding images takes milliseconds
            results = await asyncio.gather(*[self._pipeline.submit(row) for row in rows])
        except SdonnxError as error:
            return triton.InferenceResponse(output_tensors=[], error=triton.TritonError(str(error)))
        images = np.stack([np.asarray(result.images[0].convert("RGB"), np.uint8) for result in results])
        seeds = np.array([result.seeds for result in results], np.int64)
        return triton.InferenceResponse([triton.Tensor("image", images), triton.Tensor("used_seed", seeds)])

    def _rows(self, request: Any) -> list[ImageRequest]:
        """Return a request for each row of the inputs, (rows, values)."""
        tensors = {name: triton.get_input_tensor_by_name(request, name) for name in self._inputs}
        arrays = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
        columns = {name: values.reshape(len(values), -1).tolist() for name, values in arrays.items()}
        if len(counts := {len(values) for values in columns.values()}) != 1:
            raise OptionError(f"inputs have {sorted(counts)} rows", "as many of each", "send the same number")
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [_request(row) for row in rows]


def _request(row: Mapping[str, list[Any]]) -> ImageRequest:
    files = {name: values for name, values in row.items() if name in IMAGES}
    fields: dict[str, Any] = {name: _value(name, values) for name, values in row.items() if name not in IMAGES}
    if "loras" in fields:
        try:
            fields["loras"] = json.loads(fields["loras"] or "null")
        except (ValueError, RecursionError) as error:
            raise OptionError("loras is no JSON", 'a mapping such as {"style": 0.8}', "encode it as JSON") from error
    return ImageRequest(**fields | read_conditioning(files, MAX_PIXELS))


def _value(name: str, values: list[Any]) -> Any:
    """Return a value, or a list of several; texts are bytes in UTF-8."""
    try:
        decoded = [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError as error:
        raise OptionError(f"{name} is no UTF-8", "a text in UTF-8") from error
    return decoded[0] if len(decoded) == 1 else decoded
