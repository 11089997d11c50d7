"""Plan the sampler that a scheduler configuration names, also with a schedule that the call sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers.noise_schedule import too_many_steps
from sdonnx.samplers.options import PlanRequest, SchedulerOptions, UnplannedError, read_options
from sdonnx.samplers.plans import SamplingPlan
from sdonnx.samplers.sampler_table import SAMPLERS, SCHEDULER_NAMES, Sampler, parse_name

__all__ = [
    "WHOLE",
    "CustomSchedule",
    "config_for",
    "cutoff",
    "default_options",
    "is_planned",
    "needs_host",
    "plan",
    "remaining_calls",
    "set_options",
    "truncated",
]


@dataclass(frozen=True)
class CustomSchedule:
    """Changes of a schedule, with the names that diffusers' pipelines give them.

    Attributes:
        timesteps: falling timesteps that replace the scheduler's.
        sigmas: falling noise levels that replace the scheduler's, in the form of diffusers' `set_timesteps` of
            the class.
        denoising_start: share of the schedule that another pipeline has denoised; None for 0.
        denoising_end: share of the schedule after which to stop; None for 1.
    """

    timesteps: tuple[float, ...] | None = None
    sigmas: tuple[float, ...] | None = None
    denoising_start: float | None = None
    denoising_end: float | None = None

    @classmethod
    def create(cls, timesteps: Any, sigmas: Any, denoising_start: Any, denoising_end: Any) -> CustomSchedule:
        """Return the schedule of a call's arguments.

        Raises:
            OptionError: an argument is not a falling list or a share, or two of them exclude each other.
        """
        if timesteps is not None and sigmas is not None:
            raise OptionError("timesteps and sigmas", "one of them")
        start, end = _share("denoising_start", denoising_start), _share("denoising_end", denoising_end)
        if start is not None and end is not None and start >= end:
            raise OptionError(f"denoising_start is {start} and denoising_end {end}", "a smaller start", "swap them")
        return cls(
            _falling("timesteps", timesteps), _falling("sigmas", sigmas), start or None, None if end == 1 else end
        )

    @property
    def is_custom(self) -> bool:
        """Whether timesteps or sigmas replace the scheduler's."""
        return self.timesteps is not None or self.sigmas is not None

    def require_accepted(self, name: str, accepted: Mapping[str, Any] | frozenset[str], others: str) -> None:
        """Raise OptionError if the scheduler's `set_timesteps` does not accept the custom schedule.

        Args:
            name: class name of the scheduler.
            accepted: arguments of its `set_timesteps`.
            others: schedulers that accept them, for the message.
        """
        for argument in ("timesteps", "sigmas"):
            if getattr(self, argument) is not None and argument not in accepted:
                raise OptionError(
                    f"{argument} given, which {name} does not accept", others, "leave it out, or set another scheduler"
                )


WHOLE = CustomSchedule()
"""The schedule of the scheduler, unchanged."""


def cutoff(num_train_timesteps: int, share: float) -> int:
    """Return the training timestep at a share of the schedule, counted from its noisy end.

    Source: `discrete_timestep_cutoff` in diffusers' pipelines of bases and refiners.
    """
    return round(num_train_timesteps - share * num_train_timesteps)


def remaining_calls(timesteps: NDArray[Any], limit: int, order: int) -> int:
    """Return the number of calls below a timestep, rounded so that no step of two calls is cut.

    Source: `get_timesteps` with denoising_start of diffusers' refiner pipelines.

    Args:
        timesteps: timestep of each call of the whole schedule.
        limit: see `cutoff`.
        order: calls of a step.
    """
    count = int((timesteps < limit).sum())
    return count + 1 if order == 2 and count % 2 == 0 else count


def truncated(plan: SamplingPlan, options: SchedulerOptions, share: float) -> SamplingPlan:
    """Return the calls of a plan up to a share of the schedule.

    Known areas are restored without noise after the last call, as in diffusers' inpainting pipelines.

    Raises:
        OptionError: no call is left.
    """
    count = int((plan.timesteps >= cutoff(options.num_train_timesteps, share)).sum())
    if not count:
        raise OptionError(f"denoising_end {share} leaves no step", "at least one step", "raise denoising_end")
    if count == len(plan.timesteps):
        return plan
    return replace(
        plan,
        timesteps=plan.timesteps[:count],
        input_scales=plan.input_scales[:count],
        matrices=plan.matrices[:count],
        needs_noise=plan.needs_noise[:count],
        clean_scales=np.append(plan.clean_scales[:count], np.float32(1)),
        noise_scales=np.append(plan.noise_scales[:count], np.float32(0)),
    )


