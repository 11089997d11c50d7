"""The samplers against diffusers' schedulers, stepped through the same synthetic denoiser."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers import SAMPLERS, STATE_ROWS, SamplingPlan, config_for, guided_matrices, plan

# diffusers hands torch tensors to np.array, which numpy 2 and torch 2.13 disagree about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

Config = dict[str, Any]

SHORT_NAMES = ("ddim", "pndm", "euler", "dpmsolver++")
SHAPE = (1, 4, 3, 5)
STEP_COUNTS = (1, 2, 3, 4, 5, 10, 14, 15, 20, 30, 49, 50)
TOLERANCE = 1e-4

# With zero terminal SNR the first latents are 4096 times the last ones. diffusers adds and subtracts them in
# single precision and keeps their rounding; the matrices never form that difference.
ZERO_SNR_TOLERANCE = 2 * 4096 * 2.0**-23

# scheduler_config.json as published for Stable Diffusion 1.5, 2.1 and XL.
SD15: Config = {
    "_class_name": "PNDMScheduler",
    "_diffusers_version": "0.6.0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
    "clip_sample": False,
}
SD21: Config = {**SD15, "_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}
SDXL: Config = {
    **SD15,
    "_class_name": "EulerDiscreteScheduler",
    "interpolation_type": "linear",
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "timestep_spacing": "leading",
    "use_karras_sigmas": False,
}


@functools.cache
def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def denoise(latents: torch.Tensor, timestep: float) -> torch.Tensor:
    """A prediction that depends on neighbours and time, and not linearly."""
    mixed = 0.9 * latents + 0.4 * latents.roll(1, -1) + math.sin(timestep / 170)
    return 0.8 * torch.tanh(mixed) + 0.2 * latents.roll(1, -2)


def scheduler_of(config: Mapping[str, Any], class_name: str | None = None) -> Any:
    return getattr(diffusers, class_name or config["_class_name"]).from_config(dict(config))


def their_trajectory(scheduler: Any, eta: float = 0.0) -> list[torch.Tensor]:
    """The latents after every call, stepped as diffusers' pipelines do."""
    latents = gaussian(0) * scheduler.init_noise_sigma
    if hasattr(scheduler, "set_begin_index"):
        # Otherwise a schedule that starts with the same timestep twice loses its first step.
        scheduler.set_begin_index(0)
    trajectory = []
    for call, timestep in enumerate(scheduler.timesteps):
        prediction = denoise(scheduler.scale_model_input(latents, timestep), float(timestep))
        extra = {"eta": eta, "variance_noise": gaussian(call + 1)} if eta else {}
        latents = scheduler.step(prediction, timestep, latents, **extra).prev_sample
        trajectory.append(latents)
    return trajectory


def our_trajectory(made: SamplingPlan) -> list[torch.Tensor]:
    """The latents after every call, in single precision, as a graph applies the matrices."""
    state = torch.zeros((STATE_ROWS, *SHAPE))
    state[0] = gaussian(0) * made.init_noise_sigma
    trajectory = []
    for call, matrix in enumerate(torch.from_numpy(made.matrices.astype(np.float32))):
        noise = gaussian(call + 1) if made.needs_noise[call] else torch.zeros(SHAPE)
        prediction = denoise(state[0] * float(made.input_scales[call]), float(made.timesteps[call]))
        state = torch.tensordot(matrix, torch.cat([state, noise[None], prediction[None]]), dims=1)
        trajectory.append(state[0])
    return trajectory


def assert_same(
    config: Mapping[str, Any],
    step_counts: Iterable[int] = STEP_COUNTS,
    *,
    eta: float = 0.0,
    tolerance: float = TOLERANCE,
    scheduler: Any = None,
) -> None:
    """Compare timesteps, first noise level and every call's latents with diffusers'."""
    scheduler = scheduler or scheduler_of(config)
    for steps in step_counts:
        scheduler.set_timesteps(steps)
        made = plan(config, steps, eta=eta)
        expected_timesteps = scheduler.timesteps.numpy()
        if np.array_equal(expected_timesteps, np.round(expected_timesteps)):
            np.testing.assert_array_equal(made.timesteps, expected_timesteps)
        else:
            # Fractions depend on torch's square root, which on x86 is not correctly rounded.
            np.testing.assert_allclose(made.timesteps, expected_timesteps, rtol=1e-6, atol=1e-5)
        assert made.init_noise_sigma == pytest.approx(float(scheduler.init_noise_sigma), rel=1e-6)
        expected = their_trajectory(scheduler, eta)
        found = our_trajectory(made)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        assert max(errors) < tolerance, f"{steps} steps: {errors}"


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_every_step_count(name: str) -> None:
    assert_same(config_for(name, SD15), range(1, 51))


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_spacing_and_prediction_type(name: str, prediction_type: str, spacing: str) -> None:
    config = config_for(name, {**SD15, "timestep_spacing": spacing, "prediction_type": prediction_type})
    if name == "pndm" and prediction_type == "sample":
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
    assert_same(config_for(name, {**SD15, **changes}))


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_defaults_of_absent_options(name: str) -> None:
    config = config_for(name, {})
    assert_same(config, scheduler=scheduler_of(config))


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize("name", ["ddim", "euler", "dpmsolver++"])
def test_zero_terminal_snr(name: str, spacing: str) -> None:
    changes = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": spacing}
    tolerance = ZERO_SNR_TOLERANCE if name == "euler" else TOLERANCE
    assert_same(config_for(name, {**SD15, **changes}), tolerance=tolerance)


