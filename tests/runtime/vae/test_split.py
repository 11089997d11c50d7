"""The rule of slices and tiles: sizes of the autoencoder's tensors, and limits by elements and by memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import diffusers
import pytest
import torch

from sdonnx.folder.folder_version import read_report
from sdonnx.models.autoencoder import block_channels, largest_decoder_tensor, largest_encoder_tensor, tile_size
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.vae.vae_tiling import MAX_ELEMENTS, Split, VaeSplits

SD = {"block_out_channels": [128, 256, 512, 512], "sample_size": 512}
SDXL = SD | {"sample_size": 1024}
GIGABYTE = 10**9
H200, RTX_4090 = 141 * GIGABYTE, 24 * GIGABYTE


def splits(
    config: dict[str, Any], folder: Path, *, memory: int = H200, precision: str = "float32", kept: Sequence[str] = ()
) -> VaeSplits:
    """Return the splits of an autoencoder with that configuration, on a GPU with so much memory."""
    report = {"format": 2, "components": {"vae": {"precision": precision, "float32": dict.fromkeys(kept, 1)}}}
    (folder / "sdonnx.json").write_text(json.dumps(report))
    family = SimpleNamespace(has=lambda _: True, with_role=lambda _: SimpleNamespace(name="vae"))
    graphs = SimpleNamespace(
        config=lambda _: config,
        family=family,
        device=SimpleNamespace(memory=lambda: (0, memory)),
        report=read_report(folder),
    )
    graphs.itemsizes = lambda role: GraphSet.itemsizes(cast(GraphSet, graphs), role)
    return VaeSplits(cast(GraphSet, graphs))


def largest_output(module: torch.nn.Module, *inputs: torch.Tensor) -> int:
    """Return the number of elements of the largest tensor that a module of torch, or one inside it, returns."""
    sizes: list[int] = []

    def note(_: object, __: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes.append(output.numel())

    for each in module.modules():
        each.register_forward_hook(note)
    module(*inputs)
    return max(sizes)


@pytest.mark.parametrize("channels", [(128, 256, 512, 512), (32, 32, 64, 64), (32, 32), (64, 256), (32,)])
def test_largest_tensors_are_those_of_diffusers(channels: tuple[int, ...]) -> None:
    blocks = len(channels)
    with torch.device("meta"):
        vae: Any = diffusers.AutoencoderKL(
            block_out_channels=channels,
            down_block_types=("DownEncoderBlock2D",) * blocks,
            up_block_types=("UpDecoderBlock2D",) * blocks,
            latent_channels=4,
        )
        factor = 2 ** (blocks - 1)
        # On meta the upsampled image is only seen as the output of the convolution that follows, of the same size.
        assert largest_decoder_tensor(channels, 24, 16) == largest_output(vae.decoder, torch.empty(1, 4, 24, 16))
        found = largest_output(vae.encoder, torch.empty(1, 3, 24 * factor, 16 * factor))
        # The padded images are not outputs of modules.
        assert found <= largest_encoder_tensor(channels, 24, 16) <= found * 1.2


def test_eight_images_of_sdxl_exceed_the_limit_and_seven_do_not() -> None:
    one = largest_decoder_tensor(block_channels(SDXL), 128, 128)
    assert one == 256 * 1024 * 1024
    assert 7 * one <= MAX_ELEMENTS < 8 * one


@pytest.mark.parametrize(("batch", "size"), [(1, 1), (7, 7), (8, 4), (9, 5), (14, 7), (15, 5), (64, 7)])
def test_slices_are_equal_and_as_few_as_possible(batch: int, size: int, tmp_path: Path) -> None:
    assert splits(SDXL, tmp_path).decoder(batch, 128, 128) == Split(size)


def test_slices_fit_into_a_quarter_of_the_memory(tmp_path: Path) -> None:
    float32 = splits(SDXL, tmp_path, memory=RTX_4090)
    assert float32.decoder(8, 128, 128) == Split(1)  # 3.2 GB an image
    assert float32.decoder(8, 64, 64) == Split(4)
    assert float32.encoder(8, 128, 128) == Split(3)
    float16 = splits(SDXL, tmp_path, memory=RTX_4090, precision="float16")
    assert float16.decoder(9, 128, 128) == Split(3)
    mixed = splits(SDXL, tmp_path, memory=RTX_4090, precision="float16", kept=["Conv"])
    assert mixed.decoder(9, 128, 128) == Split(1)


def test_images_that_no_run_can_hold_are_tiled(tmp_path: Path) -> None:
    large = splits(SDXL, tmp_path)
    assert large.decoder(1, 361, 363) == Split(1)  # 2888x2904 pixels
    assert large.decoder(2, 512, 512) == Split(2, 128)  # 4096x4096 pixels
    assert large.encoder(1, 508, 508) == Split(1)  # its largest tensor has half as many elements
    assert large.encoder(1, 512, 512) == Split(1, 128)
    small = splits(SDXL, tmp_path, memory=RTX_4090)
    assert small.decoder(1, 256, 256) == Split(1)  # 13 GB
    assert small.decoder(1, 320, 320) == Split(1, 128)  # 20 GB
    assert small.decoder(4, 512, 512) == Split(1, 128)


def test_options(tmp_path: Path) -> None:
    chosen = splits(SD, tmp_path)
    chosen.tiling = True
    assert chosen.decoder(2, 64, 64) == Split(2)
    assert chosen.decoder(2, 64, 72) == Split(2, 64)
    chosen.slicing = True
    assert chosen.decoder(2, 64, 72) == Split(1, 64)
    chosen.tiling = False
    assert chosen.decoder(2, 64, 72) == Split(1)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (SD, 64),
        (SDXL, 128),
        ({}, 64),
        (SD | {"sample_size": 600}, 72),
        (SD | {"sample_size": None}, 64),
        (SD | {"sample_size": 8}, 4),
    ],
)
def test_tiles_have_the_training_size(config: dict[str, Any], size: int) -> None:
    assert tile_size(config) == size


@pytest.mark.parametrize("channels", [[0], ["x"], [-1, 4]])
def test_broken_configuration(channels: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"block_out_channels|invalid literal"):
        block_channels({"block_out_channels": channels})
