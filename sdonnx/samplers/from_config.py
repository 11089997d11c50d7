"""Plan the sampler that a scheduler configuration names, or switch the configuration to another sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers.custom_schedule import WHOLE, CustomSchedule, cutoff, remaining_calls, truncated
from sdonnx.samplers.options import PlanRequest, SchedulerOptions, read_options
from sdonnx.samplers.plans import SamplingPlan
from sdonnx.samplers.sampler_table import SAMPLERS, Sampler
from sdonnx.samplers.schedule import too_many_steps
from sdonnx.samplers.scheduler_names import parse_name

__all__ = ["config_for", "default_options", "plan", "set_options"]


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