@pytest.mark.parametrize("final_sigmas_type", ["zero", "sigma_min"])
@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize("deformation", ["use_karras_sigmas", "use_exponential_sigmas", None])
@pytest.mark.parametrize("name", ["euler", "dpmsolver++"])
def test_sigmas(name: str, deformation: str | None, spacing: str, final_sigmas_type: str) -> None:
    changes: Config = {"timestep_spacing": spacing, "final_sigmas_type": final_sigmas_type}
    if deformation is not None:
        changes[deformation] = True
    assert_same(config_for(name, {**SD15, **changes}))


@pytest.mark.parametrize("deformation", ["use_karras_sigmas", "use_exponential_sigmas"])
@pytest.mark.parametrize("name", ["euler", "dpmsolver++"])
def test_sigmas_of_the_cosine_schedule(name: str, deformation: str) -> None:
    assert_same(config_for(name, {**SD15, deformation: True, "beta_schedule": "squaredcos_cap_v2"}))


@pytest.mark.parametrize("deformation", ["use_karras_sigmas", "use_exponential_sigmas"])
@pytest.mark.parametrize("name", ["euler", "dpmsolver++"])
def test_range_of_sigmas(name: str, deformation: str) -> None:
    assert_same(config_for(name, {**SD15, deformation: True, "sigma_min": 0.05, "sigma_max": 11.5}))


@pytest.mark.parametrize("euler_at_final", [True, False])
@pytest.mark.parametrize("lower_order_final", [True, False])
@pytest.mark.parametrize("final_sigmas_type", ["zero", "sigma_min"])
@pytest.mark.parametrize("solver", [("midpoint", 1), ("midpoint", 2), ("heun", 2), ("bh2", 2)])
def test_dpm_solver_orders(
    solver: tuple[str, int], final_sigmas_type: str, lower_order_final: bool, euler_at_final: bool
) -> None:
    changes = {
        "solver_type": solver[0],
        "solver_order": solver[1],
        "final_sigmas_type": final_sigmas_type,
        "lower_order_final": lower_order_final,
        "euler_at_final": euler_at_final,
    }
    assert_same(config_for("dpmsolver++", {**SD15, **changes}))


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
def test_dpm_solver_clips_the_noisiest_timesteps(spacing: str) -> None:
    changes = {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1, "timestep_spacing": spacing}
    assert_same(config_for("dpmsolver++", {**SD15, **changes}))


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_ddim_with_fresh_noise(eta: float, prediction_type: str) -> None:
    config = config_for("ddim", {**SD15, "prediction_type": prediction_type})
    assert_same(config, eta=eta)
    assert plan(config, 7, eta=eta).needs_noise.all()
    assert not plan(config, 7).needs_noise.any()


@pytest.mark.parametrize("base", [SD15, SD21, SDXL], ids=["sd15", "sd21", "sdxl"])
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_switching_follows_from_config(name: str, base: Config) -> None:
    config = config_for(name, base)
    class_name = str(config["_class_name"])
    assert config == config_for(class_name, base)
    assert_same(config, (1, 4, 20), scheduler=scheduler_of(base, class_name))


def test_switching_there_and_back_keeps_the_folder() -> None:
    there = config_for("dpmsolver++", SD15)
    back = config_for("pndm", there)
    assert back == {name: value for name, value in SD15.items() if name != "_diffusers_version"}


def test_switching_from_a_silent_folder_suits_latents() -> None:
    # diffusers' own defaults clip the latents and take Runge-Kutta steps, as no published folder does.
    assert config_for("ddim", {})["clip_sample"] is False
    assert config_for("pndm", {})["skip_prk_steps"] is True
    assert config_for("ddim", {"clip_sample": True})["clip_sample"] is True


def test_short_names_are_unique() -> None:
    assert [sampler.short_name for sampler in SAMPLERS.values()] == list(SHORT_NAMES)
    assert all(class_name == sampler.class_name for class_name, sampler in SAMPLERS.items())


