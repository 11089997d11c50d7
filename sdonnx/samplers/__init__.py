"""Every linear multistep sampler as data: timesteps, input scales and coefficient matrices.

A sampler that is linear in its history is `new state = M @ [state, noise, prediction]`. The state is a fixed
number of rows, each as large as the latents, so that one captured graph serves all samplers: it applies M,
and the plan says which M at which call. A sampler is an entry of `SAMPLERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers import solvers
from sdonnx.samplers.options import Option, SchedulerOptions, read_options
from sdonnx.samplers.schedule import too_many_steps
from sdonnx.samplers.solvers import STATE_ROWS, SamplingPlan

__all__ = ["SAMPLERS", "STATE_ROWS", "Sampler", "SamplingPlan", "config_for", "guided_matrices", "plan"]


@dataclass(frozen=True)
class Sampler:
    """A sampler: how it reads its options and how it plans.

    Attributes:
        class_name: diffusers' class.
        short_name: the name for a command line.
        options: every option of diffusers' class that changes its result.
        build: makes the plan from the options, the number of steps and eta.
        latent_options: what every published latent-diffusion folder sets for this class although it is not
            diffusers' default; used when a folder's own configuration is for another class and silent.
    """

    class_name: str
    short_name: str
    options: Mapping[str, Option]
    build: Callable[[SchedulerOptions, int, float], SamplingPlan]
    latent_options: Mapping[str, object] = field(default_factory=dict)


_REFUSED = Option(False, (False, None))

_COMMON: Mapping[str, Option] = {
    "num_train_timesteps": Option(1000, int),
    "beta_start": Option(0.0001, float),
    "beta_end": Option(0.02, float),
    "beta_schedule": Option("linear", ("linear", "scaled_linear", "squaredcos_cap_v2")),
    "trained_betas": Option(None, list),
    "steps_offset": Option(0, int),
    "prediction_type": Option("epsilon", ("epsilon", "v_prediction", "sample")),
    "timestep_spacing": Option("leading", ("leading", "linspace", "trailing")),
}

_SIGMAS: Mapping[str, Option] = {
    "timestep_spacing": Option("linspace", ("leading", "linspace", "trailing")),
    "rescale_betas_zero_snr": Option(False, bool),
    "use_karras_sigmas": Option(False, bool),
    "use_exponential_sigmas": Option(False, bool),
    "use_beta_sigmas": _REFUSED,
    "sigma_min": Option(None, float),
    "sigma_max": Option(None, float),
    "final_sigmas_type": Option("zero", ("zero", "sigma_min")),
}

SAMPLERS: Mapping[str, Sampler] = MappingProxyType(
    {
        sampler.class_name: sampler
        for sampler in (
            Sampler(
                "DDIMScheduler",
                "ddim",
                {
                    **_COMMON,
                    "set_alpha_to_one": Option(True, bool),
                    "rescale_betas_zero_snr": Option(False, bool),
                    "clip_sample": Option(True, (False, None)),
                    "thresholding": _REFUSED,
                },
                solvers.plan_ddim,
                latent_options={"clip_sample": False},
            ),
            Sampler(
                "PNDMScheduler",
                "pndm",
                {
                    **_COMMON,
                    "prediction_type": Option("epsilon", ("epsilon", "v_prediction")),
                    "set_alpha_to_one": Option(False, bool),
                    "skip_prk_steps": Option(False, (True,)),
                },
                solvers.plan_pndm,
                latent_options={"skip_prk_steps": True},
            ),
            Sampler(
                "EulerDiscreteScheduler",
                "euler",
                {
                    **_COMMON,
                    **_SIGMAS,
                    "interpolation_type": Option("linear", ("linear",)),
                    "timestep_type": Option("discrete", ("discrete",)),
                },
                solvers.plan_euler,
            ),
            Sampler(
                "DPMSolverMultistepScheduler",
                "dpmsolver++",
                {
                    **_COMMON,
                    **_SIGMAS,
                    # diffusers reads the names of its DEIS and UniPC solvers as these, for `from_config`.
                    "algorithm_type": Option("dpmsolver++", ("dpmsolver++", "deis")),
                    "solver_type": Option("midpoint", ("midpoint", "heun", "logrho", "bh1", "bh2")),
                    "solver_order": Option(2, (1, 2)),
                    "lower_order_final": Option(True, bool),
                    "euler_at_final": Option(False, bool),
                    "lambda_min_clipped": Option(-math.inf, float),
                    "thresholding": _REFUSED,
                    "use_lu_lambdas": _REFUSED,
                    "use_flow_sigmas": _REFUSED,
                    "variance_type": Option(None, (None,)),
                },
                solvers.plan_dpm_solver_pp,
            ),
        )
    }
)


def plan(config: Mapping[str, object], num_inference_steps: int, *, eta: float = 0.0) -> SamplingPlan:
    """Plan `num_inference_steps` steps of the sampler that a `scheduler_config.json` describes.

    Args:
        config: the content of `scheduler_config.json`, with `_class_name`.
        num_inference_steps: how many steps. The plan may hold more calls than steps (PNDM: one more).
        eta: the share of fresh noise, 0 to 1, of samplers that have it (DDIM); others ignore it.

    Raises:
        SchedulerError: the sampler or a value of its options cannot be followed.
        OptionError: the number of steps or eta cannot be used.
    """
    sampler = _sampler(config.get("_class_name"))
    options = read_options(sampler.class_name, sampler.options, config)
    if isinstance(num_inference_steps, bool) or not isinstance(num_inference_steps, int | np.integer):
        raise OptionError(
            f"num_inference_steps is {num_inference_steps!r}", "a positive integer", "give a whole number"
        )
    if num_inference_steps < 1:
        raise OptionError(f"num_inference_steps is {num_inference_steps}", "at least 1", "ask for more steps")
    if num_inference_steps > options.num_train_timesteps:
        raise too_many_steps(num_inference_steps, options.num_train_timesteps)
    if not 0 <= eta <= 1:
        raise OptionError(f"eta is {eta}", "a number from 0 to 1", "give 0 for sampling without fresh noise")
    # Betas from a broken configuration can divide by zero on the way; the check below speaks for them.
    with np.errstate(all="ignore"):
        made = sampler.build(options, int(num_inference_steps), float(eta))
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
