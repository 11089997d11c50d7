"""Samplers that step between training timesteps: DDIM and PNDM.

Their latents are sqrt(alpha_bar) * data + sqrt(1 - alpha_bar) * noise at every timestep.
"""

from __future__ import annotations

import numpy as np

from sdonnx.samplers.options import PlanRequest, SchedulerOptions
from sdonnx.samplers.plans import (
    HISTORY,
    LATENTS,
    NOISE,
    PREDICTION,
    SamplingPlan,
    assemble,
    new_state,
    predicted_data,
    predicted_noise,
)
from sdonnx.samplers.schedule import cumulative_alphas, diffusion_levels, whole_timesteps

__all__ = ["plan_ddim", "plan_pndm"]


def plan_ddim(options: SchedulerOptions, request: PlanRequest) -> SamplingPlan:
    """DDIM, arXiv:2010.02502, equations 12 and 16. diffusers: `DDIMScheduler`."""
    alpha_bars = cumulative_alphas(options).astype(np.float64)
    final = 1.0 if options.set_alpha_to_one else alpha_bars[0]
    timesteps = whole_timesteps(options, request.steps)[request.skipped :]
    kind = options.prediction_type
    matrices = []
    for t in timesteps.astype(int):
        previous = t - options.num_train_timesteps // request.steps
        now, then = alpha_bars[t], alpha_bars[previous] if previous >= 0 else final
        alpha, sigma = np.sqrt(now), np.sqrt(1 - now)
        variance = request.eta**2 * (1 - then) / (1 - now) * (1 - now / then)
        data = predicted_data(kind, LATENTS, alpha, sigma)
        noise = predicted_noise(kind, LATENTS, PREDICTION, alpha, sigma)
        direction = np.sqrt(max(1 - then - variance, 0.0)) * noise
        matrices.append(new_state(np.sqrt(then) * data + direction + np.sqrt(variance) * NOISE))
    return assemble(timesteps, matrices, diffusion_levels(alpha_bars, timesteps), needs_noise=request.eta > 0)


# Weights of the predictions, newest first: arXiv:2202.09778, equation 12, and its lower orders.
_ADAMS_BASHFORTH = (
    (1.0,),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


def plan_pndm(options: SchedulerOptions, request: PlanRequest) -> SamplingPlan:
    """Pseudo linear multistep (PLMS), arXiv:2202.09778, equations 9 and 12. diffusers: `PNDMScheduler`.

    The first step is taken twice, the second time with the mean of two predictions (Heun). History: the last three
    predictions, newest first, and the latents before the first step.

    diffusers skips steps by cutting the list of calls, in which the second timestep occurs twice, and still treats
    the second remaining call as the correction of the first. This function does the same.
    """
    alpha_bars = cumulative_alphas(options).astype(np.float64)
    final = 1.0 if options.set_alpha_to_one else alpha_bars[0]
    spaced = whole_timesteps(options, request.steps)
    timesteps = np.concatenate([spaced[:2], spaced[1:]])[request.skipped :]
    ratio = options.num_train_timesteps // request.steps
    *older, start = HISTORY
    matrices = []
    for call, t in enumerate(timesteps.astype(int)):
        previous = t - ratio
        if call == 1:
            t, previous = t + ratio, t
        now, then = alpha_bars[t], alpha_bars[previous] if previous >= 0 else final
        alpha, sigma = np.sqrt(now), np.sqrt(1 - now)
        latents = start if call == 1 else LATENTS
        if call == 1:
            mixed = (PREDICTION + older[0]) / 2
            history = older
        else:
            weights = _ADAMS_BASHFORTH[min(max(call - 1, 0), 3)]
            mixed = sum((w * row for w, row in zip(weights, (PREDICTION, *older), strict=False)), 0 * LATENTS)
            history = [PREDICTION, *older[:-1], LATENTS if call == 0 else 0 * LATENTS]
        noise = predicted_noise(options.prediction_type, latents, mixed, alpha, sigma)
        scale = now * np.sqrt(1 - then) + np.sqrt(now * (1 - now) * then)
        matrices.append(new_state(np.sqrt(then / now) * latents - (then - now) / scale * noise, *history))
    return assemble(timesteps, matrices, diffusion_levels(alpha_bars, timesteps))
