"""Compare image to image and inpainting with diffusers: skipped steps, and clean latents with noise added."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support.trajectories import CLEAN, NOISE, SD15, SHORT_NAMES, Config, assert_same, noised, scheduler_of

from sdonnx.errors import OptionError
from sdonnx.samplers import config_for, plan

STRENGTHS = (0.1, 0.2, 0.3, 0.5, 0.6, 0.75, 0.8, 0.9, 0.99, 1.0)
# Options that use more history than the defaults.
DEEP: dict[str, Config] = {"dpmsolver++": {"solver_order": 3, "lower_order_final": False}, "unipc": {"solver_order": 3}}


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_image_to_image(name: str, strength: float) -> None:
    assert_same(config_for(name, SD15), (10, 11, 25, 50), strength=strength, from_image=True, eta=0.4)


@pytest.mark.parametrize("strength", [0.3, 0.8])
@pytest.mark.parametrize("spacing", ["linspace", "trailing"])
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_image_to_image_with_other_spacings(name: str, spacing: str, strength: float) -> None:
    config = config_for(name, {**SD15, **DEEP.get(name, {}), "timestep_spacing": spacing})
    assert_same(config, (4, 10, 20), strength=strength, from_image=True)


@pytest.mark.parametrize("name", ["dpmsolver++", "unipc"])
@pytest.mark.parametrize("strength", [0.3, 0.8])
def test_image_to_image_with_a_flow(name: str, strength: float) -> None:
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
    assert_same(config_for(name, {**SD15, **flow}), (10, 20), strength=strength, from_image=True)


@pytest.mark.parametrize("skipped", range(8))
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_every_first_step(name: str, skipped: int) -> None:
    # PNDM uses its second call as the correction of the first, wherever the list of calls is cut.
    assert_same(config_for(name, SD15), (8,), strength=(8 - skipped) / 8, from_image=True)


@pytest.mark.parametrize("strength", [0.4, 1.0])
@pytest.mark.parametrize("changes", [{}, {"timestep_spacing": "trailing", "use_karras_sigmas": True}])
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_inpainting(name: str, changes: Config, strength: float) -> None:
    config = config_for(name, {**SD15, **DEEP.get(name, {}), **changes})
    assert_same(config, (1, 5, 20) if strength == 1 else (5, 20), strength=strength, from_image=True, inpaint=True)


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_inpainting_from_noise(name: str) -> None:
    assert_same(config_for(name, SD15), (5, 20), inpaint=True)


@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_clean_latents_with_noise(name: str, strength: float) -> None:
    config = config_for(name, SD15)
    scheduler = scheduler_of(config)
    scheduler.set_timesteps(14)
    first = (14 - int(14 * strength)) * scheduler.order
    made = plan(config, 14, strength=strength)
    timesteps = scheduler.timesteps[first:]
    assert made.clean_scales.dtype == made.noise_scales.dtype == np.float32
    assert made.clean_scales.shape == made.noise_scales.shape == (len(timesteps) + 1,)
    for call, timestep in enumerate(timesteps):
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(first + call)
        found = CLEAN * float(made.clean_scales[call]) + NOISE * float(made.noise_scales[call])
        np.testing.assert_allclose(found.numpy(), noised(scheduler, timestep[None]).numpy(), rtol=1e-5, atol=1e-6)
    assert (made.clean_scales[-1], made.noise_scales[-1]) == (1, 0)


def test_known_latents_end_clean_if_the_sampler_ends_with_noise() -> None:
    made = plan(config_for("dpmsolver++", {**SD15, "final_sigmas_type": "sigma_min"}), 6)
    assert (made.clean_scales[-1], made.noise_scales[-1]) == (1, 0)


@pytest.mark.parametrize(("steps", "strength"), [(10, 0.09), (1, 0.5), (3, 0.3), (50, 1e-9)])
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_rejects_a_strength_that_leaves_no_step(name: str, steps: int, strength: float) -> None:
    with pytest.raises(OptionError, match="no step") as caught:
        plan(config_for(name, SD15), steps, strength=strength)
    assert "strength" in caught.value.remedy


def test_rejects_a_strength_that_leaves_no_timestep() -> None:
    # The bound leaves fewer timesteps than steps, and all of them are skipped.
    changes = {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": 2.0, "timestep_spacing": "trailing"}
    config = config_for("dpmsolver++", {**SD15, **changes})
    scheduler = scheduler_of(config)
    scheduler.set_timesteps(10)
    assert len(scheduler.timesteps) == 1
    with pytest.raises(OptionError, match="no step"):
        plan(config, 10, strength=0.5)


@pytest.mark.parametrize("strength", [0.0, -0.5, 1.01, math.nan, math.inf])
def test_rejects_strength_out_of_range(strength: Any) -> None:
    with pytest.raises(OptionError, match="strength"):
        plan(SD15, 10, strength=strength)
