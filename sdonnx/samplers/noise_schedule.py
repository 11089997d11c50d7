"""Noise schedules: from scheduler options to cumulative alphas, timesteps and sigmas.

The functions compute the same values as `__init__` and `set_timesteps` of diffusers' schedulers. Where rounding
decides a value (single-precision betas, a timestep truncated to an integer), the same rounding is applied here.

Notation: alpha_bar is the cumulative product of (1 - beta) of DDPM (arXiv:2006.11239, equation 4), and
sigma = sqrt((1 - alpha_bar) / alpha_bar) is the noise level of latents that are scaled so that the data
keeps its size (arXiv:2206.00364, table 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers.options import PlanRequest, SchedulerOptions
from sdonnx.samplers.plans import LATENTS, PREDICTION, Row, predicted_data, predicted_noise

__all__ = [
    "NoiseLevels",
    "cumulative_alphas",
    "custom_timesteps",
    "deformed_sigmas",
    "diffusion_levels",
    "spaced_timesteps",
    "timesteps_of_sigmas",
    "too_many_steps",
    "training_sigmas",
    "whole_timesteps",
    "with_final_sigma",
]

# The smallest positive half-precision number, which diffusers uses as the alpha_bar of pure noise.
_NEARLY_ZERO_ALPHA = 2.0**-24

# Karras et al., arXiv:2206.00364, equation 5, with the recommended value.
_KARRAS_RHO = 7.0


def _linspace(start: float, end: float, count: int) -> NDArray[np.float32]:
    """Return `torch.linspace(start, end, count)`: single precision, and symmetric from both ends."""
    if count == 1:
        return np.array([start], np.float32)
    first, last = np.float32(start), np.float32(end)
    step = (last - first) / np.float32(count - 1)
    # torch multiplies and adds with one rounding; double precision represents the product exactly.
    offset = np.arange(count) * np.float64(step)
    points = np.where(np.arange(count) < count // 2, first + offset, last - offset[::-1])
    return points.astype(np.float32)


def _cosine_betas(count: int) -> NDArray[np.float32]:
    """Return the betas of Nichol and Dhariwal's cosine schedule (arXiv:2102.09672, equation 17)."""

    def alpha_bar(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1 - alpha_bar((i + 1) / count) / alpha_bar(i / count), 0.999) for i in range(count)]
    return np.array(betas, np.float32)


def _cumulative_product(alphas: NDArray[np.float32]) -> NDArray[np.float32]:
    # torch.cumprod accumulates single precision in double precision.
    return np.cumprod(alphas, dtype=np.float64).astype(np.float32)


