"""Each spelling of a scheduler's name is the scheduler of diffusers that diffusers' documentation lists for it."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from support.pipelines import refused
from support.trajectories import SD15, SDXL

from sdonnx.errors import SchedulerError
from sdonnx.samplers import SAMPLERS, SCHEDULER_NAMES, config_for, plan, set_options
from sdonnx.samplers.sampler_table import parse_name

_DPM, _SINGLE = diffusers.DPMSolverMultistepScheduler, diffusers.DPMSolverSinglestepScheduler
_EULER, _ANCESTRAL = diffusers.EulerDiscreteScheduler, diffusers.EulerAncestralDiscreteScheduler
_LMS, _KDPM2, _KDPM2_A = (
    diffusers.LMSDiscreteScheduler,
    diffusers.KDPM2DiscreteScheduler,
    diffusers.KDPM2AncestralDiscreteScheduler,
)
_KARRAS = {"use_karras_sigmas": True}
_SDE = {"algorithm_type": "sde-dpmsolver++"}

# The tables "A1111/k-diffusion" and "Noise schedules and schedule types" of diffusers' documentation
# (api/schedulers/overview), with the spellings of A1111, ComfyUI and diffusers' file names.
SPELLINGS: list[tuple[str, Any, dict[str, Any]]] = [
    ("DPM++ 2M", _DPM, {}),
    ("dpmpp_2m", _DPM, {}),
    ("k_dpmpp_2m", _DPM, {}),
    ("dpmsolver", _DPM, {}),
    ("dpmsolver++", _DPM, {}),
    ("DPMSolverMultistepScheduler", _DPM, {}),
    ("DPM++ 2M Karras", _DPM, _KARRAS),
    ("dpm++ 2m karras", _DPM, _KARRAS),
    ("dpmpp_2m_karras", _DPM, _KARRAS),
    ("k_dpmpp_2m_ka", _DPM, _KARRAS),
    ("DPM++ 2M Exponential", _DPM, {"timestep_spacing": "linspace", "use_exponential_sigmas": True}),
    ("DPM++ 2M beta", _DPM, {"timestep_spacing": "linspace", "use_beta_sigmas": True}),
    ("DPM++ 2M SGM Uniform", _DPM, {"timestep_spacing": "trailing"}),
    ("DPM++ 2M simple", _DPM, {"timestep_spacing": "trailing"}),
    ("DPM++ 2M SDE", _DPM, _SDE),
    ("dpmpp_2m_sde", _DPM, _SDE),
    ("dpmpp_2m_sde_gpu", _DPM, _SDE),
    ("DPM++ 2M SDE Karras", _DPM, _SDE | _KARRAS),
    ("DPM++ 2M SDE Heun Karras", _DPM, _SDE | _KARRAS | {"solver_type": "heun"}),
    ("DPM++ 3M SDE Karras", _DPM, _SDE | _KARRAS | {"solver_order": 3}),
    ("DPM++ SDE", _SINGLE, {}),
    ("DPM++ SDE Karras", _SINGLE, _KARRAS),
    ("dpmpp_sde", _SINGLE, {}),
    ("DPM2", _KDPM2, {}),
    ("dpm_2", _KDPM2, {}),
    ("DPM2 Karras", _KDPM2, _KARRAS),
    ("DPM2 a", _KDPM2_A, {}),
    ("dpm_2_ancestral", _KDPM2_A, {}),
    ("DPM2 a Karras", _KDPM2_A, _KARRAS),
    ("Euler", _EULER, {}),
    ("k_euler", _EULER, {}),
    ("euler_discrete", _EULER, {}),
    ("Euler Karras", _EULER, _KARRAS),
    ("euler sgm_uniform", _EULER, {"timestep_spacing": "trailing"}),
    ("Euler a", _ANCESTRAL, {}),
    ("euler a", _ANCESTRAL, {}),
    ("euler_ancestral", _ANCESTRAL, {}),
    ("EULER-ANCESTRAL", _ANCESTRAL, {}),
    ("k_euler_a", _ANCESTRAL, {}),
    ("Heun", diffusers.HeunDiscreteScheduler, {}),
    ("heun karras", diffusers.HeunDiscreteScheduler, _KARRAS),
    ("LMS", _LMS, {}),
    ("k_lms", _LMS, {}),
    ("LMS Karras", _LMS, _KARRAS),
    ("DDIM", diffusers.DDIMScheduler, {}),
    ("ddim trailing", None, {}),
    ("PLMS", diffusers.PNDMScheduler, {}),
    ("ddpm", diffusers.DDPMScheduler, {}),
    ("deis", diffusers.DEISMultistepScheduler, {}),
    ("UniPC", diffusers.UniPCMultistepScheduler, {}),
    ("uni_pc", diffusers.UniPCMultistepScheduler, {}),
    ("uni_pc_bh2", diffusers.UniPCMultistepScheduler, {"solver_type": "bh2"}),
    ("lcm", diffusers.LCMScheduler, {}),
    ("tcd", diffusers.TCDScheduler, {}),
    ("sa_solver", diffusers.SASolverScheduler, {}),
    ("ipndm", diffusers.IPNDMScheduler, {}),
]


@pytest.mark.parametrize("base", [SD15, SDXL], ids=["sd15", "sdxl"])
@pytest.mark.parametrize(("name", "expected_class", "options"), SPELLINGS, ids=[name for name, *_ in SPELLINGS])
def test_spelling_is_a_scheduler_of_diffusers(
    name: str, expected_class: Any, options: dict[str, Any], base: dict[str, Any]
) -> None:
    if expected_class is None:
        with refused(SchedulerError, repr(name)):
            config_for(name, base)
        return
    theirs = expected_class.from_config(base, **options)
    theirs.set_timesteps(7)
    config = config_for(name, base)
    assert config["_class_name"] == expected_class.__name__
    found = expected_class.from_config(config)
    found.set_timesteps(7)
    own = {key: value for key, value in theirs.config.items() if not key.startswith("_")}
    # Entries of other classes have no effect on this one.
    assert {key: found.config[key] for key in own.keys() & expected_class().config.keys()} == {
        key: own[key] for key in own.keys() & expected_class().config.keys()
    }
    assert torch.equal(found.timesteps, theirs.timesteps)
    sigmas = getattr(theirs, "sigmas", None)
    assert sigmas is None or torch.equal(found.sigmas, sigmas)
    if expected_class.__name__ in SAMPLERS and not options.get("use_beta_sigmas"):
        made = plan(config, 7)
        np.testing.assert_allclose(made.timesteps, theirs.timesteps.numpy(), rtol=1e-6)
        if sigmas is not None and len(sigmas) == len(made.timesteps) + 1:
            np.testing.assert_allclose(made.noise_scales[:-1] / made.clean_scales[:-1], sigmas[:-1].numpy(), rtol=2e-5)


def test_every_class_and_short_name_is_a_name() -> None:
    for sampler in SAMPLERS.values():
        assert parse_name(sampler.class_name) == (sampler.class_name, {})
        assert parse_name(sampler.short_name) == (sampler.class_name, {})
    for name in SCHEDULER_NAMES:
        assert hasattr(diffusers, name.class_name)
        assert all(parse_name(each) == (name.class_name, dict(name.options)) for each in name.spellings)


def test_a_noise_schedule_replaces_that_of_the_folder() -> None:
    base = SD15 | {"use_karras_sigmas": True}
    config = config_for("euler exponential", base)
    assert (config["use_karras_sigmas"], config["use_exponential_sigmas"]) == (False, True)
    assert config_for("euler", base)["use_karras_sigmas"] is True


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eulr", ["'eulr'", "did you mean", "Euler"]),
        ("dpm++ 2m karas", ["did you mean"]),
        ("EulerAncestralScheduler", ["did you mean 'EulerAncestralDiscreteScheduler'"]),
        ("zzz", ["choose one of these samplers"]),
        ("", ["choose one of these samplers"]),
        ("DPM++ 2S a Karras", ["diffusers has no scheduler", "'DPM++ SDE'"]),
        ("dpm_adaptive", ["diffusers has no scheduler"]),
        ("euler_cfg_pp", ["diffusers has no scheduler", "'Euler'"]),
        ("euler a karras", ["EulerAncestralDiscreteScheduler has no karras noise schedule"]),
        ("ipndm simple", ["IPNDMScheduler has no simple noise schedule"]),
    ],
)
def test_rejected_names(name: str, words: list[str]) -> None:
    with refused(SchedulerError, *words):
        config_for(name, SD15)


def test_defaults_of_a_diffusers_object_are_not_options_of_the_folder() -> None:
    """As `from_config` does, or a switch would keep the defaults of the class that is left."""
    scheduler = diffusers.EulerDiscreteScheduler.from_config(SD15)
    config = {**scheduler.config, "_class_name": "EulerDiscreteScheduler"}
    assert config["timestep_spacing"] == "linspace"
    assert "timestep_spacing" not in set_options(config)
    assert set_options(config | {"timestep_spacing": "trailing"})["timestep_spacing"] == "trailing"
    expected = diffusers.DDIMScheduler.from_config(scheduler.config)
    assert diffusers.DDIMScheduler.from_config(config_for("ddim", config)).config.timestep_spacing == (
        expected.config.timestep_spacing
    )
