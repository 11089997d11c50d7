"""Unsupported options are rejected before sampling starts; the error names the option and the supported values."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.trajectories import SD15, Config, scheduler_of, their_trajectory

from sdonnx.errors import OptionError, SchedulerError
from sdonnx.samplers import SAMPLERS, config_for, plan

FLOW: Config = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


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
        ("euler_a", "prediction_type", "sample", '"epsilon" or "v_prediction"'),
        ("heun", "clip_sample", True, "false"),
        ("heun", "use_beta_sigmas", True, "false"),
        ("heun", "beta_schedule", "exp", '"linear" or "scaled_linear" or "squaredcos_cap_v2"'),
        ("dpmsolver++", "algorithm_type", "dpmsolver", '"dpmsolver++" or "sde-dpmsolver++"'),
        ("dpmsolver++", "solver_order", 4, "1 or 2 or 3"),
        ("dpmsolver++", "solver_type", "euler", '"midpoint" or "heun"'),
        ("dpmsolver++", "thresholding", True, "false"),
        ("dpmsolver++", "use_lu_lambdas", True, "false"),
        ("dpmsolver++", "variance_type", "learned_range", "null"),
        ("dpmsolver++", "lambda_min_clipped", 100.0, "a bound below"),
        ("dpmsolver++", "time_shift_type", "cubic", '"exponential" or "linear"'),
        ("unipc", "solver_order", 4, "1 or 2 or 3"),
        ("unipc", "solver_type", "bh3", '"bh1" or "bh2"'),
        ("unipc", "solver_p", {"_class_name": "DDIMScheduler"}, "null"),
        ("unipc", "disable_corrector", 3, "a list of numbers"),
        ("unipc", "thresholding", True, "false"),
        ("unipc", "shift_terminal", 0.1, "shift_terminal only with use_flow_sigmas"),
        ("lcm", "clip_sample", True, "false"),
        ("lcm", "thresholding", True, "false"),
        ("lcm", "original_inference_steps", 1001, "1 to num_train_timesteps"),
        ("lcm", "original_inference_steps", 0, "1 to num_train_timesteps"),
        ("tcd", "original_inference_steps", 1001, "1 to num_train_timesteps"),
        ("tcd", "prediction_type", "flow_prediction", '"epsilon" or "v_prediction" or "sample"'),
        ("flow_euler", "invert_sigmas", True, "false"),
        ("flow_euler", "use_beta_sigmas", True, "false"),
        ("flow_euler", "time_shift_type", "cubic", '"exponential" or "linear"'),
        ("flow_euler", "shift", None, "a number"),
    ],
)
def test_rejects_unsupported_options(name: str, option: str, value: object, supported: str) -> None:
    with pytest.raises(SchedulerError) as caught:
        plan({**config_for(name, SD15), option: value}, 10)
    assert option in caught.value.found
    assert supported in caught.value.expected


LINEAR = {"use_dynamic_shifting": True, "time_shift_type": "linear"}
KARRAS = {"use_karras_sigmas": True}
BOTH = {**KARRAS, "use_exponential_sigmas": True}
PREDICTED_NOISE = {"predict_x0": False, "prediction_type": "flow_prediction", "final_sigmas_type": "sigma_min"}
EULER_FLOW = "FlowMatchEulerDiscreteScheduler"


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        *((name, BOTH, "use_karras_sigmas") for name in ("euler", "heun", "dpmsolver++", "flow_euler")),
        ("dpmsolver++", {**FLOW, **KARRAS}, "use_flow_sigmas = true and use_karras_sigmas"),
        ("dpmsolver++", {**FLOW, "use_exponential_sigmas": True}, "use_flow_sigmas = true and use_exponential_sigmas"),
        ("unipc", {**FLOW, "use_exponential_sigmas": True}, "use_flow_sigmas = true and use_exponential_sigmas"),
        ("unipc", PREDICTED_NOISE, "flow"),
        ("unipc", {"predict_x0": False}, "predict_x0 = false, divides by the noise level"),
        ("unipc", {"lower_order_final": False}, "solver_order = 2 and lower_order_final = false"),
        *(
            (name, {**KARRAS, "sigma_min": low, "sigma_max": high}, "sigma_min")
            for name in ("euler", "heun", "unipc")
            for low, high in ((0.0, 10.0), (-1.0, 10.0), (10.0, 1.0))
        ),
        # Predicted noise does not determine the data if the latents are pure noise.
        ("ddim", {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}, "divides by zero"),
        ("lcm", {"rescale_betas_zero_snr": True}, "divides by zero"),
        ("tcd", {"rescale_betas_zero_snr": True}, "divides by zero"),
        ("ddim", {"beta_start": -1.0}, "divides by zero"),
        ("pndm", {"beta_schedule": "linear", "beta_end": 2.0}, "divides by zero"),
        ("dpmsolver++", {"trained_betas": [1.0] * 1000}, "divides by zero"),
        *((name, {"beta_start": 0.0, "beta_end": 0.0}, "divides by zero") for name in ("euler", "heun")),
        *((name, {"beta_end": math.nan}, "divides by zero") for name in ("euler", "euler_a", "unipc")),
    ],
)
def test_rejects_incompatible_options(name: str, changes: Config, match: str) -> None:
    with pytest.raises(SchedulerError, match=match):
        plan({**config_for(name, SD15), **changes}, 10)


@pytest.mark.parametrize(
    ("config", "steps", "mu", "match"),
    [
        (config_for("flow_euler", {**SD15, "shift": 0.0}), 10, None, "noise levels"),
        (config_for("flow_euler", {**SD15, "shift": -2.0}), 10, None, "noise levels"),
        (config_for("flow_euler", {**SD15, "shift": math.nan}), 10, None, "noise levels"),
        (config_for("flow_euler", {**SD15, "shift_terminal": 1.5}), 10, None, "noise levels"),
        (config_for("flow_euler", {**SD15, "use_dynamic_shifting": True}), 10, 1000.0, "noise levels"),
        (config_for("flow_euler", {**SD15, **LINEAR}), 10, -1.0, "noise levels"),
        (config_for("unipc", {**SD15, **FLOW, "flow_shift": 0.0}), 10, None, "noise levels"),
        (config_for("dpmsolver++", {**SD15, **FLOW, "flow_shift": 1e12}), 10, None, "noise levels"),
        ({"_class_name": EULER_FLOW, "shift_terminal": 0.1}, 1, None, "noise levels"),
        (config_for("dpmsolver++", {**SD15, **FLOW, **LINEAR}), 10, 0.5, "time_shift_type"),
        # By default, DDIMScheduler clips and PNDMScheduler takes Runge-Kutta steps.
        ({"_class_name": "DDIMScheduler"}, 10, None, "clip_sample = true"),
        ({"_class_name": "PNDMScheduler"}, 10, None, "skip_prk_steps = false"),
        *(
            ({**SD15, "_class_name": class_name}, 10, None, r"euler \(EulerDiscreteScheduler\)")
            for class_name in ("LMSDiscreteScheduler", "Euler", "", None, ["DDIMScheduler"])
        ),
    ],
)
def test_rejects_schedules_and_samplers(config: Config, steps: int, mu: float | None, match: str) -> None:
    with pytest.raises(SchedulerError, match=match):
        plan(config, steps, mu=mu)


@pytest.mark.parametrize("changes", [{"predict_x0": False}, {"lower_order_final": False}])
def test_rejected_options_have_no_finite_result_in_diffusers(changes: Config) -> None:
    scheduler = scheduler_of(config_for("unipc", {**SD15, **changes}))
    scheduler.set_timesteps(10)
    assert not their_trajectory(scheduler)[-1].isfinite().any()


def test_unipc_takes_one_step_without_lower_order_final() -> None:
    assert len(plan(config_for("unipc", {**SD15, "lower_order_final": False}), 1).timesteps) == 1


def test_rejects_switching_to_an_unknown_sampler() -> None:
    with pytest.raises(SchedulerError, match="'dpm'"):
        config_for("dpm", SD15)


@pytest.mark.parametrize("class_name", SAMPLERS)
@pytest.mark.parametrize("steps", [0, -1, 1001, 2.5, True, "10", None])
def test_rejects_invalid_step_counts(steps: Any, class_name: str) -> None:
    with pytest.raises(OptionError, match="num_inference_steps"):
        plan(config_for(class_name, SD15), steps)


@pytest.mark.parametrize("name", ["lcm", "tcd"])
def test_rejects_more_steps_than_the_model_was_distilled_with(name: str) -> None:
    config = config_for(name, {**SD15, "original_inference_steps": 20})
    scheduler = scheduler_of(config)
    with pytest.raises(ValueError, match="num_inference_steps"):
        scheduler.set_timesteps(21)
    with pytest.raises(OptionError, match="num_inference_steps") as caught:
        plan(config, 21)
    assert "at most 20" in caught.value.expected


@pytest.mark.parametrize("eta", [-0.1, 1.5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["ddim", "tcd"])
def test_rejects_eta_out_of_range(name: str, eta: float) -> None:
    with pytest.raises(OptionError, match="eta"):
        plan(config_for(name, SD15), 10, eta=eta)


@pytest.mark.parametrize("name", ["flow_euler", "unipc"])
def test_rejects_dynamic_shifting_without_mu(name: str) -> None:
    config = config_for(name, {**SD15, **FLOW, "use_dynamic_shifting": True})
    with pytest.raises(ValueError, match="mu"):
        scheduler_of(config).set_timesteps(10)
    with pytest.raises(OptionError, match="mu is not given"):
        plan(config, 10)


@pytest.mark.parametrize("name", ["flow_euler", "unipc", "dpmsolver++", "ddim"])
def test_rejects_mu_without_dynamic_shifting(name: str) -> None:
    with pytest.raises(OptionError, match=r"mu is 0\.5"):
        plan(config_for(name, SD15), 10, mu=0.5)


@pytest.mark.parametrize("mu", [math.nan, math.inf])
def test_rejects_mu_that_is_not_finite(mu: float) -> None:
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}
    with pytest.raises(OptionError, match="finite"):
        plan(config, 10, mu=mu)
