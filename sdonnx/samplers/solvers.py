"""The solvers: each one turns scheduler options and a number of steps into a plan.

A formula of a paper is written here as it stands: `LATENTS`, `NOISE`, `PREDICTION` and `HISTORY[k]` are rows
of an identity matrix, so a linear combination of them is a row of the coefficient matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers.options import SchedulerOptions
from sdonnx.samplers.schedule import (
    cumulative_alphas,
    deformed_sigmas,
    spaced_timesteps,
    timesteps_of_sigmas,
    training_sigmas,
)

__all__ = ["STATE_ROWS", "SamplingPlan", "plan_ddim", "plan_dpm_solver_pp", "plan_euler", "plan_pndm"]

STATE_ROWS = 5

Row = NDArray[np.float64]

_IDENTITY: Row = np.eye(STATE_ROWS + 2)
LATENTS: Row = _IDENTITY[0]
HISTORY: Row = _IDENTITY[1:STATE_ROWS]
NOISE: Row = _IDENTITY[-2]
PREDICTION: Row = _IDENTITY[-1]


@dataclass(frozen=True)
class SamplingPlan:
    """What to compute at each of the n calls of the denoiser.

    Attributes:
        timesteps: (n,) float32, what the denoiser is told.
        input_scales: (n,) float32, the denoiser sees latents * input_scale.
        matrices: (n, STATE_ROWS, STATE_ROWS + 2) float64; new state = matrix @ [state, noise, prediction].
            Row 0 of the state is the latents, the others are history and start at 0.
        init_noise_sigma: the initial latents are Gaussian noise times this.
        needs_noise: (n,) bool, the calls that want fresh Gaussian noise in the noise row.
    """

    timesteps: NDArray[np.float32]
    input_scales: NDArray[np.float32]
    matrices: NDArray[np.float64]
    init_noise_sigma: float
    needs_noise: NDArray[np.bool_]


def _make(
    timesteps: NDArray[np.float64],
    matrices: list[Row],
    input_scales: NDArray[np.float64] | None = None,
    init_noise_sigma: float = 1.0,
    fresh_noise: bool = False,
) -> SamplingPlan:
    count = len(timesteps)
    scales = np.ones(count) if input_scales is None else input_scales
    return SamplingPlan(
        timesteps=timesteps.astype(np.float32),
        input_scales=scales.astype(np.float32),
        matrices=np.stack(matrices),
        init_noise_sigma=float(init_noise_sigma),
        needs_noise=np.full(count, fresh_noise),
    )


def _state(latents: Row, *history: Row) -> Row:
    """Stack the new state's rows; history that is not kept becomes 0."""
    matrix = np.zeros((STATE_ROWS, STATE_ROWS + 2))
    matrix[0] = latents
    for row, kept in enumerate(history, start=1):
        matrix[row] = kept
    return matrix


def _predicted_data(prediction_type: str, latents: Row, alpha: float, sigma: float) -> Row:
    """Return the denoised latents that a prediction means, for latents = alpha * data + sigma * noise.

    Source: arXiv:2202.00512, appendix D (v = alpha * noise - sigma * data).
    """
    if prediction_type == "sample":
        return PREDICTION
    if prediction_type == "v_prediction":
        return alpha * latents - sigma * PREDICTION
    return (latents - sigma * PREDICTION) / alpha


def _predicted_noise(prediction_type: str, latents: Row, prediction: Row, alpha: float, sigma: float) -> Row:
    """Return the noise that a prediction means, for latents = alpha * data + sigma * noise."""
    if prediction_type == "sample":
        return (latents - alpha * prediction) / sigma
    if prediction_type == "v_prediction":
        return alpha * prediction + sigma * latents
    return prediction


