"""Multistep solvers that integrate in log(alpha / sigma): DPM-Solver++ of order 1 to 3, and UniPC of any order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers.flow import dpm_solver_flow_sigmas, required_mu, unipc_flow_sigmas
from sdonnx.samplers.noise_schedule import (
    NoiseLevels,
    cumulative_alphas,
    custom_timesteps,
    deformed_sigmas,
    spaced_timesteps,
    timesteps_of_sigmas,
    too_many_steps,
    training_sigmas,
    with_final_sigma,
)
from sdonnx.samplers.options import PlanRequest, SchedulerOptions
from sdonnx.samplers.plans import HISTORY, LATENTS, NOISE, Row, SamplingPlan, assemble, new_state

__all__ = ["plan_dpm_solver_pp", "plan_unipc"]


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


def _unipc_schedule(options: SchedulerOptions, request: PlanRequest) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the timesteps (n,) and the sigmas (n + 1,) of `UniPCMultistepScheduler.set_timesteps`."""
    steps = request.steps
    if options.use_dynamic_shifting:
        required_mu(request)
    if request.sigmas is not None and (not options.use_flow_sigmas or options.use_karras_sigmas):
        raise OptionError(
            "sigmas given to UniPCMultistepScheduler",
            "use_flow_sigmas to be true and use_karras_sigmas to be false",
            "leave sigmas out, or change the options",
        )
    training = training_sigmas(cumulative_alphas(options, never_zero=True))
    deformed = deformed_sigmas(options, training[::-1], steps)
    if options.use_flow_sigmas:
        sigmas = unipc_flow_sigmas(options, request, deformed)
        timesteps = sigmas * options.num_train_timesteps
    elif options.shift_terminal is not None:
        raise SchedulerError(
            f"UniPCMultistepScheduler has shift_terminal = {options.shift_terminal} and use_flow_sigmas = false",
            "shift_terminal only with use_flow_sigmas",
            "correct scheduler_config.json",
        )
    elif deformed is not None:
        sigmas, timesteps = deformed, timesteps_of_sigmas(deformed, training)
        timesteps = np.round(timesteps) if options.use_karras_sigmas else timesteps
    else:
        timesteps = np.round(spaced_timesteps(options, steps, beyond=1))
        sigmas = np.interp(timesteps, np.arange(len(training)), training)
    # If the levels are not training levels, the last one is the smallest, and the last step changes nothing.
    spaced = options.use_flow_sigmas or deformed is not None
    smallest = sigmas[-1] if spaced else float(training[0])
    last = smallest if options.final_sigmas_type == "sigma_min" else 0.0
    return np.trunc(timesteps), with_final_sigma(sigmas, last)


@dataclass(frozen=True)
class _Solver:
    """UniP and UniC between two noise levels: arXiv:2302.04867, algorithms 1 and 2 and their appendix.

    Attributes:
        levels: the noise levels.
        predicts_data: the combined outputs are predicted data; otherwise predicted noise.
        bh1: B(h) = h; otherwise B(h) = exp(h) - 1.
    """

    levels: NoiseLevels
    predicts_data: bool
    bh1: bool

    def predict(self, latents: Row, outputs: list[Row], i: int, order: int) -> Row:
        """UniP: return the latents of level i + 1, given latents of level i and outputs of levels i, i - 1, ..."""
        if self.levels.growth(i, i + 1) == 0:
            return latents
        ratios, right = self._system(i, i + 1, order)
        # As in diffusers, the only weight of order 2 is not solved for.
        weights: Row = np.full(order - 1, 0.5) if order < 3 else _solved(ratios[:-1], right[:-1])
        return self._step(latents, outputs, i, i + 1, weights, ratios)

    def correct(self, start: Row, outputs: list[Row], output: Row, i: int, order: int) -> Row:
        """UniC: recompute the latents of level i, given `start`, now that the output of level i is known.

        Args:
            start: latents of level i - 1.
            outputs: outputs of levels i - 1, i - 2, ...
            output: output of level i.
            i: the level.
            order: order of the previous prediction.
        """
        ratios, right = self._system(i - 1, i, order)
        weights: Row = np.array([0.5]) if order == 1 else _solved(ratios, right)
        return self._step(start, [*outputs[:order], output], i - 1, i, weights, ratios)

    def _signed(self, source: int, target: int) -> float:
        growth = self.levels.growth(source, target)
        return -growth if self.predicts_data else growth

    def _scale(self, signed: float) -> float:
        return signed if self.bh1 else float(np.expm1(signed))

    def _system(self, source: int, target: int, order: int) -> tuple[Row, Row]:
        """Return the relative positions of older outputs, ending with 1, and the right side of theorem 3.1's system."""
        h = self.levels.growth(source, target)
        ratios = np.array([self.levels.growth(source, source - k) / h for k in range(1, order)] + [1.0])
        signed = self._signed(source, target)
        right, factorial = np.empty(order), 1
        phi = np.expm1(signed) / signed - 1
        for k in range(order):
            right[k] = phi * factorial / self._scale(signed)
            factorial *= k + 2
            phi = phi / signed - 1 / factorial
        return ratios, right

    def _step(self, latents: Row, outputs: list[Row], source: int, target: int, weights: Row, ratios: Row) -> Row:
        """Combine the exact solution for a constant output and the weighted differences of the other outputs to it."""
        signed = self._signed(source, target)
        (data_before, noise_before), (data_after, noise_after) = self.levels.at(source), self.levels.at(target)
        kept, scale = noise_after / noise_before, data_after
        if not self.predicts_data:
            kept, scale = data_after / data_before, noise_after
        moved = kept * latents - scale * float(np.expm1(signed)) * outputs[0]
        for weight, other, ratio in zip(weights, outputs[1:], ratios, strict=False):
            moved = moved - scale * self._scale(signed) * weight / ratio * (other - outputs[0])
        return moved


