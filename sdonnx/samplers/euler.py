"""Euler's method, its ancestral form and Heun's method for the probability flow of diffusion.

The latents are data + sigma * noise (arXiv:2206.00364, table 1). The denoiser's input is scaled to the variance of
the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sdonnx.samplers.noise_schedule import (
    cumulative_alphas,
    custom_timesteps,
    deformed_sigmas,
    spaced_timesteps,
    timesteps_of_sigmas,
    training_sigmas,
    with_final_sigma,
)
from sdonnx.samplers.options import PlanRequest, SchedulerOptions
from sdonnx.samplers.plans import HISTORY, LATENTS, NOISE, Row, SamplingPlan, assemble, new_state, predicted_data

__all__ = ["plan_euler", "plan_euler_ancestral", "plan_heun"]


def _schedule(options: SchedulerOptions, request: PlanRequest) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the timesteps (n,) and sigmas (n + 1,) of `EulerDiscreteScheduler.set_timesteps`."""
    training = training_sigmas(cumulative_alphas(options, never_zero=True))
    if request.sigmas is not None:
        levels = np.array(request.sigmas, np.float32).astype(np.float64)
        return timesteps_of_sigmas(levels[:-1], training), levels
    given = custom_timesteps(options, request)
    spaced = spaced_timesteps(options, request.steps) if given is None else given
    timesteps = spaced.astype(np.float32).astype(np.float64)
    sigmas = np.interp(timesteps, np.arange(len(training)), training)
    deformed = deformed_sigmas(options, sigmas, len(timesteps))
    if deformed is not None:
        sigmas, timesteps = deformed, timesteps_of_sigmas(deformed, training)
    last = training[0] if options.final_sigmas_type == "sigma_min" else 0.0
    return timesteps, with_final_sigma(sigmas, last)


def _slope(options: SchedulerOptions, sigma: float) -> Row:
    """Return the derivative of the latents by sigma, arXiv:2206.00364, equations 1 and 3."""
    alpha = 1 / np.sqrt(sigma**2 + 1)
    return (LATENTS - predicted_data(options.prediction_type, alpha * LATENTS, alpha, alpha * sigma)) / sigma


def _assemble(
    options: SchedulerOptions,
    timesteps: NDArray[np.float64],
    sigmas: NDArray[np.float64],
    matrices: Sequence[Row],
    *,
    needs_noise: bool = False,
) -> SamplingPlan:
    """Return the plan for the last of these timesteps (n,) and sigmas (n + 1,), one call for each matrix."""
    first = len(timesteps) - len(matrices)
    largest = sigmas.max()
    # diffusers' `init_noise_sigma`: only "leading" includes the variance of the data.
    initial = np.sqrt(largest**2 + 1) if options.timestep_spacing == "leading" else largest
    noise = sigmas[first:-1]
    return assemble(
        timesteps[first:],
        matrices,
        (np.ones(len(noise)), noise),
        input_scales=1 / np.sqrt(noise**2 + 1),
        init_noise_sigma=initial,
        needs_noise=needs_noise,
    )


def plan_euler(options: SchedulerOptions, request: PlanRequest) -> SamplingPlan:
    """Euler's method for the probability flow, arXiv:2206.00364, algorithm 1 without its correction.

    diffusers: `EulerDiscreteScheduler`.
    """
    timesteps, sigmas = _schedule(options, request)
    matrices = []
    for sigma, following in pairwise(sigmas[request.skipped :]):
        matrices.append(new_state(LATENTS + (following - sigma) * _slope(options, sigma)))
    return _assemble(options, timesteps, sigmas, matrices)


def plan_euler_ancestral(options: SchedulerOptions, request: PlanRequest) -> SamplingPlan:
    """Ancestral sampling: Euler's method to below the next noise level, then fresh noise up to that level.

    The share of fresh noise is as in DDPM, arXiv:2010.02502, equation 16 with eta = 1, for latents with unscaled
    data. Source: `get_ancestral_step` of k-diffusion; diffusers: `EulerAncestralDiscreteScheduler`.
    """
    timesteps, sigmas = _schedule(options, request)
    matrices = []
    for sigma, following in pairwise(sigmas[request.skipped :]):
        down = following**2 / sigma
        fresh = following * np.sqrt(max(1 - following**2 / sigma**2, 0.0))
        matrices.append(new_state(LATENTS + (down - sigma) * _slope(options, sigma) + fresh * NOISE))
    return _assemble(options, timesteps, sigmas, matrices, needs_noise=True)


def plan_heun(options: SchedulerOptions, request: PlanRequest) -> SamplingPlan:
    """Heun's method for the probability flow, arXiv:2206.00364, algorithm 1. diffusers: `HeunDiscreteScheduler`.

    A step has two calls: an Euler step, then the same step with the mean of the slopes at both ends. The last step
    ends without noise, where the slope is undefined, and has one call. History: the first slope, and the latents
    before the step.
    """
    spaced, levels = _schedule(options, request)
    timesteps = np.concatenate([spaced[:1], np.repeat(spaced[1:], 2)])
    sigmas = np.concatenate([levels[:1], np.repeat(levels[1:-1], 2), levels[-1:]])
    matrices = []
    for sigma, following in pairwise(levels[request.skipped :]):
        first = _slope(options, sigma)
        matrices.append(new_state(LATENTS + (following - sigma) * first, first, LATENTS))
        if following > 0:
            mean = (HISTORY[0] + _slope(options, following)) / 2
            matrices.append(new_state(HISTORY[1] + (following - sigma) * mean))
    return _assemble(options, timesteps, sigmas, matrices)
