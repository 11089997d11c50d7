"""Compare every sampler with diffusers' scheduler at every step: step counts, spacings, predictions, levels."""

from __future__ import annotations

import numpy as np
import pytest
from support.trajectories import (
    SD15,
    SD21,
    SDXL,
    SHORT_NAMES,
    STEP_COUNTS,
    TOLERANCE,
    ZERO_SNR_TOLERANCE,
    Config,
    assert_same,
    scheduler_of,
)

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers import config_for, plan

# Diffusion samplers that read timestep_spacing.
SPACED = ("ddim", "pndm", "euler", "euler_a", "heun", "dpmsolver++", "unipc")
# Samplers with the timesteps of the distillation, 50 by default.
DISTILLED = ("lcm", "tcd")
WITH_DEFORMED_SIGMAS = ("euler", "heun", "dpmsolver++", "unipc")
SPACINGS = ("leading", "linspace", "trailing")
DEFORMATIONS = ("use_karras_sigmas", "use_exponential_sigmas")
# Every count at which solvers change their order, and larger ones where spacing rounds in different ways.
MANY_STEP_COUNTS = (*range(1, 22), 25, 28, 30, 33, 37, 49, 50, 61, 62, 77, 99, 100)


@pytest.mark.parametrize("base", [SD15, {}], ids=["sd15", "defaults"])
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_every_step_count(name: str, base: Config) -> None:
    config = config_for(name, base)
    assert_same(config, [count for count in MANY_STEP_COUNTS if count <= 50 or name not in DISTILLED])


@pytest.mark.parametrize("name", DISTILLED)
def test_every_step_count_of_a_model_distilled_with_more(name: str) -> None:
    assert_same(config_for(name, {**SD15, "original_inference_steps": 100}), MANY_STEP_COUNTS)


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("name", SPACED)
def test_spacing_and_prediction_type(name: str, prediction_type: str, spacing: str) -> None:
    config = config_for(name, {**SD15, "timestep_spacing": spacing, "prediction_type": prediction_type})
    if name in ("pndm", "euler_a") and prediction_type == "sample":
        with pytest.raises(SchedulerError, match="prediction_type"):
            plan(config, 10)
    else:
        assert_same(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02},
        {"beta_schedule": "squaredcos_cap_v2"},
        {"trained_betas": np.geomspace(1e-4, 2e-2, 1000).tolist()},
        {"steps_offset": 0},
        {"set_alpha_to_one": True},
        {"num_train_timesteps": 500},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_training_schedule(name: str, changes: Config) -> None:
    # With few steps of the cosine schedule, diffusers' ancestral sampler computes the root of a difference that
    # rounds below 0, and returns NaN.
    few_fail = name == "euler_a" and changes.get("beta_schedule") == "squaredcos_cap_v2"
    assert_same(config_for(name, {**SD15, **changes}), (5, 14, 15, 30) if few_fail else STEP_COUNTS)


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("name", ["ddim", "euler", "euler_a", "dpmsolver++", "unipc", "lcm", "tcd"])
def test_zero_terminal_snr(name: str, spacing: str) -> None:
    changes = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": spacing}
    tolerance = ZERO_SNR_TOLERANCE if name in ("euler", "euler_a") else TOLERANCE
    assert_same(config_for(name, {**SD15, **changes}), tolerance=tolerance)


@pytest.mark.parametrize("final_sigmas_type", ["zero", "sigma_min"])
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("deformation", [*DEFORMATIONS, None])
@pytest.mark.parametrize("name", WITH_DEFORMED_SIGMAS)
def test_sigmas(name: str, deformation: str | None, spacing: str, final_sigmas_type: str) -> None:
    changes: Config = {"timestep_spacing": spacing, "final_sigmas_type": final_sigmas_type}
    if deformation is not None:
        changes[deformation] = True
    assert_same(config_for(name, {**SD15, **changes}))


@pytest.mark.parametrize("deformation", DEFORMATIONS)
@pytest.mark.parametrize("name", WITH_DEFORMED_SIGMAS)
def test_sigmas_of_the_cosine_schedule(name: str, deformation: str) -> None:
    assert_same(config_for(name, {**SD15, deformation: True, "beta_schedule": "squaredcos_cap_v2"}))


@pytest.mark.parametrize("deformation", DEFORMATIONS)
@pytest.mark.parametrize("name", WITH_DEFORMED_SIGMAS)
def test_sigma_min_and_sigma_max(name: str, deformation: str) -> None:
    assert_same(config_for(name, {**SD15, deformation: True, "sigma_min": 0.05, "sigma_max": 11.5}))


@pytest.mark.parametrize("base", [SD15, SD21, SDXL], ids=["sd15", "sd21", "sdxl"])
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_switching_matches_from_config(name: str, base: Config) -> None:
    config = config_for(name, base)
    class_name = str(config["_class_name"])
    assert config == config_for(class_name, base)
    assert_same(config, (1, 4, 20), scheduler=scheduler_of(base, class_name))


@pytest.mark.parametrize("name", SPACED)
def test_trailing_has_no_timestep_below_zero(name: str) -> None:
    # For 61 steps of 1000 / 61, diffusers adds a 62nd at timestep -1, because np.arange rounds its length up.
    config = config_for(name, {**SD15, "timestep_spacing": "trailing"})
    scheduler = scheduler_of(config)
    scheduler.set_timesteps(61)
    expected = scheduler.timesteps.numpy()
    assert expected[-1] == -1
    made = plan(config, 61)
    np.testing.assert_array_equal(made.timesteps, expected[expected >= 0])


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("name", SPACED)
def test_as_many_steps_as_timesteps(name: str, spacing: str) -> None:
    config = config_for(name, {**SD15, "timestep_spacing": spacing})
    within = name in ("euler", "euler_a", "heun")
    if (spacing == "leading" and not within) or (name == "unipc" and spacing == "linspace"):
        # An offset of 1, or one point beyond the last step, leaves fewer than 1000 timesteps.
        with pytest.raises(OptionError, match=r"expected (at most|timesteps from 0 to) 99[89]"):
            plan(config, 1000)
    else:
        assert np.isfinite(plan(config, 1000).matrices).all()
