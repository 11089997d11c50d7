"""The caller's callback after each step: the tensors that it receives, and the changes that it returns.

Source: `callback_on_step_end` in diffusers' pipelines. The names of tensors are theirs, and the arrays are copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.models import abi
from sdonnx.runtime.cuda_graph_cache import CapturedShape
from sdonnx.runtime.device.arrays import to_numpy
from sdonnx.runtime.sampling.current_shape import StepChange

__all__ = ["StepCallback", "require_callback"]

_LOG = logging.getLogger("sdonnx")

Array = npt.NDArray[np.float32]

_NEGATIVE = "negative_"


class Caller(Protocol):
    """The pipeline; a callback may set its `_guidance_scale`."""

    _guidance_scale: float


def require_callback(callback: Any) -> None:
    """Raise OptionError unless `callback_on_step_end` can be called, or is None."""
    if callback is not None and not callable(callback):
        raise OptionError(
            f"callback_on_step_end is a {type(callback).__name__}",
            "a function (pipeline, step, timestep, tensors)",
        )


class StepCallback:
    """Calls the caller's callback and reads what it returns.

    Args:
        pipeline: the pipeline, passed to the callback.
        callback: the caller's function.
        names: tensors that the callback receives.
        tensors: inputs of the denoiser by the names of tensors.
    """

    def __init__(
        self,
        pipeline: Caller,
        callback: Callable[..., Any],
        names: Sequence[str],
        tensors: Mapping[str, str],
    ) -> None:
        self._pipeline, self._callback, self._names, self._tensors = pipeline, callback, names, tensors
        self._first: dict[str, Array | None] = {}  # negative tensors, which diffusers reads before the first step

    def __call__(self, shape: CapturedShape, step: int, timestep: float, latents: Callable[[], Array]) -> StepChange:
        """Call the callback and return its changes.

        Args:
            shape: captured graphs, with the tensors in their buffers.
            step: number of the call of the denoiser.
            timestep: timestep of that call.
            latents: returns a copy of the latents (B,C,H,W).

        Raises:
            OptionError: the callback returned something that cannot be used.
        """
        given: dict[str, Any] = {
            name: latents() if name == abi.LATENTS else self._read(shape, name) for name in self._names
        }
        returned = self._callback(self._pipeline, step, timestep, given)
        if returned is not None and not isinstance(returned, Mapping):
            raise OptionError(
                f"the callback returned a {type(returned).__name__}",
                'None, or a mapping such as {"latents": array}',
                "return the mapping that the callback received, or None",
            )
        changed = returned or {}
        for name, before in self._first.items():
            if name in changed and before is not None and not np.array_equal(to_numpy(changed[name], name), before):
                _LOG.warning(
                    "%s from a callback has no effect, as in diffusers; the first half of the rows of %s are "
                    "the negative ones",
                    name,
                    name.removeprefix(_NEGATIVE),
                )
        conditioning = {
            buffer: values
            for name, buffer in self._tensors.items()
            if name in changed and not name.startswith(_NEGATIVE)
            for values in [self._changed(shape, name, buffer, changed[name])]
            if values is not None
        }
        # A denoiser with distilled guidance has read the scale before the first step.
        scale = 1.0 if abi.TIMESTEP_COND in shape.buffers else self._pipeline._guidance_scale
        guidance_scale = float(scale) if scale > 1 else None
        replacement = _latents(changed[abi.LATENTS], shape) if abi.LATENTS in changed else None
        return StepChange(guidance_scale, replacement, conditioning)

    def _read(self, shape: CapturedShape, name: str) -> Array | None:
        """Return a tensor; negative ones are those before the first step, and None without guidance."""
        if name not in self._first:
            values = shape.read(self._tensors[name]).astype(np.float32)
            if not name.startswith(_NEGATIVE):
                return values
            self._first[name] = values[: shape.key.batch] if shape.key.guided else None
        first = self._first[name]
        return None if first is None else first.copy()

    def _changed(self, shape: CapturedShape, name: str, buffer: str, returned: Any) -> npt.NDArray[Any] | None:
        """Return a tensor of the callback in the type of its buffer; None if it did not change."""
        before, values = shape.read(buffer), to_numpy(returned, name)
        fits = values.ndim == before.ndim and values.shape[2:] == before.shape[2:] and 0 not in values.shape
        if buffer != abi.ENCODER_HIDDEN_STATES:
            fits = fits and values.shape[1:] == before.shape[1:]
        if not fits:
            raise OptionError(
                f"the callback returned {name} of shape {values.shape}",
                f"{before.shape}",
                "return rows of the width that the callback received",
            )
        if not np.isfinite(values).all():
            raise OptionError(f"the callback returned {name} with NaN or infinity", "finite numbers")
        values = values.astype(before.dtype)
        return None if np.array_equal(values, before) else values


def _latents(returned: Any, shape: CapturedShape) -> Array:
    values = to_numpy(returned, abi.LATENTS).astype(np.float32)
    if values.shape != shape.latents:
        raise OptionError(
            f"the callback returned latents of shape {values.shape}",
            f"{shape.latents}",
            "return latents of the shape that the callback received",
        )
    return values
