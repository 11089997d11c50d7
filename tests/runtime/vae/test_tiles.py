"""Tiles compared with diffusers' AutoencoderKL, with torch's decoder and encoder and then with ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support.diffusers_pipelines import task_of
from support.drawing import generator, observed_roles
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.metrics import psnr
from sdonnx.models.spec import Role
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.runtime.vae import vae_tiling
from sdonnx.runtime.vae.vae_tiling import TileGrid, join_tiles

# float32 rounding, as without tiles.
SAME_DB = 110
TILE = 32  # pixels
# 9 x 5 latents: tiles of 4, 4 and 3 rows, and of 4 and 2 columns.
USUAL: dict[str, Any] = {"prompt": "a fox", "height": 72, "width": 40, "num_inference_steps": 2, "output_type": "np"}


@pytest.fixture(scope="module")
def micro_vae() -> Any:
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=16,
    )


@pytest.mark.parametrize("size", [(9, 8), (12, 20), (14, 14), (13, 33), (8, 25), (26, 7)])
@torch.no_grad()
def test_blending_is_that_of_diffusers(size: tuple[int, int], micro_vae: Any) -> None:
    latents = torch.randn((2, 4, *size), generator=generator())

    def decode(rows: slice, columns: slice) -> Any:
        return micro_vae.decoder(micro_vae.post_quant_conv(latents[:, :, rows, columns])).numpy()

    found = join_tiles(decode, *size, TileGrid(8, 16), (2, 3))
    np.testing.assert_allclose(found, micro_vae.tiled_decode(latents).sample.numpy(), rtol=0, atol=1e-6)
    pixels = torch.randn((2, 3, 2 * size[0], 2 * size[1]), generator=generator())

    def encode(rows: slice, columns: slice) -> Any:
        return micro_vae.quant_conv(micro_vae.encoder(pixels[:, :, rows, columns])).numpy()

    found = join_tiles(encode, 2 * size[0], 2 * size[1], TileGrid(16, 8), (2, 3))
    np.testing.assert_allclose(found, micro_vae._tiled_encode(pixels).numpy(), rtol=0, atol=1e-6)


@pytest.fixture
def tiled_theirs(theirs: Any) -> Iterator[Any]:
    """diffusers' pipeline with tiles of 32 pixels."""
    sizes = theirs.vae.tile_sample_min_size, theirs.vae.tile_latent_min_size
    theirs.vae.enable_tiling()
    theirs.vae.tile_sample_min_size, theirs.vae.tile_latent_min_size = TILE, TILE // 8
    yield theirs
    theirs.vae.disable_tiling()
    theirs.vae.tile_sample_min_size, theirs.vae.tile_latent_min_size = sizes


@pytest.fixture(scope="module")
def tiled(micro_cpu: Path) -> Iterator[OrtDiffusionPipeline]:
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        pipeline.enable_vae_tiling(TILE)
        yield pipeline


def test_tiled_images_are_those_of_diffusers(
    tiled: OrtDiffusionPipeline, tiled_theirs: Any, ours: OrtDiffusionPipeline
) -> None:
    for batch in (1, 3):
        arguments = USUAL | {"num_images_per_prompt": batch}
        expected = tiled_theirs(**arguments, generator=generator()).images
        found = tiled(**arguments, seed=0).images
        assert psnr(found, expected) > SAME_DB
        assert psnr(ours(**arguments, seed=0).images, expected) < 60  # tiles change the image
        pixels = np.from_dlpack(tiled(**arguments | {"output_type": "ort"}, seed=0).images)
        assert np.abs(pixels - np.round(255 * expected)).max() <= 1


@pytest.mark.parametrize("masked", [False, True])
def test_tiled_image_to_image_is_that_of_diffusers(
    masked: bool, tiled: OrtDiffusionPipeline, tiled_theirs: Any
) -> None:
    spots = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    arguments = USUAL | {"image": Image.fromarray(spots).resize((40, 72)), "strength": 0.7, "num_inference_steps": 5}
    kind = "Img2Img"
    if masked:
        arguments["mask_image"] = Image.fromarray(np.eye(5, dtype=np.uint8) * 255).resize((40, 72))
        kind = "Inpaint"
    theirs = task_of(tiled_theirs, f"StableDiffusion{kind}Pipeline")
    given = {name: value for name, value in arguments.items() if masked or name not in ("height", "width")}
    expected = theirs(**given, generator=generator()).images
    assert psnr(tiled(**arguments, seed=0).images, expected) > SAME_DB


def test_images_beyond_the_limit_are_tiled(
    micro_cpu: Path, tiled: OrtDiffusionPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        whole = pipeline(**USUAL, seed=0).images
        pipeline.enable_vae_tiling(TILE)
        pipeline.disable_vae_tiling()
        pipeline._cache.splits.tile = TILE // 8
        np.testing.assert_array_equal(pipeline(**USUAL, seed=0).images, whole)
        pipeline._run(pipeline._cache.close)
        monkeypatch.setattr(vae_tiling, "MAX_ELEMENTS", 32 * TILE * TILE)
        expected = tiled(**USUAL, seed=0).images
        np.testing.assert_array_equal(pipeline(**USUAL, seed=0).images, expected)


def test_flags_of_tiles_are_joined(tiled: OrtDiffusionPipeline) -> None:
    found: list[Any] = []

    def read() -> None:
        shape = next(reversed(tiled._cache._shapes.values()))
        state = shape.read("state")
        state[0, 1, 0, -1, -1] = np.nan
        shape.put("state", state)
        shape.decode()
        found.extend([shape.read("finite"), shape.read("images")])

    tiled(**USUAL | {"num_images_per_prompt": 2}, seed=0)
    tiled._run(read)
    assert found[0].tolist() == [True, False]
    assert found[1][0].any()


@pytest.mark.parametrize("size", [0, 8, 33, "64", 64.0, True])
def test_rejected_tiles(size: Any, ours: OrtDiffusionPipeline) -> None:
    with refused(OptionError, f"tile_size is {size!r}"):
        ours.enable_vae_tiling(size)


def test_slicing_decodes_images_one_by_one(micro_cpu: Path, ours: OrtDiffusionPipeline) -> None:
    arguments = USUAL | {"num_images_per_prompt": 3}
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        counts = []
        for change in (pipeline.enable_vae_slicing, pipeline.disable_vae_slicing):
            change()
            with observed_roles(pipeline) as roles:
                assert psnr(pipeline(**arguments, seed=0).images, ours(**arguments, seed=0).images) > SAME_DB
            counts.append(roles.count(Role.IMAGE_DECODER))
            shapes = pipeline.captured_sizes
            change()  # changes nothing, and keeps the captured graphs
            assert pipeline.captured_sizes == shapes
        assert counts == [3, 1]