def _whole_timesteps(options: SchedulerOptions, steps: int) -> NDArray[np.float64]:
    """Return the spaced timesteps as whole numbers, all of which index the training schedule."""
    timesteps = np.round(spaced_timesteps(options, steps))
    if timesteps[0] >= options.num_train_timesteps or timesteps[-1] < 0:
        raise OptionError(
            f"{steps} steps with steps_offset = {options.steps_offset} start at timestep {timesteps[0]:.0f}",
            f"timesteps from 0 to {options.num_train_timesteps - 1}",
            "ask for fewer steps or correct scheduler_config.json",
        )
    return timesteps


def plan_ddim(options: SchedulerOptions, steps: int, eta: float) -> SamplingPlan:
    """DDIM, arXiv:2010.02502, equations 12 and 16. diffusers: `DDIMScheduler`."""
    alpha_bars = cumulative_alphas(options).astype(np.float64)
    final = 1.0 if options.set_alpha_to_one else alpha_bars[0]
    timesteps = _whole_timesteps(options, steps)
    kind = options.prediction_type
    matrices = []
    for t in timesteps.astype(int):
        previous = t - options.num_train_timesteps // steps
        now, then = alpha_bars[t], alpha_bars[previous] if previous >= 0 else final
        alpha, sigma = np.sqrt(now), np.sqrt(1 - now)
        variance = eta**2 * (1 - then) / (1 - now) * (1 - now / then)
        data = _predicted_data(kind, LATENTS, alpha, sigma)
        noise = _predicted_noise(kind, LATENTS, PREDICTION, alpha, sigma)
        direction = np.sqrt(max(1 - then - variance, 0.0)) * noise
        matrices.append(_state(np.sqrt(then) * data + direction + np.sqrt(variance) * NOISE))
    return _make(timesteps, matrices, fresh_noise=eta > 0)


