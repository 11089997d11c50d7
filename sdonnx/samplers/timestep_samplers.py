"""Samplers that step between training timesteps: DDIM and PNDM, and LCM and TCD of distilled models.

Their latents are sqrt(alpha_bar) * data + sqrt(1 - alpha_bar) * noise at every timestep. LCM and TCD predict the end of
a trajectory, and choose their timesteps from those that the model was distilled with.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import SchedulerError
from sdonnx.samplers.noise_schedule import (
    cumulative_alphas,
    custom_timesteps,
    diffusion_levels,
    too_many_steps,
    whole_timesteps,
)
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

__all__ = ["plan_ddim", "plan_lcm", "plan_pndm", "plan_tcd"]


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


# Standard deviation of the data in the boundary conditions: arXiv:2206.00364, table 1.
_SIGMA_DATA = 0.5


def plan_lcm(options: SchedulerOptions, request: PlanRequest) -> SamplingPlan:
    """Multistep consistency sampling, arXiv:2303.01469, algorithm 1, of latents (LCM, arXiv:2310.04378).

    The denoised latents are c_out * data + c_skip * latents, arXiv:2303.01469, equation 5, with the c_skip and c_out
    that latent consistency models are distilled with: `get_scalings_for_boundary_condition_discrete` of diffusers'
    `LCMScheduler`. The last step adds no noise.
    """
    alpha_bars = cumulative_alphas(options).astype(np.float64)
    timesteps = _timesteps("LCMScheduler", options, request)[request.skipped :]
    levels = diffusion_levels(alpha_bars, timesteps)
    alphas, sigmas = levels
    matrices = []
    for i, (t, alpha, sigma) in enumerate(zip(timesteps, alphas, sigmas, strict=True)):
        time = t * options.timestep_scaling
        skip = _SIGMA_DATA**2 / (time**2 + _SIGMA_DATA**2)
        out = time / np.sqrt(time**2 + _SIGMA_DATA**2)
        denoised = out * predicted_data(options.prediction_type, LATENTS, alpha, sigma) + skip * LATENTS
        if i + 1 < len(timesteps):
            denoised = alphas[i + 1] * denoised + sigmas[i + 1] * NOISE
        matrices.append(new_state(denoised))
    return assemble(timesteps, matrices, levels, needs_noise=_all_but_the_last(len(timesteps)))


def plan_tcd(options: SchedulerOptions, request: PlanRequest) -> SamplingPlan:
    """Strategic stochastic sampling of trajectory consistency distillation, arXiv:2402.19159, algorithm 4.

    A step denoises to timestep s = floor((1 - gamma) * next timestep), then adds noise up to the next timestep. gamma
    is `eta`: 0 is deterministic, and 1 denoises to timestep 0, as LCM does. The last step ends at timestep 0: its
    small share of noise remains. diffusers: `TCDScheduler`.
    """
    alpha_bars = cumulative_alphas(options).astype(np.float64)
    timesteps = _timesteps("TCDScheduler", options, request)[request.skipped :]
    following = np.append(timesteps[1:], 0.0)
    # diffusers multiplies in single precision, which decides some of the floors.
    reached = np.floor(np.float32(1 - request.eta) * following.astype(np.float32)).astype(int)
    kind, levels = options.prediction_type, diffusion_levels(alpha_bars, timesteps)
    matrices = []
    for s, then, alpha, sigma in zip(reached, following.astype(int), *levels, strict=True):
        data = predicted_data(kind, LATENTS, alpha, sigma)
        noise = predicted_noise(kind, LATENTS, PREDICTION, alpha, sigma)
        denoised = np.sqrt(alpha_bars[s]) * data + np.sqrt(1 - alpha_bars[s]) * noise
        kept = alpha_bars[then] / alpha_bars[s]
        matrices.append(new_state(np.sqrt(kept) * denoised + np.sqrt(1 - kept) * NOISE))
    return assemble(timesteps, matrices, levels, needs_noise=_all_but_the_last(len(timesteps)) & (request.eta > 0))


def _all_but_the_last(count: int) -> NDArray[np.bool_]:
    return np.arange(count) < count - 1


def _timesteps(class_name: str, options: SchedulerOptions, request: PlanRequest) -> NDArray[np.float64]:
    """Return the custom timesteps, or `steps` of those that the model was distilled with, falling, (steps,).

    Source: `set_timesteps` of diffusers' `LCMScheduler` and `TCDScheduler`.

    Raises:
        SchedulerError: original_inference_steps is outside the training schedule.
        OptionError: there are more steps than distilled timesteps, or a custom timestep is outside the schedule.
    """
    distilled, total = options.original_inference_steps, options.num_train_timesteps
    if not 1 <= distilled <= total:
        raise SchedulerError(
            f"{class_name} has original_inference_steps = {distilled}",
            f"1 to num_train_timesteps, {total}",
            "correct scheduler_config.json",
        )
    given = custom_timesteps(options, request)
    if given is not None:
        return np.trunc(given)
    if request.steps > distilled:
        raise too_many_steps(request.steps, distilled)
    falling = (np.arange(1, distilled + 1) * (total // distilled) - 1)[::-1]
    chosen = np.floor(np.linspace(0, distilled, request.steps, endpoint=False)).astype(int)
    timesteps: NDArray[np.float64] = falling[chosen].astype(np.float64)
    return timesteps
