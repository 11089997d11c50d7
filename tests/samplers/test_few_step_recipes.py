"""The recipes of docs/how-to/use-few-step-models.md, compared with diffusers' schedulers at every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import diffusers
import pytest
from support.trajectories import SD15, SDXL, TOLERANCE, Config, assert_same_timesteps, our_trajectory, their_trajectory

from sdonnx.samplers import CustomSchedule, config_for, plan

# scheduler_config.json of the folders of SDXL-Turbo and SD-Turbo.
XL_TURBO: Config = {**SDXL, "_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing"}
TURBO: Config = {**SDXL, "timestep_spacing": "trailing"}


@dataclass(frozen=True)
class Recipe:
    """The settings of a model card; `options` are passed to diffusers' `from_config`."""

    base: Config
    name: str
    class_name: str
    options: Config = field(default_factory=dict)
    steps: int = 4
    timesteps: tuple[int, ...] | None = None
    eta: float = 0.0


TRAILING: Config = {"timestep_spacing": "trailing"}
RECIPES = {
    "lcm-lora-sd15": Recipe(SD15, "lcm", "LCMScheduler"),
    "lcm-lora-sdxl": Recipe(SDXL, "lcm", "LCMScheduler"),
    "lcm-lora-8": Recipe(SDXL, "lcm", "LCMScheduler", steps=8),
    "hyper-sdxl-1-unet": Recipe(SDXL, "lcm", "LCMScheduler", steps=1, timesteps=(800,)),
    "hyper-sdxl-1-lora": Recipe(SDXL, "tcd", "TCDScheduler", steps=1, eta=1.0),
    "hyper-sdxl-1-tcd-800": Recipe(SDXL, "tcd", "TCDScheduler", steps=1, timesteps=(800,), eta=1.0),
    "hyper-sd15-unified-4": Recipe(SD15, "tcd", "TCDScheduler", steps=4, eta=0.5),
    "hyper-sdxl-2": Recipe(SDXL, "ddim sgm_uniform", "DDIMScheduler", TRAILING, steps=2),
    "hyper-sdxl-4": Recipe(SDXL, "ddim sgm_uniform", "DDIMScheduler", TRAILING, steps=4),
    "hyper-sd15-8": Recipe(SD15, "ddim sgm_uniform", "DDIMScheduler", TRAILING, steps=8),
    "lightning-1": Recipe(
        {**SDXL, "prediction_type": "sample"}, "euler sgm_uniform", "EulerDiscreteScheduler", TRAILING, steps=1
    ),
    "lightning-2": Recipe(SDXL, "euler sgm_uniform", "EulerDiscreteScheduler", TRAILING, steps=2),
    "lightning-4": Recipe(SDXL, "euler sgm_uniform", "EulerDiscreteScheduler", TRAILING, steps=4),
    "lightning-8": Recipe(SDXL, "euler sgm_uniform", "EulerDiscreteScheduler", TRAILING, steps=8),
    "sdxl-turbo-1": Recipe(XL_TURBO, "euler a", "EulerAncestralDiscreteScheduler", steps=1),
    "sdxl-turbo-4": Recipe(XL_TURBO, "euler a", "EulerAncestralDiscreteScheduler", steps=4),
    "sd-turbo-1": Recipe(TURBO, "euler", "EulerDiscreteScheduler", steps=1),
    "sd-turbo-4": Recipe(TURBO, "euler", "EulerDiscreteScheduler", steps=4),
    "dmd2-4": Recipe(SDXL, "lcm", "LCMScheduler", timesteps=(999, 749, 499, 249)),
    "dmd2-1": Recipe(SDXL, "lcm", "LCMScheduler", steps=1, timesteps=(399,)),
    "tcd-lora-4": Recipe(SDXL, "tcd", "TCDScheduler", steps=4, eta=0.3),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str) -> None:
    recipe = RECIPES[name]
    scheduler: Any = getattr(diffusers, recipe.class_name).from_config(recipe.base, **recipe.options)
    # diffusers' DDIMScheduler clips latents by default; no published folder keeps that.
    assert not scheduler.config.get("clip_sample", False)
    if recipe.timesteps is None:
        scheduler.set_timesteps(recipe.steps)
    else:
        scheduler.set_timesteps(timesteps=list(recipe.timesteps))
    config = config_for(recipe.name, recipe.base)
    assert config["_class_name"] == recipe.class_name
    custom = CustomSchedule.create(recipe.timesteps, None, None, None)
    made = plan(config, recipe.steps, eta=recipe.eta, custom=custom)
    assert len(made.timesteps) == recipe.steps
    assert_same_timesteps(made, scheduler.timesteps.numpy())
    assert made.init_noise_sigma == pytest.approx(float(scheduler.init_noise_sigma), rel=1e-6)
    expected, found = their_trajectory(scheduler, eta=recipe.eta), our_trajectory(made)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    assert max(errors) < TOLERANCE
