"""Parts of the training on drawings: normalized latents, the last timestep, and the size of the networks."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from shape_autoencoder import encode_drawings, normalize_latents
from shape_drawing import SceneTable, draw, place

from sdonnx.sample.shapes.shape_architectures import TRAINED
from sdonnx.sample.shapes.shape_scenes import all_scenes
from sdonnx.sample.write_sample import build_network


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
