"""Limits of a call: the memory that there is, and those that the operator of a server sets."""

from __future__ import annotations

from typing import Any

import numpy as np

from sdonnx.errors import DeviceMemoryError, OptionError
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.device.host_memory import available_memory
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.image_geometry import ImageGeometry
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments
from sdonnx.runtime.memory_estimate import MemoryEstimate, RequestSize
from sdonnx.runtime.vae.split import VaeSplits

__all__ = ["RequestLimits", "require_limit"]

# A plan of more steps takes minutes to compute; the denoiser is called a thousand times at most (MAX_CALLS).
_MAX_STEPS = 10**6


def require_limit(name: str, value: Any) -> int | None:
    """Return a limit of the caller, None for no limit.

    Raises:
        OptionError: it is not a whole number from 1 on.
    """
    if value is None or (_is_whole(value) and value >= 1):
        return None if value is None else int(value)
    raise OptionError(f"{name} is {value!r}", "a whole number from 1 on, or None", "leave it out for no limit")


class RequestLimits:
    """Refuses calls that cannot succeed, before anything of their size is allocated.

    Args:
        graphs: graphs of the pipeline.
        geometry: sizes of the pipeline.
        splits: how the autoencoder processes a batch.
        max_batch_size: maximum number of images of a call; None for no limit.
        max_pixels: maximum height times width of an image; None for no limit.
    """

    def __init__(
        self,
        graphs: GraphSet,
        geometry: ImageGeometry,
        splits: VaeSplits,
        max_batch_size: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        self._max_batch_size, self._max_pixels = max_batch_size, max_pixels
        self._device = graphs.device
        self._estimate = MemoryEstimate(graphs, geometry, splits)
        # Not the free memory of each call: ONNX Runtime's arena holds memory that the next call reuses.
        memory = graphs.device.memory()
        self._most_free = None if memory is None else memory[0]

    def require_call(
        self,
        prompts: PromptArguments,
        asked: tuple[Any, Any],
        generated: tuple[Any, Any],
        *,
        tokens: int,
        steps: Any,
        output_type: str,
        controls: int = 0,
    ) -> None:
        """Raise if a call exceeds a limit. Values of wrong types pass; other checks name them.

        Args:
            prompts: prompts of the call.
            asked: requested height and width in pixels.
            generated: height and width in pixels of the generated images.
            tokens: length to which prompts are padded.
            steps: number of denoising steps; None for the default.
            output_type: see `ImageOutput`.
            controls: number of ControlNets or T2I-Adapters.

        Raises:
            OptionError: the batch, the size or the number of steps exceeds a limit that is set.
            DeviceMemoryError: the call needs more memory than there is.
        """
        if _is_whole(steps) and steps > _MAX_STEPS:
            raise OptionError(f"num_inference_steps is {steps}", f"at most {_MAX_STEPS}")
        count = prompts.count()
        if count is None or not all(_is_whole(edge) and edge > 0 for edge in (*asked, *generated)):
            return
        self._require(
            RequestSize(
                batch=count * prompts.images_per_prompt,
                height=int(generated[0]),
                width=int(generated[1]),
                copies=prompts.copies,
                tokens=0 if prompts.prompt_embeds is not None else tokens,
                result_pixels=int(asked[0]) * int(asked[1]),
                output_type=output_type,
                controls=controls,
            )
        )

    def require_shape(self, batch: Any, height: Any, width: Any, *, tokens: int, guided: bool) -> None:
        """Raise if a shape to capture exceeds a limit; see `require_call`."""
        if all(_is_whole(size) and size > 0 for size in (batch, height, width)):
            copies = 2 if guided else 1
            pixels = int(height) * int(width)
            self._require(RequestSize(int(batch), int(height), int(width), copies, tokens, pixels, "ort"))

    def require_prompts(self, prompts: PromptArguments, *, tokens: int) -> None:
        """Raise if the embeddings of prompts exceed a limit; see `require_call`.

        Args:
            prompts: prompts to encode; `images_per_prompt` is the number of copies of each.
            tokens: length to which prompts are padded.

        Raises:
            OptionError: the batch exceeds the limit that is set.
            DeviceMemoryError: the embeddings need more memory than there is.
        """
        count = prompts.count()
        if count is None:
            return
        batch = count * prompts.images_per_prompt
        self._require_batch(batch)
        needed = self._estimate.prompt_bytes(batch * prompts.copies, tokens)
        _require_memory(f"embeddings of {batch} prompts need", needed, available_memory(), "on this machine")

    def _require_batch(self, batch: int) -> None:
        if self._max_batch_size is not None and batch > self._max_batch_size:
            raise OptionError(f"a batch of {batch} images", f"at most {self._max_batch_size}", "ask for fewer images")

    def _require(self, request: RequestSize) -> None:
        self._require_batch(request.batch)
        if self._max_pixels is not None and request.result_pixels > self._max_pixels:
            raise OptionError(f"images of {request.result_pixels} pixels", f"at most {self._max_pixels}")
        on_device, on_host = self._estimate.device_bytes(request), self._estimate.host_bytes(request)
        if self._most_free is None:
            on_host += on_device
        else:
            if on_device > self._most_free:
                self._most_free = max(self._most_free, self._free_memory())
            _require_memory(_subject(request), on_device, self._most_free, "on the device")
        _require_memory(_subject(request), on_host, available_memory(), "on this machine")

    def _free_memory(self) -> int:
        """Return the free memory of a GPU in bytes; it is read by the thread that has selected the GPU."""
        memory = device_thread(self._device).run(self._device.memory)
        return 0 if memory is None else memory[0]


def _subject(request: RequestSize) -> str:
    plural = "s" if request.batch > 1 else ""
    return f"{request.batch} image{plural} of {request.height}x{request.width} need{'' if plural else 's'}"


def _require_memory(subject: str, needed: int, available: int, place: str) -> None:
    if needed > available:
        raise DeviceMemoryError(
            f"{subject} more than {_shown(needed)} {place}, where {_shown(available)} are available",
            "a request that fits into memory",
            "ask for fewer images at once, or for a smaller size",
        )


def _shown(size: int) -> str:
    size = min(size, 10**18)  # no float holds the memory of an image of 10**200 pixels
    return f"{size / 10**9:,.1f} GB" if size >= 10**9 else f"{size / 10**6:,.0f} MB"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
