"""Properties of every plan with random options and steps, guidance, and the table of samplers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trajectories import SD15, SHORT_NAMES, Config, assert_same, scheduler_of

from sdonnx.samplers import SAMPLERS, STATE_ROWS, SamplingPlan, config_for, guided_matrices, plan


def test_short_names_are_unique() -> None:
    assert len(set(SHORT_NAMES)) == len(SAMPLERS)

    assert all(class_name == sampler.class_name for class_name, sampler in SAMPLERS.items())


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_options_have_the_defaults_of_diffusers_class(name: str) -> None:
    # sigma_min and sigma_max are read by every class, but some do not list them.
    sampler = next(sampler for sampler in SAMPLERS.values() if sampler.short_name == name)
    defaults = dict(scheduler_of({"_class_name": sampler.class_name}).config)
    for option in sampler.options.keys() & defaults.keys():
        ours, theirs = sampler.options[option].default, defaults[option]
        assert ours == (tuple(theirs) if isinstance(theirs, list) else theirs), option
    assert sampler.options.keys() - defaults.keys() <= {"sigma_min", "sigma_max"}


def test_switching_there_and_back_restores_the_configuration() -> None:
    there = config_for("dpmsolver++", SD15)
    back = config_for("pndm", there)
    assert back == {name: value for name, value in SD15.items() if name != "_diffusers_version"}


def test_switching_sets_defaults_for_latents() -> None:
    # diffusers' defaults clip the latents and take Runge-Kutta steps. Published folders do neither.
    assert config_for("ddim", {})["clip_sample"] is False
    assert config_for("pndm", {})["skip_prk_steps"] is True
    assert config_for("ddim", {"clip_sample": True})["clip_sample"] is True


@pytest.mark.parametrize("name", SHORT_NAMES)
@pytest.mark.parametrize("guidance_scale", [1.0, 7.5, 0.0])
def test_guidance_adds_a_column(name: str, guidance_scale: float) -> None:
    made = plan(config_for(name, SD15), 6)
    random = np.random.default_rng(0)
    state = random.standard_normal((STATE_ROWS + 1, 12))
    unconditional, conditional = random.standard_normal((2, 12))
    # The expression in diffusers' pipelines.
    guided = unconditional + guidance_scale * (conditional - unconditional)
    expected = made.matrices @ np.concatenate([state, guided[None]])
    columns = guided_matrices(made, guidance_scale)
    assert columns.shape == (len(made.timesteps), STATE_ROWS, STATE_ROWS + 3)
    found = columns @ np.concatenate([state, unconditional[None], conditional[None]])
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_matrices_without_guidance_are_a_copy_of_the_plan() -> None:
    made = plan(config_for("euler", SD15), 6)
    columns = guided_matrices(made, None)
    np.testing.assert_array_equal(columns, made.matrices)
    columns[:] = 0
    assert made.matrices.any()


@pytest.mark.parametrize(("name", "calls", "calls_of_one_step"), [("pndm", 21, 1), ("heun", 39, 1), ("unipc", 20, 1)])
def test_number_of_calls(name: str, calls: int, calls_of_one_step: int) -> None:
    assert len(plan(config_for(name, SD15), 20).timesteps) == calls
    assert len(plan(config_for(name, SD15), 1).timesteps) == calls_of_one_step


def assert_well_formed(made: SamplingPlan) -> None:
    count = len(made.timesteps)
    assert made.timesteps.dtype == made.input_scales.dtype == np.float32
    assert made.clean_scales.dtype == made.noise_scales.dtype == np.float32
    assert made.timesteps.shape == made.input_scales.shape == made.needs_noise.shape == (count,)
    assert made.clean_scales.shape == made.noise_scales.shape == (count + 1,)
    assert made.matrices.shape == (count, STATE_ROWS, STATE_ROWS + 2)
    assert made.needs_noise.dtype == np.bool_
    assert not made.matrices[~made.needs_noise, :, -2].any()
    assert not made.matrices[0, 0, 1:STATE_ROWS].any(), "the first call reads no history"
    for part in (made.timesteps, made.input_scales, made.matrices, made.clean_scales, made.noise_scales):
        assert np.isfinite(part).all()


PLAN_OPTIONS = st.fixed_dictionaries(
    {
        "timestep_spacing": st.sampled_from(["leading", "linspace", "trailing"]),
        "prediction_type": st.sampled_from(["epsilon", "v_prediction"]),
        "steps_offset": st.sampled_from([0, 1]),
        "beta_schedule": st.sampled_from(["linear", "scaled_linear", "squaredcos_cap_v2"]),
        "use_karras_sigmas": st.booleans(),
        "final_sigmas_type": st.sampled_from(["zero", "sigma_min"]),
        "solver_type": st.sampled_from(["midpoint", "heun", "bh1", "bh2"]),
        "solver_order": st.sampled_from([1, 2, 3]),
        "algorithm_type": st.sampled_from(["dpmsolver++", "sde-dpmsolver++"]),
        "set_alpha_to_one": st.booleans(),
        "shift": st.floats(0.2, 8),
        "stochastic_sampling": st.booleans(),
    }
)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(SHORT_NAMES),
    options=PLAN_OPTIONS,
    steps=st.integers(1, 998),
    eta=st.floats(0, 1),
    strength=st.floats(0.01, 1),
)
def test_plans_are_finite_for_any_step_count(
    name: str, options: Config, steps: int, eta: float, strength: float
) -> None:
    config = config_for(name, {**SD15, **options, "original_inference_steps": 1000})
    taken = int(steps * strength) or steps
    made = plan(config, steps, eta=eta, strength=1.0 if int(steps * strength) == 0 else strength)
    assert_well_formed(made)
    assert made.timesteps.min() >= 0
    assert len(made.timesteps) == {"pndm": taken + (steps > 1), "heun": 2 * taken - 1}.get(name, taken)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(SHORT_NAMES),
    options=PLAN_OPTIONS,
    lower_order_final=st.booleans(),
    flow=st.booleans(),
    steps=st.integers(5, 40),
    eta=st.floats(0, 1),
    strength=st.floats(0.2, 1),
)
def test_random_options_match_diffusers(
    name: str, options: Config, lower_order_final: bool, flow: bool, steps: int, eta: float, strength: float
) -> None:
    config: Config = {**SD15, **options}
    if name == "dpmsolver++" or options["final_sigmas_type"] == "sigma_min":
        config["lower_order_final"] = lower_order_final
    elif name == "unipc" and options["solver_type"] == "bh1":
        config["solver_type"] = "bh2"  # see test_unipc_bh1_ends_without_noise
    if name in ("dpmsolver++", "unipc") and flow:
        config |= {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "use_karras_sigmas": False}
    assert_same(config_for(name, config), (steps,), eta=eta, strength=strength, from_image=True)
