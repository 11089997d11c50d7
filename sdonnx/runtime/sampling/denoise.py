"""The denoising loop, with the sampler on the device or on the host.

Samplers that are plans run on the device, one replay of a captured graph for each call. With a sampler on the host,
the same step graph outputs the predictions and the host computes the update. That is for schedulers of diffusers that
are not linear in their history, for guidance rescaled by the standard deviation of each image (arXiv:2305.08891,
section 3.4), and for a guidance scale that differs from image to image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sdonnx.models import abi
from sdonnx.runtime.cuda_graph_cache import CapturedShape
from sdonnx.runtime.sampling.current_shape import CurrentShape, StepChange
from sdonnx.runtime.sampling.noise import NoiseSource
from sdonnx.samplers import STATE_ROWS, SamplingPlan
from sdonnx.samplers.plans import HEADER, MAX_CALLS, matrix_start, row_size

__all__ = ["Guidance", "HostSampler", "PlanOnHost", "Steps", "denoise", "denoise_with_host", "guided_prediction"]

Array = npt.NDArray[np.float32]

Guidance = float | Array
"""Weight of the prompt, or weights (B,1,1,1) of the images."""

StepEnd = Callable[[CapturedShape, int, float, Callable[[], Array]], StepChange]
"""Callback after each call: (captured graphs, call, timestep, function that returns a copy of the latents) to changes.