def _solved(ratios: Row, right: Row) -> Row:
    """Return theorem 3.1's weights: the sums of weights times powers 0, 1, ... of the ratios equal `right`."""
    weights: Row = np.linalg.solve(np.vander(ratios, increasing=True).T, right).astype(np.float64)
    return weights


def plan_unipc(options: SchedulerOptions, request: PlanRequest) -> SamplingPlan:
    """UniPC of order 1 to 3, arXiv:2302.04867, algorithms 1 and 2. diffusers: `UniPCMultistepScheduler`.

    A call first corrects the latents that the previous call predicted, then predicts the next ones from them.
    History: the last three outputs, newest first, and the corrected latents of the previous call.
    """
    timesteps, sigmas = _unipc_schedule(options, request)
    count = len(timesteps)
    _check(options, request, sigmas[request.skipped :])
    levels = NoiseLevels.from_sigmas(sigmas, flow=options.use_flow_sigmas)
    solver = _Solver(levels, options.predict_x0, options.solver_type == "bh1")
    *older, start = HISTORY
    matrices = []
    order = 0
    for i in range(request.skipped, count):
        output = (levels.data if options.predict_x0 else levels.noise)(options.prediction_type, i)
        latents = LATENTS
        if i > request.skipped and i - 1 not in options.disable_corrector:
            latents = solver.correct(start, older, output, i, order)
        max_order = min(options.solver_order, count - i) if options.lower_order_final else options.solver_order
        order = min(max_order, i - request.skipped + 1)
        following = solver.predict(latents, [output, *older], i, order)
        matrices.append(new_state(following, output, *older[:-1], latents))
    return assemble(timesteps[request.skipped :], matrices, levels.scales(request.skipped))


def _check(options: SchedulerOptions, request: PlanRequest, sigmas: NDArray[np.float64]) -> None:
    """Reject options for which diffusers returns infinities.

    Raises:
        SchedulerError: the options divide by the remaining noise, which is 0 at the end.
        OptionError: two steps fall on one timestep.
    """
    if options.final_sigmas_type == "zero" and not options.predict_x0:
        found = "predict_x0 = false"
    elif (
        options.final_sigmas_type == "zero"
        and not options.lower_order_final
        and min(options.solver_order, len(sigmas) - 1) > 1
    ):
        found = f"solver_order = {options.solver_order} and lower_order_final = false"
    elif not options.predict_x0 and options.prediction_type == "flow_prediction":
        raise SchedulerError(
            "UniPCMultistepScheduler has predict_x0 = false and prediction_type = 'flow_prediction'",
            "predict_x0 to be true for this prediction_type",
            "correct scheduler_config.json",
        )
    elif (np.diff(sigmas[:-1]) == 0).any():
        raise too_many_steps(request.steps, options.num_train_timesteps - 1)
    else:
        return
    raise SchedulerError(
        f"UniPCMultistepScheduler has {found}, divides by the noise level and ends without noise",
        "final_sigmas_type to be 'sigma_min'",
        "correct scheduler_config.json",
    )
