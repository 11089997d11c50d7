"""The table of samplers, and the names of schedulers as diffusers, A1111 and ComfyUI spell them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sdonnx.errors import SchedulerError
from sdonnx.samplers.euler import plan_euler, plan_euler_ancestral, plan_heun
from sdonnx.samplers.flow import plan_flow_euler
from sdonnx.samplers.multistep_solvers import plan_dpm_solver_pp, plan_unipc
from sdonnx.samplers.options import Option, PlanRequest, SchedulerOptions
from sdonnx.samplers.plans import SamplingPlan
from sdonnx.samplers.timestep_samplers import plan_ddim, plan_lcm, plan_pndm, plan_tcd

__all__ = ["SAMPLERS", "SCHEDULER_NAMES", "Sampler", "SchedulerName", "parse_name"]


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


@dataclass(frozen=True)
class SchedulerName:
    """One sampler under its names.

    Attributes:
        class_name: diffusers' class.
        spellings: names of the sampler. The class name is a name as well.
        options: options that the names stand for; all others stay as the folder has them.
    """

    class_name: str
    spellings: tuple[str, ...]
    options: Mapping[str, object] = field(default_factory=dict)


_SDE: Mapping[str, object] = {"algorithm_type": "sde-dpmsolver++", "solver_order": 2}

SCHEDULER_NAMES: tuple[SchedulerName, ...] = (
    SchedulerName("DDIMScheduler", ("DDIM",)),
    SchedulerName("PNDMScheduler", ("PNDM", "PLMS")),
    SchedulerName("EulerDiscreteScheduler", ("Euler", "euler_discrete")),
    SchedulerName("EulerAncestralDiscreteScheduler", ("Euler a", "euler_ancestral", "euler_ancestral_discrete")),
    SchedulerName("HeunDiscreteScheduler", ("Heun", "heun_discrete")),
    SchedulerName("DPMSolverMultistepScheduler", ("dpmsolver", "dpmsolver++", "dpmsolver_multistep", "dpmpp")),
    SchedulerName("DPMSolverMultistepScheduler", ("DPM++ 2M",), {"algorithm_type": "dpmsolver++", "solver_order": 2}),
    SchedulerName("DPMSolverMultistepScheduler", ("DPM++ 2M SDE", "dpmpp_2m_sde_gpu"), _SDE),
    SchedulerName(
        "DPMSolverMultistepScheduler",
        ("DPM++ 2M SDE Heun", "dpmpp_2m_sde_heun_gpu"),
        {**_SDE, "solver_type": "heun"},
    ),
    SchedulerName("DPMSolverMultistepScheduler", ("DPM++ 3M SDE", "dpmpp_3m_sde_gpu"), {**_SDE, "solver_order": 3}),
    SchedulerName("UniPCMultistepScheduler", ("UniPC", "uni_pc", "unipc_multistep")),
    SchedulerName("UniPCMultistepScheduler", ("uni_pc_bh1",), {"solver_type": "bh1"}),
    SchedulerName("UniPCMultistepScheduler", ("uni_pc_bh2",), {"solver_type": "bh2"}),
    SchedulerName("LCMScheduler", ("LCM",)),
    SchedulerName("FlowMatchEulerDiscreteScheduler", ("flow_euler", "flow_match_euler", "flow_match_euler_discrete")),
    SchedulerName("LMSDiscreteScheduler", ("LMS", "lms_discrete")),
    SchedulerName("DDPMScheduler", ("DDPM",)),
    SchedulerName("DEISMultistepScheduler", ("DEIS", "deis_multistep")),
    SchedulerName("DPMSolverSinglestepScheduler", ("DPM++ SDE", "dpmpp_sde_gpu", "dpmsolver_singlestep")),
    SchedulerName("DPMSolverSDEScheduler", ("dpmsolver_sde",)),
    SchedulerName("KDPM2DiscreteScheduler", ("DPM2", "dpm_2", "kdpm2", "k_dpm_2_discrete")),
    SchedulerName(
        "KDPM2AncestralDiscreteScheduler",
        ("DPM2 a", "dpm_2_ancestral", "kdpm2_ancestral", "k_dpm_2_ancestral_discrete"),
    ),
    SchedulerName("SASolverScheduler", ("sa_solver",)),
    SchedulerName("TCDScheduler", ("TCD",)),
    SchedulerName("IPNDMScheduler", ("iPNDM",)),
    SchedulerName("EDMEulerScheduler", ("edm_euler",)),
    SchedulerName("EDMDPMSolverMultistepScheduler", ("edm_dpmsolver_multistep",)),
    SchedulerName("FlowMatchHeunDiscreteScheduler", ("flow_match_heun", "flow_match_heun_discrete")),
    SchedulerName("FlowMatchLCMScheduler", ("flow_match_lcm",)),
)
"""Every sampler that can be chosen by name. Those that are not in `SAMPLERS` run on the host, with diffusers."""

# Samplers that diffusers lacks, with the nearest one that it has.
_ABSENT: Mapping[str, str] = {
    "DPM++ 2S a": "DPM++ SDE",
    "dpmpp_2s_ancestral": "DPM++ SDE",
    "DPM fast": "DPM2",
    "DPM adaptive": "DPM2",
    "Restart": "Heun",
    "heunpp2": "Heun",
    "DDIM CFG++": "DDIM",
    "euler_cfg_pp": "Euler",
    "euler_ancestral_cfg_pp": "Euler a",
    "dpmpp_2m_cfg_pp": "DPM++ 2M",
    "ipndm_v": "iPNDM",
    "res_multistep": "DPM++ 2M",
    "er_sde": "DPM++ 2M SDE",
}

_NOT_DEFORMED: Mapping[str, object] = {
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
}

_NOISE_SCHEDULES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "karras": {**_NOT_DEFORMED, "use_karras_sigmas": True},
        "exponential": {**_NOT_DEFORMED, "timestep_spacing": "linspace", "use_exponential_sigmas": True},
        "beta": {**_NOT_DEFORMED, "timestep_spacing": "linspace", "use_beta_sigmas": True},
        "sgm_uniform": {"timestep_spacing": "trailing"},
        "simple": {"timestep_spacing": "trailing"},
        "ka": {**_NOT_DEFORMED, "use_karras_sigmas": True},  # end of A1111's short aliases: k_dpmpp_2m_ka
    }
)

# Classes of diffusers without an option for the noise levels, and those that choose their timesteps in one way only.
_UNDEFORMED = {
    "DDIMScheduler",
    "DDPMScheduler",
    "EDMDPMSolverMultistepScheduler",
    "EDMEulerScheduler",
    "EulerAncestralDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "IPNDMScheduler",
    "LCMScheduler",
    "PNDMScheduler",
    "TCDScheduler",
}
_UNSPACED = {
    "EDMDPMSolverMultistepScheduler",
    "EDMEulerScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "IPNDMScheduler",
}


def parse_name(name: str) -> tuple[str, dict[str, object]]:
    """Return diffusers' class for a scheduler's name, and the options that the name stands for.

    Args:
        name: a class of diffusers, a short name of `SAMPLERS`, or a name as A1111 and ComfyUI spell it.

    Raises:
        SchedulerError: the name is unknown, diffusers has no such sampler, or its class has no such noise schedule.
    """
    key = _normalized(name)
    if (found := _find(key)) is not None:
        return found.class_name, dict(found.options)
    for schedule, options in _NOISE_SCHEDULES.items():
        ending = _normalized(schedule)
        sampler = _find(key.removesuffix(ending)) if key.endswith(ending) else None
        if sampler is not None:
            _require_schedule(sampler, schedule)
            return sampler.class_name, {**sampler.options, **options}
    for absent, nearest in _ABSENT.items():
        if key.startswith(_normalized(absent)):
            raise SchedulerError(
                f"diffusers has no scheduler for {name!r}", "a sampler that it has", f"choose for example {nearest!r}"
            )
    raise _unknown(name, key)


def _require_schedule(sampler: SchedulerName, schedule: str) -> None:
    refusing = _UNSPACED if schedule in ("sgm_uniform", "simple") else _UNDEFORMED
    if sampler.class_name in refusing:
        raise SchedulerError(
            f"diffusers' {sampler.class_name} has no {schedule} noise schedule",
            f"{sampler.spellings[0]!r} without it",
            f"choose {sampler.spellings[0]!r} or 'DPM++ 2M {schedule}'",
        )


def _unknown(name: str, key: str) -> SchedulerError:
    """Return the error for a name that no sampler has, with the closest names."""
    spellings = {_normalized(each): each for sampler in SCHEDULER_NAMES for each in _names_of(sampler)}
    close = [spellings[each] for each in difflib.get_close_matches(key, spellings, 2)]
    short = ", ".join(f"{sampler.short_name} ({sampler.class_name})" for sampler in SAMPLERS.values())
    remedy = f"did you mean {' or '.join(map(repr, close))}?" if close else "choose one of these samplers"
    return SchedulerError(f"the sampler is {name!r}", f"one of {short}, or another name of diffusers or A1111", remedy)


def _names_of(sampler: SchedulerName) -> tuple[str, ...]:
    return (*sampler.spellings, sampler.class_name) if not sampler.options else sampler.spellings


def _find(key: str) -> SchedulerName | None:
    return _BY_KEY.get(key) or _BY_KEY.get(key.removeprefix("k"))


def _normalized(name: str) -> str:
    """Return a name without the differences between spellings."""
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("++", "pp"))


_BY_KEY: Mapping[str, SchedulerName] = MappingProxyType(
    {_normalized(name): sampler for sampler in SCHEDULER_NAMES for name in _names_of(sampler)}
)