def _rescale_to_zero_snr(betas: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return betas with pure noise at the last timestep (arXiv:2305.08891, algorithm 1)."""
    roots = np.sqrt(_cumulative_product(np.float32(1) - betas))
    shifted = (roots - roots[-1]) * (roots[0] / (roots[0] - roots[-1]))
    alpha_bar = shifted * shifted
    alphas = np.concatenate([alpha_bar[:1], alpha_bar[1:] / alpha_bar[:-1]])
    return np.float32(1) - alphas


def cumulative_alphas(options: SchedulerOptions, *, never_zero: bool = False) -> NDArray[np.float32]:
    """Return alpha_bar at every training timestep, (num_train_timesteps,).

    Args:
        options: the scheduler's options.
        never_zero: keep the last value above zero after rescaling to zero terminal SNR, as do diffusers' schedulers
            that divide by it.
    """
    count = options.num_train_timesteps
    if options.trained_betas is not None:
        betas = np.array(options.trained_betas, np.float32)
    elif options.beta_schedule == "linear":
        betas = _linspace(options.beta_start, options.beta_end, count)
    elif options.beta_schedule == "scaled_linear":
        betas = _linspace(float(np.sqrt(options.beta_start)), float(np.sqrt(options.beta_end)), count) ** 2
    else:
        betas = _cosine_betas(count)
    if options.rescale_betas_zero_snr:
        betas = _rescale_to_zero_snr(betas)
    alphas = _cumulative_product(np.float32(1) - betas)
    if options.rescale_betas_zero_snr and never_zero:
        alphas[-1] = _NEARLY_ZERO_ALPHA
    return alphas


def diffusion_levels(
    alpha_bars: NDArray[np.float64], timesteps: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the scales of data and noise at each timestep: DDPM, arXiv:2006.11239, equation 4."""
    now = alpha_bars[timesteps.astype(int)]
    return np.sqrt(now), np.sqrt(1 - now)


def spaced_timesteps(
    options: SchedulerOptions, steps: int, *, last: int | None = None, beyond: int = 0
) -> NDArray[np.float64]:
    """Return the timesteps of `steps` steps, falling, (steps,), as table 2 of arXiv:2305.08891 spaces them.

    Args:
        options: the scheduler's options; "leading" and "trailing" return whole numbers, "linspace" fractions.
        steps: number of steps.
        last: number of training timesteps to spread over. Default: all.
        beyond: number of additional points to spread and then drop at the end without noise.

    Raises:
        OptionError: there are more steps than timesteps.
    """
    total = options.num_train_timesteps
    last = total if last is None else last
    points = steps + beyond
    if options.timestep_spacing == "linspace":
        return np.linspace(0, last - 1, points)[::-1][:steps]
    if options.timestep_spacing == "leading":
        if points > last:
            raise too_many_steps(steps, last - beyond)
        rising = np.arange(points, dtype=np.float64) * (last // points) + options.steps_offset
        return rising[::-1][:steps]
    # np.arange rounds its length up: for 62 of the step counts up to 1000 (the first is 61) diffusers takes one more
    # step, at timestep -1, which no denoiser was trained on. It is dropped here.
    falling = np.round(np.arange(last, 0, -total / steps)) - 1
    return falling[falling >= 0]


def custom_timesteps(options: SchedulerOptions, request: PlanRequest) -> NDArray[np.float64] | None:
    """Return the custom timesteps of a request, (steps,), or None if there are none.

    Args:
        options: the scheduler's options.
        request: the request.

    Raises:
        OptionError: options set other noise levels, or a timestep is outside the training schedule.
    """
    if request.timesteps is None:
        return None
    for option in ("use_karras_sigmas", "use_exponential_sigmas", "use_flow_sigmas"):
        if getattr(options, option):
            raise OptionError(f"timesteps given and {option} = true", "one of them")
    maximum = options.num_train_timesteps - 1
    if request.timesteps[0] > maximum:
        raise OptionError(f"timesteps start at {request.timesteps[0]:g}", f"at most {maximum}")
    return np.array(request.timesteps)


def whole_timesteps(options: SchedulerOptions, steps: int) -> NDArray[np.float64]:
    """Return the spaced timesteps as whole numbers that index the training schedule, (steps,).

    Raises:
        OptionError: a timestep is outside the training schedule.
    """
    timesteps = np.round(spaced_timesteps(options, steps))
    if timesteps[0] >= options.num_train_timesteps or timesteps[-1] < 0:
        raise OptionError(
            f"{steps} steps with steps_offset = {options.steps_offset} start at timestep {timesteps[0]:.0f}",
            f"timesteps from 0 to {options.num_train_timesteps - 1}",
            "ask for fewer steps or correct scheduler_config.json",
        )
    return timesteps


def too_many_steps(steps: int, maximum: int) -> OptionError:
    """Return the error for more steps than the schedule has timesteps."""
    return OptionError(f"num_inference_steps is {steps}", f"at most {maximum} with this schedule")


def training_sigmas(alphas: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return sigma = sqrt((1 - alpha_bar) / alpha_bar) at every training timestep, rising, (T,)."""
    sigmas: NDArray[np.float32] = np.sqrt((np.float32(1) - alphas) / alphas)
    return sigmas


def deformed_sigmas(options: SchedulerOptions, sigmas: NDArray[Any], steps: int) -> NDArray[np.float64] | None:
    """Return Karras' or exponential sigmas, falling, (steps,), or None if the options select neither.

    Karras: equation 5 of arXiv:2206.00364. Exponential: evenly spaced logarithms.

    Args:
        options: the scheduler's options.
        sigmas: falling; the first and the last are the range, unless sigma_max and sigma_min set it.
        steps: number of steps.

    Raises:
        SchedulerError: the range is empty or not positive.
    """
    low = float(sigmas[-1]) if options.sigma_min is None else options.sigma_min
    high = float(sigmas[0]) if options.sigma_max is None else options.sigma_max
    if not (options.use_karras_sigmas or options.use_exponential_sigmas):
        return None
    if not 0 < low <= high:
        raise SchedulerError(
            f"the noise levels run from sigma_max = {high} to sigma_min = {low}",
            "positive noise levels that fall",
            "correct scheduler_config.json",
        )
    deformed: NDArray[np.float64]
    if options.use_karras_sigmas:
        from_high, from_low = high ** (1 / _KARRAS_RHO), low ** (1 / _KARRAS_RHO)
        deformed = (from_high + np.linspace(0, 1, steps) * (from_low - from_high)) ** _KARRAS_RHO
    else:
        deformed = np.exp(np.linspace(math.log(high), math.log(low), steps))
    return deformed


def timesteps_of_sigmas(sigmas: NDArray[np.float64], training: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the fractional training timesteps of these sigmas, interpolated in their logarithms.

    Source: diffusers' `EulerDiscreteScheduler._sigma_to_t`.

    Args:
        sigmas: (n,).
        training: sigmas of the training timesteps, rising, (T,).
    """
    logs = np.log(np.maximum(sigmas, 1e-10))
    training_logs = np.log(training)
    below = np.searchsorted(training_logs.astype(np.float64), logs, side="right") - 1
    below = below.clip(0, len(training) - 2)
    low, high = training_logs[below], training_logs[below + 1]
    weight = np.clip((low - logs) / (low - high), 0, 1)
    timesteps: NDArray[np.float64] = (1 - weight) * below + weight * (below + 1)
    return timesteps


def with_final_sigma(sigmas: NDArray[np.float64], last: float | np.float32) -> NDArray[np.float64]:
    """Append the noise level at which sampling ends. diffusers keeps sigmas in single precision."""
    return np.append(sigmas.astype(np.float32), np.float32(last)).astype(np.float64)


@dataclass(frozen=True)
class NoiseLevels:
    """Levels at which the latents are alpha * data + sigma * noise, (n + 1,) each; sampling ends at the last.

    Attributes:
        ratios: diffusers' sigmas: a flow's sigmas, or the ratios sigma / alpha of diffusion.
        alphas: scale of the data.
        sigmas: scale of the noise.
    """

    ratios: NDArray[np.float64]
    alphas: NDArray[np.float64]
    sigmas: NDArray[np.float64]

    @classmethod
    def from_sigmas(cls, ratios: NDArray[np.float64], *, flow: bool) -> NoiseLevels:
        """Return the levels for diffusers' sigmas.

        alpha = 1 - sigma for a flow (arXiv:2403.03206, section 3, "Rectified Flow"), else alpha**2 + sigma**2 = 1.
        diffusers: `_sigma_to_alpha_sigma_t`.
        """
        if flow:
            return cls(ratios, 1 - ratios, ratios)
        alphas = 1 / np.sqrt(ratios**2 + 1)
        return cls(ratios, alphas, ratios * alphas)

    def at(self, i: int) -> tuple[float, float]:
        """Return the scales of the data and of the noise at level i."""
        return float(self.alphas[i]), float(self.sigmas[i])

    def growth(self, source: int, target: int) -> float:
        """Return the increase of log(alpha / sigma) between two levels: infinite if the target has no noise."""
        logs = np.log(self.sigmas[[source, target]]) - np.log(self.alphas[[source, target]])
        return float(logs[0] - logs[1])

    def data(self, prediction_type: str, i: int) -> Row:
        """Convert a prediction at level i to data.

        "flow_prediction" predicts noise - data of latents (1 - sigma) * data + sigma * noise. diffusers uses its
        `sigmas` in this formula whether or not they belong to a flow.
        """
        if prediction_type == "flow_prediction":
            return LATENTS - float(self.ratios[i]) * PREDICTION
        return predicted_data(prediction_type, LATENTS, *self.at(i))

    def noise(self, prediction_type: str, i: int) -> Row:
        """Convert a prediction at level i, of any type but "flow_prediction", to noise."""
        return predicted_noise(prediction_type, LATENTS, PREDICTION, *self.at(i))

    def scales(self, skipped: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return alphas and sigmas of the calls that remain after the first `skipped`."""
        return self.alphas[skipped:-1], self.sigmas[skipped:-1]
