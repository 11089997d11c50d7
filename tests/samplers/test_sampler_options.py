"""Compare the options of single samplers with diffusers' scheduler at every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.trajectories import (
    SD15,
    SHORT_NAMES,
    STEP_COUNTS,
    Config,
    assert_same,
    denoise,
    gaussian,
    our_trajectory,
    scheduler_of,
    their_trajectory,
)

from sdonnx.samplers import config_for, plan

# The options of published folders of flow-matching models.
FLOW: Config = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_ddim_with_fresh_noise(eta: float, prediction_type: str) -> None:
    config = config_for("ddim", {**SD15, "prediction_type": prediction_type})
    assert_same(config, eta=eta)


@pytest.mark.parametrize(
    ("name", "changes", "eta"),
    [
        ("ddim", {}, 0.0),
        ("ddim", {}, 0.5),
        ("euler", {}, 0.5),
        ("euler_a", {}, 0.0),
        ("lcm", {}, 0.0),
        ("tcd", {}, 0.0),
        ("tcd", {}, 0.3),
        ("dpmsolver++", {}, 0.0),
        ("dpmsolver++", {"algorithm_type": "sde-dpmsolver++"}, 0.0),
        ("flow_euler", {}, 0.0),
        ("flow_euler", {"stochastic_sampling": True}, 0.0),
    ],
)
def test_samples_noise_in_the_same_calls_as_diffusers(name: str, changes: Config, eta: float) -> None:
    config = config_for(name, {**SD15, **changes})
    scheduler = scheduler_of(config)
    scheduler.set_timesteps(5)
    generator, latents, sampled = torch.Generator().manual_seed(0), gaussian(0), []
    extra = {"eta": eta} if name in ("ddim", "tcd") else {}
    for timestep in scheduler.timesteps:
        before = generator.get_state()
        latents = scheduler.step(latents, timestep, latents, generator=generator, **extra).prev_sample
        sampled.append(not torch.equal(before, generator.get_state()))
    np.testing.assert_array_equal(plan(config, 5, eta=eta).needs_noise, sampled)


@pytest.mark.parametrize("euler_at_final", [True, False])
@pytest.mark.parametrize("lower_order_final", [True, False])
@pytest.mark.parametrize("final_sigmas_type", ["zero", "sigma_min"])
@pytest.mark.parametrize("solver", [("midpoint", 1), ("midpoint", 2), ("heun", 2), ("bh2", 2), ("midpoint", 3)])
@pytest.mark.parametrize("algorithm_type", ["dpmsolver++", "sde-dpmsolver++"])
def test_dpm_solver_orders(
    algorithm_type: str, solver: tuple[str, int], final_sigmas_type: str, lower_order_final: bool, euler_at_final: bool
) -> None:
    changes = {
        "algorithm_type": algorithm_type,
        "solver_type": solver[0],
        "solver_order": solver[1],
        "final_sigmas_type": final_sigmas_type,
        "lower_order_final": lower_order_final,
        "euler_at_final": euler_at_final,
    }
    assert_same(config_for("dpmsolver++", {**SD15, **changes}))


@pytest.mark.parametrize("predict_x0", [True, False])
@pytest.mark.parametrize("lower_order_final", [True, False])
@pytest.mark.parametrize("solver_type", ["bh1", "bh2", "midpoint"])
@pytest.mark.parametrize("solver_order", [1, 2, 3])
def test_unipc_orders(solver_order: int, solver_type: str, lower_order_final: bool, predict_x0: bool) -> None:
    changes = {
        "solver_order": solver_order,
        "solver_type": solver_type,
        "lower_order_final": lower_order_final,
        "predict_x0": predict_x0,
        "final_sigmas_type": "sigma_min",
    }
    assert_same(config_for("unipc", {**SD15, **changes}))


@pytest.mark.parametrize("solver_order", [1, 2, 3])
def test_unipc_bh1_ends_without_noise(solver_order: int) -> None:
    # diffusers multiplies an infinite B(h) by the 0 of a last step of order 1, and returns NaN. The step does not
    # depend on B(h), so it is compared with the step of bh2 from the same history.
    config = config_for("unipc", {**SD15, "solver_type": "bh1", "solver_order": solver_order})
    steps = 12
    scheduler = scheduler_of(config)
    scheduler.set_timesteps(steps)
    expected = their_trajectory(scheduler)
    assert expected[-1].isnan().all()
    found = our_trajectory(plan(config, steps))
    for a, b in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    scheduler.register_to_config(solver_type="bh2")
    scheduler._step_index = steps - 1
    before = expected[-2]
    data = scheduler.convert_model_output(denoise(before, float(scheduler.timesteps[-1])), sample=before)
    scheduler.model_outputs[-1] = data
    last = scheduler.multistep_uni_p_bh_update(data, sample=before, order=1)
    torch.testing.assert_close(found[-1], last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("final_sigmas_type", ["zero", "sigma_min"])
@pytest.mark.parametrize("flow_shift", [1.0, 3.0, 0.5])
@pytest.mark.parametrize("prediction_type", ["flow_prediction", "epsilon", "sample"])
@pytest.mark.parametrize("name", ["dpmsolver++", "unipc"])
def test_flow_sigmas(name: str, prediction_type: str, flow_shift: float, final_sigmas_type: str) -> None:
    changes = {"prediction_type": prediction_type, "flow_shift": flow_shift, "final_sigmas_type": final_sigmas_type}
    assert_same(config_for(name, {**SD15, **FLOW, **changes}))


@pytest.mark.parametrize("mu", [-0.4, 0.5, 1.15])
@pytest.mark.parametrize("name", ["dpmsolver++", "unipc", "flow_euler"])
def test_dynamic_shifting(name: str, mu: float) -> None:
    assert_same(config_for(name, {**SD15, **FLOW, "use_dynamic_shifting": True}), (*STEP_COUNTS, 100), mu=mu)


@pytest.mark.parametrize("stochastic_sampling", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"shift": 3.0},
        {"shift": 0.3},
        {"num_train_timesteps": 500, "shift": 6.0},
        {"use_karras_sigmas": True},
        {"use_exponential_sigmas": True, "shift": 3.0},
        {"use_karras_sigmas": True, "sigma_min": 0.02, "sigma_max": 0.9},
    ],
)
def test_flow_euler(changes: Config, stochastic_sampling: bool) -> None:
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", **changes, "stochastic_sampling": stochastic_sampling}
    assert_same(config, (*STEP_COUNTS, 100))


DISTILLATIONS: list[Config] = [
    {"original_inference_steps": 20},
    {"original_inference_steps": 1000},
    {"original_inference_steps": 333, "timestep_scaling": 0.1},
    {"num_train_timesteps": 700, "timestep_scaling": 1.0},
]


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("changes", DISTILLATIONS)
def test_lcm(changes: Config, prediction_type: str) -> None:
    assert_same(config_for("lcm", {**SD15, **changes, "prediction_type": prediction_type}), (1, 2, 3, 4, 8, 20))


@pytest.mark.parametrize("eta", [0.0, 0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("changes", DISTILLATIONS)
def test_tcd(changes: Config, prediction_type: str, eta: float) -> None:
    config = config_for("tcd", {**SD15, **changes, "prediction_type": prediction_type})
    assert_same(config, (1, 2, 3, 4, 8, 20), eta=eta)
    for strength in (0.3, 0.8):
        assert_same(config, (4, 8, 20), eta=eta, strength=strength, from_image=True)


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_options_of_other_schedulers_are_ignored(name: str) -> None:
    others = {"clip_sample_range": 2.0, "dynamic_thresholding_ratio": 0.1, "base_shift": 3.0, "euler_at_final": False}
    assert_same(config_for(name, {**SD15, **others}), (5,))


ORDERS = (1, 2, 3)
PREDICTIONS = ("epsilon", "v_prediction", "sample")
LATE = {"final_sigmas_type": "sigma_min"}
SHIFTED = {**FLOW, "use_dynamic_shifting": True}
# The sampler, the options, the numbers of steps if they are not the usual ones, and arguments of the plan.
CASES: list[tuple[str, Config, Any, dict[str, Any]]] = [
    *(
        ("dpmsolver++", {"algorithm_type": kind, "solver_order": order, "use_karras_sigmas": True}, (16, 100), {})
        for kind in ("dpmsolver++", "sde-dpmsolver++")
        for order in ORDERS
    ),
    *(
        ("dpmsolver++", {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1, "timestep_spacing": each},
         STEP_COUNTS, {})
        for each in ("leading", "linspace", "trailing")
    ),
    *(
        ("unipc", {"solver_order": order, "solver_type": kind, **LATE}, (100,), {})
        for order in ORDERS
        for kind in ("bh1", "bh2")
    ),
    *(("unipc", {"predict_x0": False, "prediction_type": each, **LATE}, STEP_COUNTS, {}) for each in PREDICTIONS),
    *(
        ("unipc", {"disable_corrector": disabled, "solver_order": order}, STEP_COUNTS, {})
        for disabled in ([0], [0, 1, 2], [3, 8], list(range(50)))
        for order in (2, 3)
    ),
    *(
        (name, {**FLOW, "solver_order": order}, (*range(1, 26), 100), {})
        for name in ("dpmsolver++", "unipc")
        for order in ORDERS
    ),
    *((name, {"prediction_type": "flow_prediction"}, STEP_COUNTS, {}) for name in ("dpmsolver++", "unipc")),
    ("unipc", {**FLOW, "use_karras_sigmas": True}, STEP_COUNTS, {}),
    ("unipc", {**FLOW, "shift_terminal": 0.1}, STEP_COUNTS[1:], {}),
    *((name, {**SHIFTED, "time_shift_type": "linear"}, STEP_COUNTS, {"mu": 0.8}) for name in ("unipc", "flow_euler")),
    ("dpmsolver++", SHIFTED, STEP_COUNTS, {}),  # flow_shift, without mu
    *(
        ("tcd", changes, (4,), {"eta": 0.3})  # it does not read them
        for changes in ({"clip_sample": True}, {"thresholding": True}, {"set_alpha_to_one": False})
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "counts", "given"), CASES)
def test_further_options(name: str, changes: Config, counts: Any, given: dict[str, Any]) -> None:
    assert_same(config_for(name, {**SD15, **changes}), counts, **given)


def test_flow_euler_shift_terminal() -> None:
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 2.0, "shift_terminal": 0.1}
    assert_same(config, STEP_COUNTS[1:])
