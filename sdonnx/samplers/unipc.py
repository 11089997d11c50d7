"""UniPC: a multistep predictor and corrector of any order that share their predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers.flow import required_mu, unipc_flow_sigmas
from sdonnx.samplers.noise_levels import NoiseLevels
from sdonnx.samplers.options import PlanRequest, SchedulerOptions
from sdonnx.samplers.plans import HISTORY, LATENTS, Row, SamplingPlan, assemble, new_state
from sdonnx.samplers.schedule import (
    cumulative_alphas,
    deformed_sigmas,
    spaced_timesteps,
    timesteps_of_sigmas,
    too_many_steps,
    training_sigmas,
    with_final_sigma,
)

__all__ = ["plan_unipc"]


def _schedule(options: SchedulerOptions, request: PlanRequest) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
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
    timesteps, sigmas = _schedule(options, request)
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