def _share(name: str, value: Any) -> float | None:
    if value is None:
        return None
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1 or value == (1 if name == "denoising_start" else 0):
        raise OptionError(f"{name} is {value!r}", "a share of the schedule between 0 and 1", "pass for example 0.8")
    return float(value)


def _falling(name: str, values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all() or (array < 0).any():
        raise OptionError(f"{name} is {values!r}", "a list of numbers from 0 on", "pass for example [999, 500, 100]")
    if (np.diff(array) >= 0).any():
        raise OptionError(f"{name} is {values!r}", "numbers that fall", "sort it, the largest first")
    return tuple(array.tolist())


def plan(
    config: Mapping[str, object],
    num_inference_steps: int,
    *,
    eta: float = 0.0,
    strength: float = 1.0,
    mu: float | None = None,
    custom: CustomSchedule = WHOLE,
) -> SamplingPlan:
    """Plan `num_inference_steps` steps of the sampler that a `scheduler_config.json` describes.

    Args:
        config: the content of `scheduler_config.json`, with `_class_name`.
        num_inference_steps: number of steps; ignored with custom timesteps or sigmas. The plan may hold more calls
            than steps (PNDM: one more; Heun: two for each step but the last).
        eta: share of fresh noise, 0 to 1, for samplers that support it (DDIM, TCD). Others ignore it.
        strength: share of the steps to take, above 0 and at most 1, counted from the end. Used for image to image,
            as in diffusers' `StableDiffusionImg2ImgPipeline.get_timesteps`. History starts empty.
        mu: shift towards noise of a schedule with use_dynamic_shifting, as in diffusers' `set_timesteps`.
        custom: custom timesteps or sigmas, and the part of the schedule to take. `strength` has no effect with
            `denoising_start`.

    Raises:
        SchedulerError: the sampler or the value of one of its options is not supported.
        OptionError: the number of steps, eta, strength, mu or the custom schedule is invalid, or the sampler does not
            accept one.
    """
    sampler = _sampler(config.get("_class_name"))
    options = read_options(sampler.class_name, sampler.options, config)
    if custom.is_custom:
        num_inference_steps = _custom_steps(sampler, custom)
    strength = strength if custom.denoising_start is None else 1.0
    request = _request(options, num_inference_steps, eta, strength, mu)
    request = replace(request, timesteps=custom.timesteps, sigmas=custom.sigmas)
    # Betas of a broken configuration can cause a division by zero here. The check below reports it.
    with np.errstate(all="ignore"):
        made = sampler.build(options, request)
        if custom.denoising_start is not None:
            limit = cutoff(options.num_train_timesteps, custom.denoising_start)
            calls = len(made.timesteps)
            skipped = (calls - remaining_calls(made.timesteps, limit, sampler.order)) // sampler.order
            made = sampler.build(options, replace(request, skipped=skipped))
    parts = (made.timesteps, made.input_scales, made.matrices, np.array(made.init_noise_sigma))
    if not all(np.isfinite(part).all() for part in parts):
        raise SchedulerError(
            f"{sampler.class_name} with beta_schedule = {options.beta_schedule!r}, prediction_type = "
            f"{options.prediction_type!r} and rescale_betas_zero_snr = {options.rescale_betas_zero_snr} "
            "divides by zero",
            "betas between 0 and 1, and v_prediction where the last timestep is pure noise",
            "correct scheduler_config.json",
        )
    return made if custom.denoising_end is None else truncated(made, options, custom.denoising_end)


def _custom_steps(sampler: Sampler, custom: CustomSchedule) -> int:
    """Return the number of steps of custom timesteps or sigmas.

    Raises:
        OptionError: the sampler does not accept them, or they leave no step.
    """
    name = "timesteps" if custom.sigmas is None else "sigmas"
    others = ", ".join(each.class_name for each in SAMPLERS.values() if name in each.custom)
    custom.require_accepted(sampler.class_name, sampler.custom, f"one of {others}")
    steps = len(custom.timesteps or custom.sigmas or ()) - (name == "sigmas" and sampler.ends_with_sigma)
    if steps < 1:
        raise OptionError("sigmas of one number", "the level of each step and the last level", "append for example 0")
    return steps


def _request(options: SchedulerOptions, steps: int, eta: float, strength: float, mu: float | None) -> PlanRequest:
    """Check the arguments that every sampler shares and return them."""
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer):
        raise OptionError(f"num_inference_steps is {steps!r}", "a positive integer", "pass a whole number")
    if steps < 1:
        raise OptionError(f"num_inference_steps is {steps}", "at least 1", "ask for more steps")
    if steps > options.num_train_timesteps:
        raise too_many_steps(steps, options.num_train_timesteps)
    if not 0 <= eta <= 1:
        raise OptionError(f"eta is {eta}", "a number from 0 to 1", "pass 0 to sample without fresh noise")
    if not 0 < strength <= 1:
        raise OptionError(f"strength is {strength}", "a number above 0 and at most 1", "pass for example 0.8")
    taken = int(steps * strength)
    if taken < 1:
        raise OptionError(
            f"strength {strength} of num_inference_steps {steps} leaves no step",
            "at least one step",
            "raise num_inference_steps or strength",
        )
    if mu is not None:
        if not options.use_dynamic_shifting:
            raise OptionError(
                f"mu is {mu}", "no mu, because use_dynamic_shifting is not true", "omit mu for this sampler"
            )
        if not math.isfinite(mu):
            raise OptionError(f"mu is {mu}", "a finite number", "pass for example 0.5")
    return PlanRequest(int(steps), int(steps) - taken, float(eta), None if mu is None else float(mu))