@pytest.mark.parametrize("name", SHORT_NAMES)
@pytest.mark.parametrize("guidance_scale", [1.0, 7.5, 0.0])
def test_guidance_is_two_columns(name: str, guidance_scale: float) -> None:
    made = plan(config_for(name, SD15), 6)
    random = np.random.default_rng(0)
    state = random.standard_normal((STATE_ROWS + 1, 12))
    unconditional, conditional = random.standard_normal((2, 12))
    # As diffusers' pipelines write it.
    guided = unconditional + guidance_scale * (conditional - unconditional)
    expected = made.matrices @ np.concatenate([state, guided[None]])
    columns = guided_matrices(made, guidance_scale)
    assert columns.shape == (len(made.timesteps), STATE_ROWS, STATE_ROWS + 3)
    found = columns @ np.concatenate([state, unconditional[None], conditional[None]])
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_without_guidance_there_is_one_column() -> None:
    made = plan(config_for("euler", SD15), 6)
    columns = guided_matrices(made, None)
    np.testing.assert_array_equal(columns, made.matrices)
    columns[:] = 0
    assert made.matrices.any()


def test_pndm_takes_its_first_step_twice() -> None:
    assert len(plan(config_for("pndm", SD15), 20).timesteps) == 21
    assert len(plan(config_for("pndm", SD15), 1).timesteps) == 1


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_trailing_has_no_timestep_below_zero(name: str) -> None:
    # 61 steps of 1000 / 61 give diffusers a 62nd at timestep -1: np.arange rounds its length up.
    config = config_for(name, {**SD15, "timestep_spacing": "trailing"})
    scheduler = scheduler_of(config)
    scheduler.set_timesteps(61)
    expected = scheduler.timesteps.numpy()
    assert expected[-1] == -1
    made = plan(config, 61)
    np.testing.assert_array_equal(made.timesteps, expected[:-1])


def assert_well_formed(made: SamplingPlan) -> None:
    count = len(made.timesteps)
    assert made.timesteps.dtype == made.input_scales.dtype == np.float32
    assert made.timesteps.shape == made.input_scales.shape == made.needs_noise.shape == (count,)
    assert made.matrices.shape == (count, STATE_ROWS, STATE_ROWS + 2)
    assert made.needs_noise.dtype == np.bool_
    for part in (made.timesteps, made.input_scales, made.matrices, made.init_noise_sigma):
        assert np.isfinite(part).all()


plan_options = st.fixed_dictionaries(
    {
        "timestep_spacing": st.sampled_from(["leading", "linspace", "trailing"]),
        "prediction_type": st.sampled_from(["epsilon", "v_prediction"]),
        "steps_offset": st.sampled_from([0, 1]),
        "beta_schedule": st.sampled_from(["linear", "scaled_linear", "squaredcos_cap_v2"]),
        "use_karras_sigmas": st.booleans(),
        "final_sigmas_type": st.sampled_from(["zero", "sigma_min"]),
        "solver_type": st.sampled_from(["midpoint", "heun"]),
        "lower_order_final": st.booleans(),
        "set_alpha_to_one": st.booleans(),
    }
)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(SHORT_NAMES),
    options=plan_options,
    steps=st.integers(1, 999),
    eta=st.floats(0, 1),
)
def test_any_number_of_steps_is_finite(name: str, options: Config, steps: int, eta: float) -> None:
    made = plan(config_for(name, {**SD15, **options}), steps, eta=eta)
    assert_well_formed(made)
    assert made.timesteps.min() >= 0
    assert len(made.timesteps) == steps + (name == "pndm" and steps > 1)


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_as_many_steps_as_timesteps(name: str, spacing: str) -> None:
    config = config_for(name, {**SD15, "timestep_spacing": spacing})
    if spacing == "leading" and name != "euler":
        # With an offset of 1, or one point spread beyond the last step, there is no 1000th timestep.
        with pytest.raises(OptionError, match="fewer steps"):
            plan(config, 1000)
    else:
        assert_well_formed(plan(config, 1000))