# Weights of the newest and the older predictions: arXiv:2202.09778, equation 12, and the orders below it.
_ADAMS_BASHFORTH = (
    (1.0,),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


def plan_pndm(options: SchedulerOptions, steps: int, eta: float) -> SamplingPlan:
    """Pseudo linear multistep (PLMS), arXiv:2202.09778, equations 9 and 12. diffusers: `PNDMScheduler`.

    The first step is taken twice, the second time with the mean of two predictions (Heun). History: the last
    three predictions, newest first, and the latents that the first step started from.
    """
    alpha_bars = cumulative_alphas(options).astype(np.float64)
    final = 1.0 if options.set_alpha_to_one else alpha_bars[0]
    spaced = _whole_timesteps(options, steps)
    timesteps = np.concatenate([spaced[:2], spaced[1:]])
    ratio = options.num_train_timesteps // steps
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
        noise = _predicted_noise(options.prediction_type, latents, mixed, alpha, sigma)
        scale = now * np.sqrt(1 - then) + np.sqrt(now * (1 - now) * then)
        matrices.append(_state(np.sqrt(then / now) * latents - (then - now) / scale * noise, *history))
    return _make(timesteps, matrices)


def _with_final_sigma(
    options: SchedulerOptions, sigmas: NDArray[np.float64], training: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Append the noise level that sampling ends at; diffusers keeps sigmas in single precision."""
    last = training[0] if options.final_sigmas_type == "sigma_min" else np.float32(0)
    return np.append(sigmas.astype(np.float32), last).astype(np.float64)


def plan_euler(options: SchedulerOptions, steps: int, eta: float) -> SamplingPlan:
    """Euler's method on the probability flow, arXiv:2206.00364, algorithm 1 without its correction.

    diffusers: `EulerDiscreteScheduler`. The latents are data + sigma * noise.
    """
    training = training_sigmas(cumulative_alphas(options, never_zero=True))
    timesteps = spaced_timesteps(options, steps).astype(np.float32).astype(np.float64)
    sigmas = np.interp(timesteps, np.arange(len(training)), training)
    deformed = deformed_sigmas(options, sigmas, len(timesteps))
    if deformed is not None:
        sigmas, timesteps = deformed, timesteps_of_sigmas(deformed, training)
    sigmas = _with_final_sigma(options, sigmas, training)
    alphas = 1 / np.sqrt(sigmas**2 + 1)
    matrices = []
    for alpha, sigma, following in zip(alphas, sigmas, sigmas[1:], strict=False):
        data = _predicted_data(options.prediction_type, alpha * LATENTS, alpha, alpha * sigma)
        matrices.append(_state(LATENTS + (following - sigma) * (LATENTS - data) / sigma))
    largest = sigmas.max()
    # diffusers' `init_noise_sigma`: only "leading" counts the variance of the data in.
    initial = np.sqrt(largest**2 + 1) if options.timestep_spacing == "leading" else largest
    return _make(timesteps, matrices, input_scales=alphas[:-1], init_noise_sigma=initial)


def _dpm_solver_sigmas(options: SchedulerOptions, steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the timesteps (n,) and the sigmas (n + 1,) of `DPMSolverMultistepScheduler.set_timesteps`."""
    alpha_bars = cumulative_alphas(options, never_zero=True)
    training = training_sigmas(alpha_bars)
    log_snr = np.log(np.sqrt(alpha_bars)) - np.log(np.sqrt(np.float32(1) - alpha_bars))
    last = len(training) - int(np.searchsorted(log_snr[::-1], options.lambda_min_clipped))
    if last < 1:
        raise SchedulerError(
            f"lambda_min_clipped = {options.lambda_min_clipped} leaves no timestep",
            "a bound below the schedule's largest log signal-to-noise ratio",
            "correct scheduler_config.json",
        )
    timesteps = np.round(spaced_timesteps(options, steps, last=last, beyond=1))
    sigmas = np.interp(timesteps, np.arange(len(training)), training)
    deformed = deformed_sigmas(options, training[::-1], steps)
    if deformed is not None:
        sigmas, timesteps = deformed, timesteps_of_sigmas(deformed, training)
        if options.use_karras_sigmas and options.beta_schedule != "squaredcos_cap_v2":
            timesteps = np.round(timesteps)
    return np.trunc(timesteps), _with_final_sigma(options, sigmas, training)


def plan_dpm_solver_pp(options: SchedulerOptions, steps: int, eta: float) -> SamplingPlan:
    """DPM-Solver++ of order 1 and 2M, arXiv:2211.01095, section 4 and algorithm 2.

    diffusers: `DPMSolverMultistepScheduler` with algorithm_type "dpmsolver++"; its two solver types differ in
    how they weigh the slope. History: the last predicted data.
    """
    timesteps, sigmas = _dpm_solver_sigmas(options, steps)
    count = len(timesteps)
    alphas = 1 / np.sqrt(sigmas**2 + 1)
    ends_first_order = options.final_sigmas_type == "zero" or options.euler_at_final
    ends_first_order = ends_first_order or (options.lower_order_final and count < 15)
    matrices = []
    for i in range(count):
        alpha, sigma, next_alpha, next_sigma = alphas[i], sigmas[i], alphas[i + 1], sigmas[i + 1]
        data = _predicted_data(options.prediction_type, LATENTS, alpha, alpha * sigma)
        # exp(-h) - 1, where h is the growth of log(1 / sigma) over the step.
        decay = next_sigma / sigma - 1
        latents = next_alpha * next_sigma / (alpha * sigma) * LATENTS - next_alpha * decay * data
        first_order = options.solver_order == 1 or i == 0 or (i == count - 1 and ends_first_order)
        # Where sigmas repeat, because there are nearly as many steps as timesteps, there is no slope to use.
        if not first_order and sigmas[i - 1] != sigma != next_sigma:
            h, h_before = np.log(sigma / next_sigma), np.log(sigmas[i - 1] / sigma)
            slope = (data - HISTORY[0]) * (h / h_before)
            weight = decay / h + 1 if options.solver_type == "heun" else -0.5 * decay
            latents = latents + next_alpha * weight * slope
        matrices.append(_state(latents, data))
    return _make(timesteps, matrices)