def config_for(name_or_class: str, base_config: Mapping[str, object]) -> dict[str, object]:
    """Return the folder's scheduler configuration with another sampler.

    Like diffusers' `from_config`: options that both classes have are kept (betas, prediction type, spacing), the
    others get the new class's defaults, and so do options that the configuration lists as `_use_default_values`.
    Options that the name stands for ("DPM++ 2M Karras") replace the configuration's options. One difference: some of
    diffusers' defaults do not suit latents. If the folder does not set such an option, it gets the value of published
    folders (`Sampler.latent_options`).

    Args:
        name_or_class: a name of `parse_name`: "euler", "EulerDiscreteScheduler", "DPM++ 2M Karras", ...
        base_config: the content of the folder's `scheduler_config.json`.

    Raises:
        SchedulerError: the sampler is unknown.
    """
    class_name, options = parse_name(name_or_class)
    latent_options = SAMPLERS[class_name].latent_options if class_name in SAMPLERS else {}
    kept = {name: value for name, value in set_options(base_config).items() if not name.startswith("_")}
    return {**latent_options, **kept, **options, "_class_name": class_name}


def set_options(config: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration without the options that it has only because they are its class's defaults.

    Configurations of diffusers' scheduler objects hold every option of the class and name the default ones in
    `_use_default_values`. One that was changed since is kept.
    """
    sampler = SAMPLERS.get(str(config.get("_class_name")))
    named = config.get("_use_default_values")
    left_out = {"_use_default_values"}
    for name in named if isinstance(named, list | tuple) else ():
        option = None if sampler is None else sampler.options.get(name)
        if option is None or _as_list(config.get(name)) == _as_list(option.default):
            left_out.add(name)
    return {name: value for name, value in config.items() if name not in left_out}


def default_options(class_name: str) -> dict[str, object]:
    """Return the options of a sampler that change its result, with diffusers' defaults; {} if it has no plan."""
    sampler = SAMPLERS.get(class_name)
    return {} if sampler is None else {name: _as_list(option.default) for name, option in sampler.options.items()}


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _sampler(name: object) -> Sampler:
    """Return the sampler with this class name or short name."""
    for sampler in SAMPLERS.values():
        if name in (sampler.class_name, sampler.short_name):
            return sampler
    names = ", ".join(f"{sampler.short_name} ({sampler.class_name})" for sampler in SAMPLERS.values())
    raise SchedulerError(f"the sampler is {name!r}", f"one of {names}", "choose one of these samplers")


def is_planned(config: dict[str, Any]) -> bool:
    """Return whether a scheduler with this configuration has a plan, and so runs on the device."""
    try:
        plan(config, 2)
    except (SchedulerError, OptionError):
        return False
    return True


def needs_host(config: Mapping[str, Any]) -> bool:
    """Return whether diffusers steps a scheduler: no plan follows its class, or the value of one of its options."""
    class_name = str(config.get("_class_name"))
    if class_name not in SAMPLERS:
        return any(class_name == each.class_name for each in SCHEDULER_NAMES)
    try:
        plan(config, 2)
    except UnplannedError:
        return True
    except (SchedulerError, OptionError):
        return False  # the plan of a call raises it again
    return False