@pytest.mark.parametrize(
    ("name", "option", "value", "supported"),
    [
        ("ddim", "clip_sample", True, "false"),
        ("ddim", "thresholding", True, "false"),
        ("ddim", "prediction_type", "flow_prediction", '"epsilon" or "v_prediction" or "sample"'),
        ("ddim", "beta_schedule", "laplace", '"linear" or "scaled_linear" or "squaredcos_cap_v2"'),
        ("ddim", "timestep_spacing", "Leading", '"leading" or "linspace" or "trailing"'),
        ("ddim", "num_train_timesteps", "1000", "an integer"),
        ("ddim", "num_train_timesteps", None, "an integer"),
        ("ddim", "num_train_timesteps", 0, "positive"),
        ("ddim", "beta_start", True, "a number"),
        ("ddim", "steps_offset", 0.5, "an integer"),
        ("ddim", "trained_betas", "0.1", "a list of numbers"),
        ("ddim", "trained_betas", [0.1, "0.2"], "a list of numbers"),
        ("ddim", "trained_betas", [0.1, 0.2], "1000"),
        ("ddim", "rescale_betas_zero_snr", "yes", "true or false"),
        ("pndm", "skip_prk_steps", False, "true"),
        ("pndm", "prediction_type", "sample", '"epsilon" or "v_prediction"'),
        ("euler", "use_beta_sigmas", True, "false"),
        ("euler", "interpolation_type", "log_linear", '"linear"'),
        ("euler", "timestep_type", "continuous", '"discrete"'),
        ("euler", "final_sigmas_type", "one", '"zero" or "sigma_min"'),
        ("dpmsolver++", "algorithm_type", "sde-dpmsolver++", '"dpmsolver++"'),
        ("dpmsolver++", "solver_order", 3, "1 or 2"),
        ("dpmsolver++", "solver_type", "euler", '"midpoint" or "heun"'),
        ("dpmsolver++", "thresholding", True, "false"),
        ("dpmsolver++", "use_lu_lambdas", True, "false"),
        ("dpmsolver++", "use_flow_sigmas", True, "false"),
        ("dpmsolver++", "variance_type", "learned_range", "null"),
        ("dpmsolver++", "lambda_min_clipped", 100.0, "a bound below"),
    ],
)
def test_options_that_cannot_be_followed(name: str, option: str, value: object, supported: str) -> None:
    with pytest.raises(SchedulerError) as caught:
        plan({**config_for(name, SD15), option: value}, 10)
    assert option in caught.value.found
    assert supported in caught.value.expected


def test_options_absent_from_a_folder_are_diffusers_defaults() -> None:
    # DDIMScheduler clips and PNDMScheduler takes Runge-Kutta steps unless told not to.
    with pytest.raises(SchedulerError, match="clip_sample = true"):
        plan({"_class_name": "DDIMScheduler"}, 10)
    with pytest.raises(SchedulerError, match="skip_prk_steps = false"):
        plan({"_class_name": "PNDMScheduler"}, 10)


def test_options_of_other_schedulers_are_ignored() -> None:
    config = config_for("euler", {**SD15, "clip_sample": True, "thresholding": True, "solver_order": 3})
    assert_same(config, (5,))


@pytest.mark.parametrize("class_name", ["HeunDiscreteScheduler", "Euler", "", None, ["DDIMScheduler"]])
def test_unknown_samplers(class_name: object) -> None:
    with pytest.raises(SchedulerError, match=r"euler \(EulerDiscreteScheduler\)"):
        plan({**SD15, "_class_name": class_name}, 10)


def test_switching_to_an_unknown_sampler() -> None:
    with pytest.raises(SchedulerError, match="'dpm'"):
        config_for("dpm", SD15)


@pytest.mark.parametrize("steps", [0, -1, 1001, 2.5, True, "10", None])
def test_numbers_of_steps_that_cannot_be_taken(steps: Any) -> None:
    with pytest.raises(OptionError, match="num_inference_steps"):
        plan(SD15, steps)


@pytest.mark.parametrize("eta", [-0.1, 1.5, math.nan, math.inf])
def test_eta_out_of_range(eta: float) -> None:
    with pytest.raises(OptionError, match="eta"):
        plan(config_for("ddim", SD15), 10, eta=eta)


@pytest.mark.parametrize("both", ["euler", "dpmsolver++"])
def test_two_deformations_exclude_each_other(both: str) -> None:
    config = config_for(both, {**SD15, "use_karras_sigmas": True, "use_exponential_sigmas": True})
    with pytest.raises(SchedulerError, match="use_karras_sigmas"):
        plan(config, 10)


@pytest.mark.parametrize(("low", "high"), [(0.0, 10.0), (-1.0, 10.0), (10.0, 1.0)])
def test_empty_range_of_sigmas(low: float, high: float) -> None:
    config = config_for("euler", {**SD15, "use_karras_sigmas": True, "sigma_min": low, "sigma_max": high})
    with pytest.raises(SchedulerError, match="sigma_min"):
        plan(config, 10)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # The noise that was predicted says nothing about the data where there is no data in the latents.
        ("ddim", {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}),
        ("ddim", {"beta_start": -1.0}),
        ("pndm", {"beta_schedule": "linear", "beta_end": 2.0}),
        ("euler", {"beta_start": 0.0, "beta_end": 0.0}),
        ("dpmsolver++", {"trained_betas": [1.0] * 1000}),
        ("euler", {"beta_end": math.nan}),
    ],
)
def test_betas_that_divide_by_zero(name: str, changes: Config) -> None:
    with pytest.raises(SchedulerError, match="divides by zero"):
        plan(config_for(name, {**SD15, **changes}), 10)
