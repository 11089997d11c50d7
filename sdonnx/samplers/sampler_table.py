"""The table of samplers: diffusers' class, the options that change its result, and the function that plans it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sdonnx.samplers.consistency import plan_lcm, plan_tcd
from sdonnx.samplers.ddim import plan_ddim, plan_pndm
from sdonnx.samplers.dpm_solver import plan_dpm_solver_pp
from sdonnx.samplers.euler import plan_euler, plan_euler_ancestral, plan_heun
from sdonnx.samplers.flow import plan_flow_euler
from sdonnx.samplers.options import Option, PlanRequest, SchedulerOptions
from sdonnx.samplers.plans import SamplingPlan
from sdonnx.samplers.unipc import plan_unipc

__all__ = ["SAMPLERS", "Sampler"]


@dataclass(frozen=True)
class Sampler:
    """A sampler: its names, its options and its planning function.

    Attributes:
        class_name: diffusers' class.
        short_name: name on the command line.
        options: every option of diffusers' class that changes its result.
        build: returns the plan for the options and the request.
        order: calls of the denoiser for each step, diffusers' `order`.
        custom: arguments of diffusers' `set_timesteps` that replace the schedule: "timesteps", "sigmas".
        ends_with_sigma: whether custom sigmas include the level after the last step.
        latent_options: values that differ from diffusers' defaults and that every published latent-diffusion folder
            sets for this class. Used if the folder's configuration is for another class and does not set them.
    """

    class_name: str
    short_name: str
    options: Mapping[str, Option]
    build: Callable[[SchedulerOptions, PlanRequest], SamplingPlan]
    latent_options: Mapping[str, object] = field(default_factory=dict)
    order: int = 1
    custom: frozenset[str] = frozenset()
    ends_with_sigma: bool = False


_TIMESTEPS, _SIGMAS_ONLY = frozenset({"timesteps"}), frozenset({"sigmas"})

_REFUSED = Option(False, (False, None))

_SPACINGS = ("leading", "linspace", "trailing")

_COMMON: Mapping[str, Option] = {
    "num_train_timesteps": Option(1000, int),
    "beta_start": Option(0.0001, float),
    "beta_end": Option(0.02, float),
    "beta_schedule": Option("linear", ("linear", "scaled_linear", "squaredcos_cap_v2")),
    "trained_betas": Option(None, list),
    "steps_offset": Option(0, int),
    "prediction_type": Option("epsilon", ("epsilon", "v_prediction", "sample")),
    "timestep_spacing": Option("leading", _SPACINGS),
}

# sigma_min and sigma_max change diffusers' results even for classes that do not accept them: a configuration keeps
# options that its class does not know, and the computation of the levels reads them.
_DEFORMED: Mapping[str, Option] = {
    "use_karras_sigmas": Option(False, bool),
    "use_exponential_sigmas": Option(False, bool),
    "use_beta_sigmas": _REFUSED,
    "sigma_min": Option(None, float),
    "sigma_max": Option(None, float),
}

_SIGMAS: Mapping[str, Option] = {
    **_COMMON,
    **_DEFORMED,
    "timestep_spacing": Option("linspace", _SPACINGS),
    "rescale_betas_zero_snr": Option(False, bool),
    "final_sigmas_type": Option("zero", ("zero", "sigma_min")),
}

_SHIFT: Mapping[str, Option] = {
    "use_dynamic_shifting": Option(False, bool),
    "time_shift_type": Option("exponential", ("exponential", "linear")),
}

_MULTISTEP: Mapping[str, Option] = {
    **_SIGMAS,
    **_SHIFT,
    "prediction_type": Option("epsilon", ("epsilon", "v_prediction", "sample", "flow_prediction")),
    "solver_order": Option(2, (1, 2, 3)),
    "lower_order_final": Option(True, bool),
    "use_flow_sigmas": Option(False, bool),
    "flow_shift": Option(1.0, float),
    "thresholding": _REFUSED,
}

_DDIM: Mapping[str, Option] = {
    **_COMMON,
    "set_alpha_to_one": Option(True, bool),
    "rescale_betas_zero_snr": Option(False, bool),
    "clip_sample": Option(True, (False, None)),
    "thresholding": _REFUSED,
}

_PNDM: Mapping[str, Option] = {
    **_COMMON,
    "prediction_type": Option("epsilon", ("epsilon", "v_prediction")),
    "set_alpha_to_one": Option(False, bool),
    "skip_prk_steps": Option(False, (True,)),
}

_EULER: Mapping[str, Option] = {
    **_SIGMAS,
    "interpolation_type": Option("linear", ("linear",)),
    "timestep_type": Option("discrete", ("discrete",)),
}

_EULER_ANCESTRAL: Mapping[str, Option] = {
    **_COMMON,
    "prediction_type": Option("epsilon", ("epsilon", "v_prediction")),
    "timestep_spacing": Option("linspace", _SPACINGS),
    "rescale_betas_zero_snr": Option(False, bool),
}

_HEUN: Mapping[str, Option] = {
    **_COMMON,
    **_DEFORMED,
    "beta_start": Option(0.00085, float),
    "beta_end": Option(0.012, float),
    "timestep_spacing": Option("linspace", _SPACINGS),
    "clip_sample": _REFUSED,
}

# For `from_config`, each of diffusers' DEIS, UniPC and DPM classes maps the others' solver names to its own.
_DPM_SOLVER: Mapping[str, Option] = {
    **_MULTISTEP,
    "algorithm_type": Option("dpmsolver++", ("dpmsolver++", "sde-dpmsolver++", "deis")),
    "solver_type": Option("midpoint", ("midpoint", "heun", "logrho", "bh1", "bh2")),
    "euler_at_final": Option(False, bool),
    "lambda_min_clipped": Option(-math.inf, float),
    "use_lu_lambdas": _REFUSED,
    "variance_type": Option(None, (None,)),
}

_UNIPC: Mapping[str, Option] = {
    **_MULTISTEP,
    "solver_type": Option("bh2", ("bh1", "bh2", "midpoint", "heun", "logrho")),
    "predict_x0": Option(True, bool),
    "disable_corrector": Option((), list),
    "solver_p": Option(None, (None,)),
    "shift_terminal": Option(None, float),
}

# diffusers' TCDScheduler also has clip_sample, thresholding, set_alpha_to_one and timestep_scaling, and reads none.
_TCD: Mapping[str, Option] = {
    **_COMMON,
    "beta_start": Option(0.00085, float),
    "beta_end": Option(0.012, float),
    "beta_schedule": Option("scaled_linear", ("linear", "scaled_linear", "squaredcos_cap_v2")),
    "original_inference_steps": Option(50, int),
    "rescale_betas_zero_snr": Option(False, bool),
}

_LCM: Mapping[str, Option] = {
    **_TCD,
    "timestep_scaling": Option(10.0, float),
    "clip_sample": _REFUSED,
    "thresholding": _REFUSED,
}

_FLOW_EULER: Mapping[str, Option] = {
    **_DEFORMED,
    **_SHIFT,
    "num_train_timesteps": Option(1000, int),
    "shift": Option(1.0, float),
    "shift_terminal": Option(None, float),
    "invert_sigmas": _REFUSED,
    "stochastic_sampling": Option(False, bool),
}

SAMPLERS: Mapping[str, Sampler] = MappingProxyType(
    {
        sampler.class_name: sampler
        for sampler in (
            Sampler("DDIMScheduler", "ddim", _DDIM, plan_ddim, {"clip_sample": False}),
            Sampler("PNDMScheduler", "pndm", _PNDM, plan_pndm, {"skip_prk_steps": True}),
            Sampler(
                "EulerDiscreteScheduler",
                "euler",
                _EULER,
                plan_euler,
                custom=_TIMESTEPS | _SIGMAS_ONLY,
                ends_with_sigma=True,
            ),
            Sampler("EulerAncestralDiscreteScheduler", "euler_a", _EULER_ANCESTRAL, plan_euler_ancestral),
            Sampler("HeunDiscreteScheduler", "heun", _HEUN, plan_heun, order=2, custom=_TIMESTEPS),
            Sampler("DPMSolverMultistepScheduler", "dpmsolver++", _DPM_SOLVER, plan_dpm_solver_pp, custom=_TIMESTEPS),
            Sampler("UniPCMultistepScheduler", "unipc", _UNIPC, plan_unipc, custom=_SIGMAS_ONLY),
            Sampler("LCMScheduler", "lcm", _LCM, plan_lcm, custom=_TIMESTEPS),
            Sampler("TCDScheduler", "tcd", _TCD, plan_tcd, custom=_TIMESTEPS),
            Sampler(
                "FlowMatchEulerDiscreteScheduler",
                "flow_euler",
                _FLOW_EULER,
                plan_flow_euler,
                custom=_TIMESTEPS | _SIGMAS_ONLY,
            ),
        )
    }
)
