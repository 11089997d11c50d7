"""Flow matching: noise levels from 1 to 0, and Euler's method along the straight path between data and noise.

The latents are (1 - sigma) * data + sigma * noise (arXiv:2403.03206, section 3, "Rectified Flow"). The denoiser
predicts noise - data ("flow_prediction").
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers.noise_schedule import deformed_sigmas, with_final_sigma
from sdonnx.samplers.options import USE_DIFFUSERS, PlanRequest, SchedulerOptions, UnplannedError
from sdonnx.samplers.plans import LATENTS, NOISE, PREDICTION, SamplingPlan, assemble, new_state

__all__ = ["dpm_solver_flow_sigmas", "plan_flow_euler", "required_mu", "unipc_flow_sigmas"]


def _shifted(sigmas: NDArray[np.float64], shift: float) -> NDArray[np.float64]:
    """Shift sigmas from 0 to 1 towards noise, for larger images: arXiv:2403.03206, equation 23."""
    moved: NDArray[np.float64] = shift * sigmas / (1 + (shift - 1) * sigmas)
    return moved


def _moved(
    sigmas: NDArray[np.float64], options: SchedulerOptions, request: PlanRequest, fixed: float
) -> NDArray[np.float64]:
    """Shift sigmas by the fixed shift or, with use_dynamic_shifting, by mu; then stretch them to shift_terminal.

    Source: `time_shift` and `stretch_shift_to_terminal` of `FlowMatchEulerDiscreteScheduler`. The shift by mu equals
    `_shifted` in another order of operations: timesteps are truncated to integers, so the last bit can matter.
    """
    if options.use_dynamic_shifting:
        mu = required_mu(request)
        shift = float(np.exp(mu)) if options.time_shift_type == "exponential" else mu
        sigmas = shift / (shift + (1 / sigmas - 1))
    else:
        sigmas = _shifted(sigmas, fixed)
    if options.shift_terminal:
        clean = 1 - sigmas
        sigmas = 1 - clean / (clean[-1] / (1 - options.shift_terminal))
    return sigmas


def required_mu(request: PlanRequest) -> float:
    """Return mu.

    Raises:
        OptionError: mu is None.
    """
    if request.mu is None:
        raise OptionError("mu is not given", "a number: use_dynamic_shifting is true", "pass mu, or set a fixed shift")
    return request.mu


def _checked(class_name: str, sigmas: NDArray[np.float64], maximum: float) -> NDArray[np.float64]:
    """Return the sigmas.

    Raises:
        SchedulerError: they do not fall from at most `maximum` to above 0.
    """
    single = sigmas.astype(np.float32).astype(np.float64)
    if np.isfinite(single).all() and single[-1] > 0 and single[0] <= maximum and (np.diff(single) < 0).all():
        return sigmas
    raise SchedulerError(
        f"the noise levels of {class_name} run from {single[0]:g} to {single[-1]:g}",
        "levels that fall from at most 1 to above 0",
        "correct the shift in scheduler_config.json, or mu",
    )


def plan_flow_euler(options: SchedulerOptions, request: PlanRequest) -> SamplingPlan:
    """Euler's method for a flow, arXiv:2210.02747. diffusers: `FlowMatchEulerDiscreteScheduler`.

    With stochastic_sampling a step goes to the predicted data and adds fresh noise.
    """
    sigmas = with_final_sigma(_flow_euler_sigmas(options, request), 0.0)
    total = np.float32(options.num_train_timesteps)
    timesteps = (sigmas[:-1].astype(np.float32) * total).astype(np.float64)
    if request.timesteps is not None:  # not shifted, unlike the sigmas that diffusers computes from them
        timesteps = np.array(request.timesteps)
    timesteps = timesteps[request.skipped :]
    sigmas = sigmas[request.skipped :]
    matrices = []
    for sigma, following in pairwise(sigmas):
        if options.stochastic_sampling:
            data = LATENTS - sigma * PREDICTION
            matrices.append(new_state((1 - following) * data + following * NOISE))
        else:
            matrices.append(new_state(LATENTS + (following - sigma) * PREDICTION))
    levels = (1 - sigmas[:-1], sigmas[:-1])
    return assemble(timesteps, matrices, levels, needs_noise=options.stochastic_sampling)


def _flow_euler_sigmas(options: SchedulerOptions, request: PlanRequest) -> NDArray[np.float64]:
    """Return the sigmas of `FlowMatchEulerDiscreteScheduler.set_timesteps`, falling, (steps,).

    diffusers shifts the two ends in single precision when it creates the scheduler, and shifts all sigmas again for
    each image.
    """
    total = options.num_train_timesteps
    ends = np.array([total, 1], np.float32) / np.float32(total)
    if not options.use_dynamic_shifting:
        ends = np.float32(options.shift) * ends / (1 + np.float32(options.shift - 1) * ends)
    high, low = ends.astype(np.float64)
    sigmas = np.linspace(high * total, low * total, request.steps) / total
    if request.sigmas is not None:
        sigmas = np.array(request.sigmas, np.float32).astype(np.float64)
    if request.timesteps is not None:
        sigmas = np.array(request.timesteps, np.float32).astype(np.float64) / total
    sigmas = _moved(sigmas, options, request, options.shift)
    deformed = deformed_sigmas(options, sigmas, request.steps)
    return _checked("FlowMatchEulerDiscreteScheduler", sigmas if deformed is None else deformed, _ONE)


# A shift in single precision can round pure noise to slightly above 1.
_ONE = 1 + 1e-6

# Below 1 in single precision: the solvers divide by the share of data, which is 0 in pure noise.
_NEARLY_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def dpm_solver_flow_sigmas(options: SchedulerOptions, request: PlanRequest) -> NDArray[np.float64]:
    """Return the sigmas of `DPMSolverMultistepScheduler.set_timesteps` with use_flow_sigmas, falling, (steps,).

    Raises:
        SchedulerError: the options select a spacing that this class does not support for a flow.
    """
    _reject_spacings(options, "DPMSolverMultistepScheduler", "use_karras_sigmas", "use_exponential_sigmas")
    shift = options.flow_shift
    if request.mu is not None:
        if options.time_shift_type != "exponential":
            raise SchedulerError(
                f"DPMSolverMultistepScheduler has time_shift_type = {options.time_shift_type!r}",
                "'exponential' if mu is given",
                "correct scheduler_config.json",
            )
        shift = float(np.exp(request.mu))
    rising = 1 - np.linspace(1, 1 / options.num_train_timesteps, request.steps + 1)
    return _checked("DPMSolverMultistepScheduler", _shifted(rising, shift)[::-1][:-1], _NEARLY_ONE)


def unipc_flow_sigmas(
    options: SchedulerOptions, request: PlanRequest, deformed: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Return the sigmas of `UniPCMultistepScheduler.set_timesteps` with use_flow_sigmas, falling, (steps,).

    Args:
        options: the scheduler's options.
        request: the steps and mu.
        deformed: Karras' sigmas of diffusion, if the options select them.

    Raises:
        SchedulerError: the options select a spacing that this class does not support for a flow.
    """
    _reject_spacings(options, "UniPCMultistepScheduler", "use_exponential_sigmas")
    if deformed is not None:
        sigmas = deformed / (deformed + 1)
    else:
        even = np.linspace(1, 1 / options.num_train_timesteps, request.steps + 1)[:-1]
        even = even if request.sigmas is None else np.array(request.sigmas)
        sigmas = _moved(even, options, request, options.flow_shift)
        if abs(sigmas[0] - 1) < 1e-6:
            sigmas[0] -= 1e-6
    return _checked("UniPCMultistepScheduler", sigmas, _NEARLY_ONE)


def _reject_spacings(options: SchedulerOptions, class_name: str, *names: str) -> None:
    """Reject spacings that diffusers computes for diffusion and then uses for a flow."""
    for name in names:
        if getattr(options, name):
            found = f"{class_name} has use_flow_sigmas = true and {name} = true"
            raise UnplannedError(found, f"{name} to be false", USE_DIFFUSERS)
