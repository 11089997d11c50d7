"""Custom timesteps and sigmas, and parts of a schedule, compared with diffusers' schedulers at every call."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
from support.pipelines import refused
from support.trajectories import (
    SD15,
    SDXL,
    SHORT_NAMES,
    TOLERANCE,
    Config,
    assert_same_timesteps,
    our_trajectory,
    scheduler_of,
    their_trajectory,
)

from sdonnx.errors import OptionError
from sdonnx.samplers import SAMPLERS, CustomSchedule, config_for, plan

# Align Your Steps (arXiv:2404.14507), as published for Stable Diffusion 1.5 and XL.
TIMESTEPS = [999, 850, 736, 645, 545, 455, 343, 233, 124, 24]
SIGMAS = [14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029, 0.0]
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
FLOW_SIGMAS = [1.0, 0.9, 0.6, 0.31, 0.1]


def custom(timesteps: Any = None, sigmas: Any = None, start: Any = None, end: Any = None) -> CustomSchedule:
    return CustomSchedule.create(timesteps, sigmas, start, end)


def accepted(name: str) -> set[str]:
    """Return the arguments for custom schedules that diffusers' class accepts."""
    class_name = config_for(name, SD15)["_class_name"]
    return {"timesteps", "sigmas"} & set(
        inspect.signature(getattr(diffusers, str(class_name)).set_timesteps).parameters
    )


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_the_same_arguments_are_accepted(name: str) -> None:
    sampler = next(each for each in SAMPLERS.values() if each.short_name == name)
    assert sampler.custom == accepted(name)
    for argument, values in (("timesteps", TIMESTEPS), ("sigmas", SIGMAS)):
        if argument not in accepted(name):
            with refused(OptionError, f"{argument} given", sampler.class_name, "EulerDiscreteScheduler"):
                plan(config_for(name, SD15), 5, custom=custom(**{argument: values}))


def assert_same(config: Config, strength: float = 1.0, eta: float = 0.0, **given: Any) -> None:
    scheduler = scheduler_of(config)
    scheduler.set_timesteps(**{name: np.array(values) for name, values in given.items()})
    made = plan(config, 50, eta=eta, strength=strength, custom=custom(**given))
    steps = len(scheduler.timesteps) if scheduler.order == 1 else (len(scheduler.timesteps) + 1) // 2
    skipped = steps - int(steps * strength)
    assert_same_timesteps(made, scheduler.timesteps[skipped * scheduler.order :].numpy())
    if hasattr(scheduler, "init_noise_sigma"):
        assert made.init_noise_sigma == pytest.approx(float(scheduler.init_noise_sigma), rel=1e-6)
    expected = their_trajectory(scheduler, eta=eta, skipped=skipped, from_image=strength < 1)
    found = our_trajectory(made, from_image=strength < 1)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    assert max(errors) < TOLERANCE


@pytest.mark.parametrize("strength", [1.0, 0.55])
@pytest.mark.parametrize("base", [SD15, SDXL], ids=["sd15", "sdxl"])
@pytest.mark.parametrize("name", [name for name in SHORT_NAMES if "timesteps" in accepted(name)])
def test_timesteps(name: str, base: Config, strength: float) -> None:
    assert_same(config_for(name, base), strength, timesteps=TIMESTEPS)


@pytest.mark.parametrize("strength", [1.0, 0.55])
@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_timesteps_of_tcd(eta: float, strength: float) -> None:
    assert_same(config_for("tcd", SD15), strength, eta, timesteps=TIMESTEPS)


@pytest.mark.parametrize("eta", [0.3, 0.35, 0.9])
def test_timesteps_of_tcd_that_a_double_floors_to_another(eta: float) -> None:
    # For example 0.7 * 90, which is 63 in diffusers' single precision.
    timesteps = [340, 180, 90, 40]
    assert any(np.floor((1 - eta) * each) != np.floor(np.float32(1 - eta) * np.float32(each)) for each in timesteps[1:])
    assert_same(config_for("tcd", SD15), 1.0, eta, timesteps=timesteps)


@pytest.mark.parametrize("timesteps", [[999], [980, 20], [999.0, 500.0, 0.0]])
@pytest.mark.parametrize("name", ["euler", "dpmsolver++", "tcd"])
def test_few_timesteps(name: str, timesteps: list[float]) -> None:
    assert_same(config_for(name, SD15), timesteps=timesteps)


