"""The denoising loop: on the device for samplers that are plans, with the host for what is no plan.

On the device a step is one replay. With the host, the same step graph hands out the predictions, and the host
computes the update: for schedulers of diffusers that are not linear in their history, and for guidance that is
rescaled by the deviation of each image (arXiv:2305.08891, section 3.4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sdonnx.families import Role
from sdonnx.runtime.captures import SizeBuffers
from sdonnx.runtime.draws import Draws
from sdonnx.samplers import STATE_ROWS, SamplingPlan
from sdonnx.samplers.parameters import HEADER, MOST_CALLS, matrix_start, row_size

__all__ = ["HostSampler", "PlanOnHost", "Steps", "denoise", "denoise_with_host"]

Array = npt.NDArray[np.float32]

StepEnd = Callable[[int, float, Array], Array | None]
"""Told (call, timestep, latents) after each call; what it returns takes the place of the latents."""


@dataclass
class Steps:
    """How a run is followed.

    Attributes:
        on_step: told after each call, None to let calls queue up on the device.
        told: called with the number of calls that are done or queued.
        stops: asked after each call whether to stop.
    """

    on_step: StepEnd | None
    told: Callable[[int], None]
    stops: Callable[[], bool]


class HostSampler(Protocol):
    """A sampler that the host computes."""

    @property
    def timesteps(self) -> Sequence[float]:
        """What the denoiser is told at each call."""
        ...

    def scaled(self, call: int, latents: Array) -> Array:
        """Return what the denoiser sees at a call."""
        ...

    def update(self, call: int, predictions: Array, latents: Array) -> Array:
        """Return the new latents (B,C,H,W) from the predictions (G,B,C,H,W)."""
        ...


def denoise(size: SizeBuffers, plan: SamplingPlan, draws: Draws, steps: Steps) -> None:
    """Run every call of a plan on the device; the state and the table are there already."""
    device = size.graphs.device
    size.condition()
    for call, timestep in enumerate(plan.timesteps):
        if plan.needs_noise[call]:
            device.synchronize()  # the call before may still be reading the noise
            size.put("noise", draws.noise())
        size.run(Role.DENOISER)
        if steps.on_step is not None:
            state = size.read("state")
            changed = steps.on_step(call, float(timestep), state[0].copy())
            if changed is not None:
                state[0] = changed
                size.put("state", state)
        steps.told(call + 1)
        if steps.stops():
            break
    device.synchronize()


def prediction_table(timesteps: Sequence[float], copies: int) -> Array:
    """Return the parameter table with which the step graph leaves the latents and hands out its predictions.

    Row 0 of the state stays; row 1 becomes the first prediction, row 2 the second.
    """
    table = np.zeros((MOST_CALLS, row_size(copies)), np.float32)
    calls = len(timesteps)
    table[:calls, 0] = np.arange(1, calls + 1)
    table[:calls, 1] = timesteps
    table[:calls, HEADER - 1] = 1
    matrix = np.zeros((STATE_ROWS, STATE_ROWS + 1 + copies), np.float32)
    matrix[0, 0] = 1
    for copy in range(copies):
        matrix[1 + copy, STATE_ROWS + 1 + copy] = 1
    table[:calls, matrix_start() :] = matrix.ravel()
    return table


def denoise_with_host(
    size: SizeBuffers,
    sampler: HostSampler,
    latents: Array,
    blend: Callable[[int, Array], Array],
    steps: Steps,
) -> None:
    """Run every call with the host's sampler; the final latents are left in the state.

    Args:
        size: the size's buffers.
        sampler: computes the updates.
        latents: (B,C,H,W), what is started from.
        blend: puts back, after a call, what a mask keeps.
        steps: how the run is followed.
    """
    copies = size.shape.copies
    size.put("parameters", prediction_table(sampler.timesteps, copies))
    size.put("call", np.zeros(1, np.int64))
    size.condition()
    state = np.zeros((STATE_ROWS, *size.latents), np.float32)
    for call, timestep in enumerate(sampler.timesteps):
        state[0] = sampler.scaled(call, latents)
        size.put("state", state)
        size.run(Role.DENOISER)
        predictions = size.read("state")[1 : 1 + copies]
        latents = blend(call, sampler.update(call, predictions, latents))
        if steps.on_step is not None and (changed := steps.on_step(call, float(timestep), latents.copy())) is not None:
            latents = np.asarray(changed, np.float32)
        steps.told(call + 1)
        if steps.stops():
            break
    state[0] = latents
    size.put("state", state)


class PlanOnHost:
    """A plan whose update the host computes, with guidance that is rescaled.

    Args:
        plan: a sampler's plan.
        guidance_scale: weight of the prompt; None for one prediction a call.
        rescale: how much of the rescaled guidance is taken, 0 to 1.
        draws: where fresh noise comes from.
    """

    def __init__(self, plan: SamplingPlan, guidance_scale: float | None, rescale: float, draws: Draws) -> None:
        self.timesteps: Sequence[float] = [float(timestep) for timestep in plan.timesteps]
        self._plan, self._guidance, self._rescale, self._draws = plan, guidance_scale, rescale, draws
        self._history: Array | None = None

    def scaled(self, call: int, latents: Array) -> Array:
        """Return what the denoiser sees at a call."""
        return np.asarray(latents * self._plan.input_scales[call], np.float32)

    def update(self, call: int, predictions: Array, latents: Array) -> Array:
        """Return the new latents (B,C,H,W) from the predictions (G,B,C,H,W)."""
        prediction = predictions[-1]
        if self._guidance is not None:
            unconditional, conditional = predictions
            prediction = unconditional + np.float32(self._guidance) * (conditional - unconditional)
            prediction = rescaled(prediction, conditional, self._rescale)
        if self._history is None:
            self._history = np.zeros((STATE_ROWS - 1, *latents.shape), np.float32)
        noise = self._draws.noise() if self._plan.needs_noise[call] else np.zeros_like(latents)
        rows = np.concatenate([latents[None], self._history, noise[None], prediction[None]])
        state: Array = np.tensordot(self._plan.matrices[call], rows.astype(np.float64), axes=1).astype(np.float32)
        self._history = state[1:]
        return np.asarray(state[0], np.float32)


def rescaled(guided: Array, conditional: Array, share: float) -> Array:
    """Return the guided prediction, brought in part to the deviation of the conditional one.

    Shapes: (B,C,H,W); each image by itself. Source: arXiv:2305.08891, equations 15 and 16; diffusers'
    `rescale_noise_cfg`, whose deviation divides by n - 1.
    """
    if not share:
        return guided
    axes: Any = tuple(range(1, guided.ndim))
    ratio = conditional.std(axis=axes, keepdims=True, ddof=1) / guided.std(axis=axes, keepdims=True, ddof=1)
    result: Array = (share * guided * ratio + (1 - share) * guided).astype(np.float32)
    return result
