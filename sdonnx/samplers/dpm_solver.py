"""DPM-Solver++: multistep solvers of order 1 to 3 for the data prediction, with and without fresh noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import SchedulerError
from sdonnx.samplers.flow import dpm_solver_flow_sigmas
from sdonnx.samplers.noise_levels import NoiseLevels
from sdonnx.samplers.options import PlanRequest, SchedulerOptions
from sdonnx.samplers.plans import HISTORY, LATENTS, NOISE, Row, SamplingPlan, assemble, new_state
from sdonnx.samplers.schedule import (
    cumulative_alphas,
    custom_timesteps,
    deformed_sigmas,
    spaced_timesteps,
    timesteps_of_sigmas,
    training_sigmas,
    with_final_sigma,
)

__all__ = ["plan_dpm_solver_pp"]


def _schedule(options: SchedulerOptions, request: PlanRequest) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the timesteps (n,) and the sigmas (n + 1,) of `DPMSolverMultistepScheduler.set_timesteps`."""
    alpha_bars = cumulative_alphas(options, never_zero=True)
    training = training_sigmas(alpha_bars)
    last = training[0] if options.final_sigmas_type == "sigma_min" else 0.0
    if options.use_flow_sigmas and request.timesteps is None:
        sigmas = dpm_solver_flow_sigmas(options, request)
        return np.trunc(sigmas * options.num_train_timesteps), with_final_sigma(sigmas, last)
    log_snr = np.log(np.sqrt(alpha_bars)) - np.log(np.sqrt(np.float32(1) - alpha_bars))
    kept = len(training) - int(np.searchsorted(log_snr[::-1], options.lambda_min_clipped))
    if kept < 1:
        raise SchedulerError(
            f"lambda_min_clipped = {options.lambda_min_clipped} leaves no timestep",
            "a bound below the schedule's largest log signal-to-noise ratio",
            "correct scheduler_config.json",
        )
    given = custom_timesteps(options, request)
    if given is None:
        given = np.round(spaced_timesteps(options, request.steps, last=kept, beyond=1))
    timesteps = np.trunc(given)
    sigmas = np.interp(timesteps, np.arange(len(training)), training)
    deformed = deformed_sigmas(options, training[::-1], request.steps)
    if deformed is not None:
        sigmas, timesteps = deformed, timesteps_of_sigmas(deformed, training)
        if options.use_karras_sigmas and options.beta_schedule != "squaredcos_cap_v2":
            timesteps = np.round(timesteps)
    return np.trunc(timesteps), with_final_sigma(sigmas, last)


def _step(levels: NoiseLevels, i: int, data: Row, order: int, *, heun: bool, stochastic: bool) -> Row:
    """Return the latents of level i + 1, given the latents of level i, the data predicted there and `HISTORY`.

    arXiv:2211.01095, section 4: a Taylor expansion of the data in log(alpha / sigma), integrated exactly. Order 1
    uses the value, order 2 also the slope, order 3 also the second derivative. With fresh noise (SDE-DPM-Solver++)
    all terms decay by twice the growth, and noise restores the variance.
    """
    alpha, sigma = levels.at(i + 1)
    h = levels.growth(i, i + 1)
    decay = 2 * h if stochastic else h
    left = float(np.exp(-decay))
    kept = sigma / levels.at(i)[1] * (float(np.exp(-h)) if stochastic else 1.0)
    latents: Row = kept * LATENTS + alpha * (1 - left) * data
    if stochastic:
        latents = latents + sigma * np.sqrt(1 - left) * NOISE
    if order == 1:
        return latents
    before = levels.growth(i - 1, i)
    slope = (data - HISTORY[0]) * (h / before)
    first = (left - 1) / decay + 1
    if order == 2:
        latents = latents + alpha * (first if heun else (1 - left) / 2) * slope
        return latents
    earlier = levels.growth(i - 2, i - 1)
    bend = (slope - (HISTORY[0] - HISTORY[1]) * (h / earlier)) * (h / (before + earlier))
    # This vanishes with h if the constant is + 1/2. diffusers' stochastic solver has - 1/2, as here.
    second = (1 - left - decay) / decay**2 + (-0.5 if stochastic else 0.5)
    latents = latents + alpha * (first * (slope + bend * (before / h)) + second * bend)
    return latents


def plan_dpm_solver_pp(options: SchedulerOptions, request: PlanRequest) -> SamplingPlan:
    """DPM-Solver++ of order 1 to 3 (2M: order 2), arXiv:2211.01095, section 4 and algorithm 2.

    diffusers: `DPMSolverMultistepScheduler` with algorithm_type "dpmsolver++" or "sde-dpmsolver++". The two solver
    types differ in the weight of the slope in order 2. History: the last two data predictions, newest first.
    """
    timesteps, sigmas = _schedule(options, request)
    levels = NoiseLevels.from_sigmas(sigmas, flow=options.use_flow_sigmas)
    count = len(timesteps)
    stochastic = options.algorithm_type == "sde-dpmsolver++"
    few = options.lower_order_final and count < 15
    ends_first_order = options.final_sigmas_type == "zero" or options.euler_at_final or few
    matrices = []
    for i in range(request.skipped, count):
        order = min(options.solver_order, i - request.skipped + 1)
        if i == count - 2 and few:
            order = min(order, 2)
        # Sigmas repeat if there are nearly as many steps as timesteps. The slope is then undefined.
        distinct = sigmas[i + 1] != sigmas[i]
        while order > 1 and not (distinct and (np.diff(sigmas[i - order + 1 : i + 1]) != 0).all()):
            order -= 1
        if i == count - 1 and ends_first_order:
            order = 1
        data = levels.data(options.prediction_type, i)
        latents = _step(levels, i, data, order, heun=options.solver_type == "heun", stochastic=stochastic)
        matrices.append(new_state(latents, data, HISTORY[0]))
    return assemble(timesteps[request.skipped :], matrices, levels.scales(request.skipped), needs_noise=stochastic)