@pytest.mark.parametrize("strength", [1.0, 0.55])
@pytest.mark.parametrize("sigmas", [SIGMAS, [*SIGMAS[:-1]], [14.0, 0.0]])
def test_sigmas_of_euler(sigmas: list[float], strength: float) -> None:
    if strength == 1 or len(sigmas) > 2:
        assert_same(config_for("euler", SDXL), strength, sigmas=sigmas)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("flow_euler", {}), ("flow_euler", {"shift": 3.0}), ("unipc", FLOW), ("unipc", {**FLOW, "solver_order": 3})],
)
def test_sigmas_of_a_flow(name: str, changes: Config) -> None:
    assert_same(config_for(name, {**SD15, **changes}), sigmas=FLOW_SIGMAS)


def test_shifted_timesteps_of_a_flow() -> None:
    assert_same(config_for("flow_euler", {**SD15, "shift": 3.0}), timesteps=[1000, 700, 250.5])


@pytest.mark.parametrize("steps", [5, 7, 20, 25])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_parts_of_a_schedule(name: str, share: float, steps: int) -> None:
    """As StableDiffusionXLPipeline with denoising_end, and StableDiffusionXLImg2ImgPipeline with denoising_start."""
    config = config_for(name, {**SD15, "timestep_spacing": "leading"})
    scheduler = scheduler_of(config)
    scheduler.set_timesteps(steps)
    limit = round(1000 - share * 1000)
    count = len([timestep for timestep in scheduler.timesteps if timestep >= limit])
    whole = our_trajectory(plan(config, steps))
    first = plan(config, steps, custom=custom(end=share))
    assert_same_timesteps(first, scheduler.timesteps[:count].numpy())
    assert all(a.equal(b) for a, b in zip(our_trajectory(first), whole[:count], strict=True))

    pipeline: Any = diffusers.StableDiffusionXLImg2ImgPipeline
    timesteps, _ = pipeline.get_timesteps(
        SimpleNamespace(scheduler=scheduler), steps, 0.3, "cpu", denoising_start=share
    )
    second = plan(config, steps, strength=0.3, custom=custom(start=share))
    assert_same_timesteps(second, timesteps.numpy())
    skipped = (len(scheduler.timesteps) - len(timesteps)) // scheduler.order
    expected = their_trajectory(scheduler, skipped=skipped, from_image=True)
    for a, b in zip(our_trajectory(second, from_image=True), expected, strict=True):
        assert float((a - b).norm() / b.norm()) < TOLERANCE


def test_known_areas_end_without_noise() -> None:
    made = plan(SD15, 10, custom=custom(end=0.5))
    assert (made.clean_scales[-1], made.noise_scales[-1]) == (1, 0)
    assert len(made.clean_scales) == len(made.timesteps) + 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"timesteps": [10, 5], "sigmas": [1, 0]}, "timesteps and sigmas"),
        ({"timesteps": []}, "a list of numbers"),
        ({"timesteps": "many"}, "a list of numbers"),
        ({"timesteps": [[1]]}, "a list of numbers"),
        ({"timesteps": [5, float("nan")]}, "a list of numbers"),
        ({"timesteps": [5, 5]}, "numbers that fall"),
        ({"sigmas": [1, -1]}, "from 0 on"),
        ({"start": 1}, "denoising_start is 1"),
        ({"end": 0}, "denoising_end is 0"),
        ({"start": 0.5, "end": 0.5}, "a smaller start"),
        ({"end": "half"}, "a share"),
        ({"start": True}, "a share"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], word: str) -> None:
    with refused(OptionError, word):
        custom(**arguments)


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        (config_for("euler", SD15), {"timesteps": [1000, 5]}, ["1000", "at most 999"]),
        (config_for("euler", SD15), {"sigmas": [3.0]}, ["sigmas of one number"]),
        (config_for("euler", {**SD15, "use_karras_sigmas": True}), {"timesteps": TIMESTEPS}, ["use_karras_sigmas"]),
        (config_for("dpmsolver++", {**SD15, **FLOW}), {"timesteps": TIMESTEPS}, ["use_flow_sigmas"]),
        (config_for("unipc", SD15), {"sigmas": FLOW_SIGMAS}, ["use_flow_sigmas to be true"]),
        (config_for("euler", SD15), {"end": 0.0001}, ["leaves no step"]),
        (config_for("euler", SD15), {"start": 0.9999}, ["no step is left"]),
    ],
)
def test_schedules_that_do_not_fit_are_refused(config: Config, arguments: dict[str, Any], words: list[str]) -> None:
    with refused(OptionError, *words):
        plan(config, 5, custom=custom(**arguments))
