"""Names of schedulers, as diffusers, A1111 and ComfyUI spell them.

Upper and lower case, spaces, hyphens and underscores do not matter, and "++" may be written "pp". A name may end with
the name of a noise schedule: "DPM++ 2M Karras", "euler sgm_uniform".

Source of the mapping: the tables "A1111/k-diffusion" and "Noise schedules and schedule types" of diffusers'
documentation (docs/source/en/api/schedulers/overview.md). Names that they lack are of `KSampler.SAMPLERS` in ComfyUI
and of `modules/sd_samplers_*.py` in A1111.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sdonnx.errors import SchedulerError
from sdonnx.samplers.sampler_table import SAMPLERS

__all__ = ["SCHEDULER_NAMES", "SchedulerName", "parse_name"]


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

_DEFORMED: Mapping[str, object] = {
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
}

_NOISE_SCHEDULES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "karras": {**_DEFORMED, "use_karras_sigmas": True},
        "exponential": {**_DEFORMED, "timestep_spacing": "linspace", "use_exponential_sigmas": True},
        "beta": {**_DEFORMED, "timestep_spacing": "linspace", "use_beta_sigmas": True},
        "sgm_uniform": {"timestep_spacing": "trailing"},
        "simple": {"timestep_spacing": "trailing"},
        "ka": {**_DEFORMED, "use_karras_sigmas": True},  # end of A1111's short aliases: k_dpmpp_2m_ka
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
