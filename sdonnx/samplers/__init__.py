"""Every linear multistep sampler as data: timesteps, input scales and coefficient matrices.

A sampler that is linear in its history is `new state = M @ [state, noise, prediction]`. The state is a fixed
number of rows, each as large as the latents, so that one captured graph serves all samplers: it applies M,
and the plan says which M at which call. A sampler is an entry of `SAMPLERS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers.options import Request, SchedulerOptions, read_options
from sdonnx.samplers.plans import STATE_ROWS, SamplingPlan
from sdonnx.samplers.schedule import too_many_steps
from sdonnx.samplers.table import SAMPLERS, Sampler

__all__ = ["SAMPLERS", "STATE_ROWS", "Sampler", "SamplingPlan", "config_for", "guided_matrices", "plan"]


def plan(
    config: Mapping[str, object],
    num_inference_steps: int,
    *,
    eta: float = 0.0,
    strength: float = 1.0,
    mu: float | None = None,
) -> SamplingPlan:
    """Plan `num_inference_steps` steps of the sampler that a `scheduler_config.json` describes.

    Args:
        config: the content of `scheduler_config.json`, with `_class_name`.
        num_inference_steps: how many steps. The plan may hold more calls than steps (PNDM: one more; Heun: two
            for each but the last).
        eta: the share of fresh noise, 0 to 1, of samplers that have it (DDIM); others ignore it.
        strength: the share of the steps to take, above 0 to 1, the last ones: for image to image, as diffusers'
            `StableDiffusionImg2ImgPipeline.get_timesteps` has it. History starts empty.
        mu: how far a schedule with use_dynamic_shifting moves towards noise, as diffusers' `set_timesteps` has it.

    Raises:
        SchedulerError: the sampler or a value of its options cannot be followed.
        OptionError: the number of steps, eta, strength or mu cannot be used.
    """
    sampler = _sampler(config.get("_class_name"))
    options = read_options(sampler.class_name, sampler.options, config)
    request = _request(options, num_inference_steps, eta, strength, mu)
    # Betas from a broken configuration can divide by zero on the way; the check below speaks for them.
    with np.errstate(all="ignore"):
        made = sampler.build(options, request)
    parts = (made.timesteps, made.input_scales, made.matrices, np.array(made.init_noise_sigma))
    if not all(np.isfinite(part).all() for part in parts):
        raise SchedulerError(
            f"{sampler.class_name} with beta_schedule = {options.beta_schedule!r}, prediction_type = "
            f"{options.prediction_type!r} and rescale_betas_zero_snr = {options.rescale_betas_zero_snr} "
            "divides by zero",
            "betas between 0 and 1, and v_prediction where the last timestep is pure noise",
            "correct scheduler_config.json",
        )
    return made


def _request(options: SchedulerOptions, steps: int, eta: float, strength: float, mu: float | None) -> Request:
    """Return what is asked for, checked as far as it does not depend on the sampler."""
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer):
        raise OptionError(f"num_inference_steps is {steps!r}", "a positive integer", "give a whole number")
    if steps < 1:
        raise OptionError(f"num_inference_steps is {steps}", "at least 1", "ask for more steps")
    if steps > options.num_train_timesteps:
        raise too_many_steps(steps, options.num_train_timesteps)
    if not 0 <= eta <= 1:
        raise OptionError(f"eta is {eta}", "a number from 0 to 1", "give 0 for sampling without fresh noise")
    if not 0 < strength <= 1:
        raise OptionError(f"strength is {strength}", "a number above 0, 1 at most", "give for example 0.8")
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
                f"mu is {mu}", "none, because use_dynamic_shifting is not true", "leave mu out for this sampler"
            )
        if not math.isfinite(mu):
            raise OptionError(f"mu is {mu}", "a finite number", "give for example 0.5")
    return Request(int(steps), int(steps) - taken, float(eta), None if mu is None else float(mu))


def guided_matrices(plan: SamplingPlan, guidance_scale: float | None) -> NDArray[np.float64]:
    """Return the plan's matrices with classifier-free guidance folded in.

    The guided prediction is unconditional + g * (conditional - unconditional), arXiv:2207.12598 equation 6
    with its w = g - 1, as diffusers' pipelines have it. Being linear, it is two columns of the matrix.

    Args:
        plan: a sampler's plan.
        guidance_scale: g, or None for a denoiser that is called once per step, without guidance.

    Returns:
        (n, STATE_ROWS, STATE_ROWS + 2) without guidance: columns [state rows, noise, prediction];
        (n, STATE_ROWS, STATE_ROWS + 3) with: [state rows, noise, unconditional, conditional prediction].
    """
    if guidance_scale is None:
        return plan.matrices.copy()
    prediction = plan.matrices[..., -1:]
    return np.concatenate(
        [plan.matrices[..., :-1], (1 - guidance_scale) * prediction, guidance_scale * prediction], axis=-1
    )


def config_for(name_or_class: str, base_config: Mapping[str, object]) -> dict[str, object]:
    """Return a scheduler configuration that switches the sampler and keeps all else of the folder's.

    As diffusers' `from_config`: options that both classes have stay (betas, prediction type, spacing), others
    take the new class's defaults. One difference: where the folder is silent about an option of which the
    default does not suit latents, it gets the value that published folders have (`Sampler.latent_options`).

    Args:
        name_or_class: a short name ("euler") or diffusers' class ("EulerDiscreteScheduler").
        base_config: the content of the folder's `scheduler_config.json`.

    Raises:
        SchedulerError: there is no such sampler.
    """
    sampler = _sampler(name_or_class)
    kept = {name: value for name, value in base_config.items() if not name.startswith("_")}
    return {**sampler.latent_options, **kept, "_class_name": sampler.class_name}


def _sampler(name: object) -> Sampler:
    """Return the sampler with this class or short name."""
    for sampler in SAMPLERS.values():
        if name in (sampler.class_name, sampler.short_name):
            return sampler
    names = ", ".join(f"{sampler.short_name} ({sampler.class_name})" for sampler in SAMPLERS.values())
    raise SchedulerError(f"the sampler is {name!r}", f"one of {names}", "choose one of these samplers")
