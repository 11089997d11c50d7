"""Samplers of distilled models that predict the end of a trajectory: LCM and TCD.

Both choose their timesteps from those that the model was distilled with. Their latents are
sqrt(alpha_bar) * data + sqrt(1 - alpha_bar) * noise at every timestep.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import SchedulerError
from sdonnx.samplers.options import PlanRequest, SchedulerOptions
from sdonnx.samplers.plans import (
    LATENTS,
    NOISE,
    PREDICTION,
    SamplingPlan,
    assemble,
    new_state,
    predicted_data,
    predicted_noise,
)
from sdonnx.samplers.schedule import cumulative_alphas, custom_timesteps, diffusion_levels, too_many_steps

__all__ = ["plan_lcm", "plan_tcd"]

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