Only the function waits for the call; without it, the device goes on while the callback runs."""


@dataclass
class Steps:
    """Callbacks of a run.

    Attributes:
        on_step: called after each call of the denoiser; None lets calls queue up on the device.
        on_progress: called with the number of calls that are done or queued.
        should_stop: returns whether to stop after the current call.
    """

    on_step: StepEnd | None
    on_progress: Callable[[int], None]
    should_stop: Callable[[], bool]


class HostSampler(Protocol):
    """A sampler that runs on the host.

    Attributes:
        guidance_scale: weight of the prompt; None without guidance.
    """

    guidance_scale: Guidance | None

    @property
    def timesteps(self) -> Sequence[float]:
        """Timestep of each call."""
        ...

    @property
    def init_noise_sigma(self) -> float:
        """Factor of the initial noise."""
        ...

    @property
    def start_scales(self) -> tuple[float, float] | None:
        """Factors of clean latents and noise at the first call; None if only `noised` can add the noise."""
        ...

    def noised(self, clean: Array, noise: Array, call: int) -> Array:
        """Return clean latents (B,C,H,W) with the noise that a call expects, none after the last call."""
        ...

    def scaled(self, call: int, latents: Array) -> Array:
        """Return the latents (B,C,H,W) scaled as the denoiser expects them at a call."""
        ...

    def update(self, call: int, predictions: Array, latents: Array) -> Array:
        """Return the new latents (B,C,H,W) from the predictions (G,B,C,H,W)."""
        ...


def denoise(
    current: CurrentShape,
    plan: SamplingPlan,
    table: Callable[[float | None], Array],
    noise: NoiseSource,
    steps: Steps,
) -> None:
    """Run every call of a plan on the device.

    Args:
        current: buffers and captured graphs; the state is written already.
        plan: the sampler's plan.
        table: returns the parameter table for a weight of the prompt.
        noise: source of fresh noise.
        steps: callbacks.
    """
    device = current.shape.graphs.device
    current.shape.put(abi.PARAMETERS, table(current.guidance_scale))
    current.precompute()
    last = len(plan.timesteps) - 1
    before = None
    for call, timestep in enumerate(plan.timesteps):
        if plan.needs_noise[call]:
            device.synchronize()  # the previous call may still read the noise
            current.shape.put(abi.NOISE, noise.sample())
        current.run(call)
        if steps.on_step is not None:
            mark = device.mark()
            # A callback runs while the device computes its call, except for the last one.
            waited = mark if call == last else before
            if waited is not None:
                device.wait(waited)
            before = mark
            change = steps.on_step(current.shape, call, float(timestep), partial(_latents, current.shape))
            if change.latents is not None:
                state = current.shape.read(abi.STATE)
                state[0] = change.latents
                current.shape.put(abi.STATE, state)
            if call < last and current.apply(change):
                current.shape.put(abi.PARAMETERS, table(current.guidance_scale))
                current.precompute()
        steps.on_progress(call + 1)
        if steps.should_stop():
            break
    device.synchronize()


def _latents(shape: CapturedShape) -> Array:
    latents: Array = shape.read(abi.STATE)[0]
    return latents


def prediction_table(timesteps: Sequence[float], copies: int) -> Array:
    """Return the parameter table with which the step graph keeps the latents and outputs its predictions.

    Row 0 of the state stays; row 1 becomes the first prediction and row 2 the second.

    Args:
        timesteps: timestep of each call.
        copies: predictions for each image: 2 with guidance and 1 without.
    """
    table = np.zeros((MAX_CALLS, row_size(copies)), np.float32)
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
    current: CurrentShape,
    sampler: HostSampler,
    latents: Array,
    blend: Callable[[int, Array], Array],
    steps: Steps,
) -> None:
    """Run every call with a sampler on the host, and write the final latents to the state.

    Args:
        current: buffers and captured graphs.
        sampler: computes the updates.
        latents: initial latents (B,C,H,W).
        blend: restores the kept area after a call: (call, latents) to latents.
        steps: callbacks.
    """
    current.shape.put(abi.STEP_INDEX, np.zeros(1, np.int64))
    _start_predictions(current, sampler)
    state = np.zeros((STATE_ROWS, *current.shape.latents), np.float32)
    last = len(sampler.timesteps) - 1
    for call, timestep in enumerate(sampler.timesteps):
        state[0] = sampler.scaled(call, latents)
        current.shape.put(abi.STATE, state)
        current.run(call)
        predictions = current.shape.read(abi.STATE)[1 : 1 + current.shape.key.copies]
        latents = blend(call, sampler.update(call, predictions, latents))
        if steps.on_step is not None:
            change = steps.on_step(current.shape, call, float(timestep), latents.copy)
            latents = latents if change.latents is None else change.latents
            before = current.guidance_scale
            if call < last and current.apply(change):
                if current.guidance_scale != before:
                    sampler.guidance_scale = current.guidance_scale
                _start_predictions(current, sampler)
        steps.on_progress(call + 1)
        if steps.should_stop():
            break
    state[0] = latents
    current.shape.put(abi.STATE, state)


def _start_predictions(current: CurrentShape, sampler: HostSampler) -> None:
    current.shape.put(abi.PARAMETERS, prediction_table(sampler.timesteps, current.shape.key.copies))
    current.precompute()


class PlanOnHost:
    """A sampler that follows a plan on the host, with rescaled guidance or weights of the prompt for each image.

    Args:
        plan: the sampler's plan.
        guidance_scale: weight of the prompt; None without guidance.
        rescale: share of the rescaled guidance, 0 to 1.
        noise: source of fresh noise.
    """

    def __init__(self, plan: SamplingPlan, guidance_scale: Guidance | None, rescale: float, noise: NoiseSource) -> None:
        self.timesteps: Sequence[float] = [float(timestep) for timestep in plan.timesteps]
        self.init_noise_sigma = plan.init_noise_sigma
        self.start_scales = (float(plan.clean_scales[0]), float(plan.noise_scales[0]))
        self.guidance_scale = guidance_scale
        self._plan, self._rescale, self._noise = plan, rescale, noise
        self._history: Array | None = None

    def noised(self, clean: Array, noise: Array, call: int) -> Array:
        """Return clean latents (B,C,H,W) with the noise that a call expects, none after the last call."""
        return np.asarray(clean * self._plan.clean_scales[call] + noise * self._plan.noise_scales[call], np.float32)

    def scaled(self, call: int, latents: Array) -> Array:
        """Return the latents (B,C,H,W) scaled as the denoiser expects them at a call."""
        return np.asarray(latents * self._plan.input_scales[call], np.float32)

    def update(self, call: int, predictions: Array, latents: Array) -> Array:
        """Return the new latents (B,C,H,W) from the predictions (G,B,C,H,W)."""
        prediction = guided_prediction(predictions, self.guidance_scale, self._rescale)
        if self._history is None:
            self._history = np.zeros((STATE_ROWS - 1, *latents.shape), np.float32)
        noise = self._noise.sample() if self._plan.needs_noise[call] else np.zeros_like(latents)
        rows = np.concatenate([latents[None], self._history, noise[None], prediction[None]])
        state: Array = np.tensordot(self._plan.matrices[call], rows.astype(np.float64), axes=1).astype(np.float32)
        self._history = state[1:]
        return np.asarray(state[0], np.float32)


def guided_prediction(predictions: Array, guidance_scale: Guidance | None, rescale: float) -> Array:
    """Return the prediction (B,C,H,W) of classifier-free guidance.

    Args:
        predictions: (G,B,C,H,W), those for the prompts last.
        guidance_scale: weight of the prompt; None without guidance.
        rescale: share of the rescaled prediction, 0 to 1; see `rescaled`.
    """
    conditional: Array = predictions[-1]
    if guidance_scale is None:
        return conditional
    unconditional, conditional = predictions
    prediction = unconditional + np.asarray(guidance_scale, np.float32) * (conditional - unconditional)
    return rescaled(prediction, conditional, rescale)


def rescaled(guided: Array, conditional: Array, share: float) -> Array:
    """Return the guided prediction, rescaled towards the standard deviation of the conditional prediction.

    Source: arXiv:2305.08891, equations 15 and 16, and diffusers' `rescale_noise_cfg`, which uses n - 1 for deviations.

    Args:
        guided: prediction with guidance (B,C,H,W).
        conditional: prediction for the prompt (B,C,H,W); deviations are computed for each image.
        share: share of the rescaled prediction, 0 to 1.
    """
    if not share:
        return guided
    axes: Any = tuple(range(1, guided.ndim))
    ratio = conditional.std(axis=axes, keepdims=True, ddof=1) / guided.std(axis=axes, keepdims=True, ddof=1)
    result: Array = (share * guided * ratio + (1 - share) * guided).astype(np.float32)
    return result
