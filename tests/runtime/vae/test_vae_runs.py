"""Decoding and encoding in slices and in tiles, compared with whole batches and with diffusers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from sdonnx.metrics import psnr
from sdonnx.models.spec import Role
from sdonnx.runtime.device.session import Run
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.runtime.vae import vae_tiling

Array = npt.NDArray[Any]

USUAL: dict[str, Any] = {"height": 32, "width": 40, "num_inference_steps": 1, "output_type": "np", "seed": 0}
# Elements of the largest tensor of an image of that size, in `tiny`: 32 channels of the whole image.
IMAGE = 32 * 32 * 40
# The sums of a convolution depend on the batch in their last bits.
SAME_DB = 120


@contextmanager
def counted(pipeline: OrtDiffusionPipeline) -> Iterator[tuple[Counter[Role], set[int]]]:
    """Count the runs of each graph, and note which runs of the autoencoder they are."""
    counts: Counter[Role] = Counter()
    distinct: set[int] = set()

    @contextmanager
    def note(role: Role, run: Run) -> Iterator[None]:
        counts[role] += 1
        if role in (Role.IMAGE_DECODER, Role.IMAGE_ENCODER):
            distinct.add(id(run))
        yield

    pipeline.observe(note)
    yield counts, distinct
    pipeline.observe(None)


@pytest.fixture(scope="module")
def sliced(micro_cpu: Path) -> Iterator[OrtDiffusionPipeline]:
    """A pipeline with a decoder and an encoder for at most two images of 32x40."""
    with pytest.MonkeyPatch.context() as patch, OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        patch.setattr(vae_tiling, "MAX_ELEMENTS", 2 * IMAGE + IMAGE // 2)
        yield pipeline


def spotted(seed: int) -> Image.Image:
    """Return an image of coloured spots, 40 pixels wide and 32 high."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((40, 32))


@pytest.mark.parametrize(("batch", "slices"), [(1, 1), (2, 1), (4, 2), (5, 3)])
def test_slices_decode_the_same_pixels(
    batch: int, slices: int, sliced: OrtDiffusionPipeline, ours: OrtDiffusionPipeline
) -> None:
    prompts = ["a fox", "an owl", "snow", "a castle", "the sea"][:batch]
    expected = ours(prompts, **USUAL).images
    with counted(sliced) as (counts, distinct):
        found = sliced(prompts, **USUAL).images
    assert psnr(found, expected) > SAME_DB
    assert counts[Role.IMAGE_DECODER] == slices
    assert len(distinct) == 1  # the same captured graph for every slice
    bytes_of = [
        np.stack(list(map(np.asarray, p(prompts, **USUAL | {"output_type": "pil"}).images))) for p in (sliced, ours)
    ]
    assert np.abs(bytes_of[0].astype(int) - bytes_of[1]).max() <= 1
    shared = np.from_dlpack(sliced(prompts, **USUAL | {"output_type": "ort"}).images)
    np.testing.assert_array_equal(shared, bytes_of[0])


@pytest.mark.parametrize("masked", [False, True])
def test_slices_encode_the_same_latents(masked: bool, sliced: OrtDiffusionPipeline, ours: OrtDiffusionPipeline) -> None:
    images = [spotted(seed) for seed in range(5)]
    arguments = USUAL | {"image": images, "strength": 0.6, "num_inference_steps": 3}
    if masked:
        arguments["mask_image"] = Image.fromarray(np.eye(5, dtype=np.uint8) * 255).resize((40, 32))
    expected = ours(["a fox"] * 5, **arguments).images
    with counted(sliced) as (counts, distinct):
        found = sliced(["a fox"] * 5, **arguments).images
    assert psnr(found, expected) > SAME_DB
    assert counts[Role.IMAGE_ENCODER] == counts[Role.IMAGE_DECODER] == 3
    assert len(distinct) == 2
    # A second call writes to the buffers of the first.
    np.testing.assert_array_equal(sliced(["a fox"] * 5, **arguments).images, found)


def test_flags_of_slices_are_those_of_their_images(sliced: OrtDiffusionPipeline) -> None:
    latents = np.random.default_rng(0).standard_normal((5, 4, 4, 5)).astype(np.float32)
    job: list[Array] = []

    def read() -> None:
        shape = next(reversed(sliced._cache._shapes.values()))
        state = shape.read("state")
        state[0] = latents
        state[0, 2, 0, 0, 0] = np.inf
        shape.put("state", state)
        shape.decode()
        job.append(shape.read("finite"))

    sliced(["a fox"] * 5, **USUAL)
    sliced._run(read)
    assert job[0].tolist() == [True, True, False, True, True]


def test_low_memory_decodes_in_slices(micro_cpu: Path, ours: OrtDiffusionPipeline, monkeypatch: Any) -> None:
    expected = ours(["a fox", "an owl", "snow"], **USUAL).images
    monkeypatch.setattr(vae_tiling, "MAX_ELEMENTS", IMAGE)
    with OrtDiffusionPipeline.from_pretrained(micro_cpu, low_memory=True) as pipeline:
        for _ in range(2):
            with counted(pipeline) as (counts, distinct):
                found = pipeline(["a fox", "an owl", "snow"], **USUAL).images
            assert psnr(found, expected) > SAME_DB
            assert (counts[Role.IMAGE_DECODER], len(distinct)) == (3, 1)


def test_slices_lower_the_memory_of_buffers_only_a_little(sliced: OrtDiffusionPipeline) -> None:
    (report,) = sliced.warmup([(5, 32, 40)])
    (whole,) = sliced.warmup([(2, 32, 40)])
    assert report.buffer_bytes > 5 * 32 * 40 * 15  # pixels of the batch and of a slice
    assert whole.buffer_bytes < report.buffer_bytes
