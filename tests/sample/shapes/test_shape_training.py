"""Parts of the training on drawings: the budget, the learning rate, steps on a CPU, and the networks."""

from __future__ import annotations

import time
from typing import Any

import diffusers
import pytest
import torch
from shape_autoencoder import encode_drawings, normalize_latents
from shape_drawing import SceneTable, draw, place
from training_step import Budget, CapturedStep, set_learning_rate

from sdonnx.sample.shapes.shape_architectures import TRAINED
from sdonnx.sample.shapes.shape_scenes import all_scenes
from sdonnx.sample.write_sample import build_network


def test_the_learning_rate_rises_and_falls() -> None:
    budget = Budget(1.0, steps=1000)
    rates = []
    while budget.progress < 1:
        rates.append(budget.learning_rate(2.0, warmup_steps=100))
        budget.done += 1
    assert len(rates) == 1000
    assert rates[0] == pytest.approx(0.02)
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    # Half of the way: 2 % and half of the remaining 98 %.
    assert rates[500] == pytest.approx(2.0 * 0.51)
    assert budget.learning_rate(2.0, warmup_steps=100) == pytest.approx(0.04)


def test_a_budget_in_seconds_ends_by_the_clock() -> None:
    assert Budget(10.0, started=time.perf_counter() - 5).progress == pytest.approx(0.5, abs=0.05)
    assert Budget(10.0, started=time.perf_counter() - 11).progress > 1


def test_a_step_on_the_cpu_is_a_call() -> None:
    value = torch.zeros(2)
    sums: list[float] = []

    def fill() -> None:
        value.add_(1)

    step = CapturedStep(lambda: sums.append(float(value.sum())), "cpu")
    step.prepare()
    assert step.error is None
    assert sums == []
    for _ in range(3):
        step(fill)
    assert sums == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("initial", [0.0, torch.zeros(())])
def test_the_learning_rate_is_set_as_a_number_or_in_its_tensor(initial: float | torch.Tensor) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(parameters, lr=initial)
    set_learning_rate(optimizer, 0.25)
    rate = optimizer.param_groups[0]["lr"]
    assert float(rate) == 0.25
    # A CUDA graph reads the tensor that it was captured with.
    assert rate is initial or not isinstance(initial, torch.Tensor)


def test_normalized_latents_decode_alike() -> None:
    torch.manual_seed(0)
    network: Any = diffusers.AutoencoderKL(
        block_out_channels=(4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=2,
        sample_size=64,
        up_block_types=("UpDecoderBlock2D",) * 3,
    )
    table = SceneTable(list(all_scenes())[::97], "cpu")
    rows = torch.arange(16)
    images = draw(place(table, rows, torch.Generator().manual_seed(1)))
    with torch.no_grad():
        before = network(images).sample
    normalize_latents(network, table, torch.Generator().manual_seed(2), count=64)
    with torch.no_grad():
        torch.testing.assert_close(network(images).sample, before, rtol=1e-3, atol=1e-4)
    rows = torch.arange(64) % len(table.relations)
    latents = encode_drawings(network, table, rows, torch.Generator().manual_seed(3)).float()
    assert latents.mean((0, 2, 3)).tolist() == pytest.approx([0.0] * 4, abs=0.2)
    assert latents.std((0, 2, 3)).tolist() == pytest.approx([1.0] * 4, abs=0.2)


@pytest.mark.parametrize("name", TRAINED)
def test_the_last_timestep_keeps_almost_nothing_of_the_latents(name: str) -> None:
    spec = TRAINED[name].scheduler
    scheduler = getattr(diffusers, spec.name).from_config(dict(spec.config))
    assert float(scheduler.alphas_cumprod[-1]) ** 0.5 < 0.01


@pytest.mark.parametrize("name", TRAINED)
def test_weights_are_small_enough_to_ship(name: str) -> None:
    networks = [build_network(spec) for spec in TRAINED[name].networks.values()]
    assert 2 * sum(each.numel() for network in networks for each in network.parameters()) < 12e6
