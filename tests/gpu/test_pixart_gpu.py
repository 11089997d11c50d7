"""PixArt on a GPU: components and images in fp16 against torch's float32 and fp16."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.diffusers_pipelines import on_cuda
from torch.utils.dlpack import from_dlpack

from sdonnx.compose import absorb_projections
from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.graph.passes import tidy
from sdonnx.metrics import psnr, relative_error
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

Build = Callable[[str], tuple[Path, Path]]
Feeds = dict[str, np.ndarray[Any, Any]]

FULL = [pytest.param(name, marks=pytest.mark.weekly) for name in ("pixart-alpha", "pixart-sigma")]
ARCHITECTURES = ["pixart-tiny", "pixart-alpha-tiny", "pixart-sigma-tiny", *FULL]

# Each follows a different call: a replay that reads captured inputs instead of new ones would repeat the call before.
CASES: list[dict[str, Any]] = [
    {"prompt": "a red fox in the snow"},
    {"prompt": "an old castle", "negative_prompt": "blurred, ugly"},
    {"prompt": "an old castle by the sea at night, painted in oil, with a small boat and a tall lighthouse"},
    {"prompt": "a red fox in the snow", "guidance_scale": 1.0},
    # Captions of other lengths use other graphs.
    {"prompt": "a red fox in the snow " * 7},
    {"prompt": "a red fox in the snow " * 17, "negative_prompt": "blurred, ugly"},
    {"prompt": ["an owl", "a fox in a forest of tall trees"], "num_images_per_prompt": 2},
    {"prompt": "a red fox in the snow"},
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folders(request: pytest.FixtureRequest, build: Build) -> tuple[str, Path, Path]:
    return request.param, *build(request.param)


@pytest.fixture(scope="module")
def pipelines(folders: tuple[str, Path, Path]) -> Iterator[dict[str, Any]]:
    """The torch pipeline in float32, without TF32, and in float16."""
    loaded = {name: on_cuda(folders[1], getattr(torch, name)) for name in ("float32", "float16")}
    yield loaded
    loaded.clear()
    torch.cuda.empty_cache()


def text_case(config: Any) -> Feeds:
    draw = np.random.default_rng(0)
    mask = (np.arange(304) < np.array([[23], [120]])).astype(np.int32)
    ids = draw.integers(3, config.vocab_size - 200, (2, 304)) * mask
    return {"input_ids": ids.astype(np.int32), "attention_mask": mask}


def denoiser_cases(config: Any, size: int) -> list[Feeds]:
    draw = np.random.default_rng(0)
    found = []
    for batch, height, width, tokens in ((2, size, size, 120), (1, 40, 24, 304), (3, 18, 34, 40)):
        feeds = {
            "sample": draw.standard_normal((batch, 4, height, width)).astype(np.float32),
            "timestep": np.array([481.0], np.float32),
            "encoder_hidden_states": draw.standard_normal((batch, tokens, config.caption_channels)).astype(np.float32),
            "encoder_attention_mask": (np.arange(tokens) < 7 + 9 * np.arange(batch)[:, None]).astype(np.int32),
            "resolution": np.array([[height * 8, width * 8]], np.float32),
            "aspect_ratio": np.array([[height / width]], np.float32),
        }
        found.append(feeds)
    return found


def ours(path: Path, feeds: Feeds) -> np.ndarray[Any, Any]:
    graph = Graph(path, device_for("cuda"))
    return graph.run(feeds)[graph.outputs[0]]


def theirs(pipeline: Any, component: str, feeds: Feeds) -> np.ndarray[Any, Any]:
    tensors = {name: torch.from_numpy(values).cuda() for name, values in feeds.items()}
    dtype = pipeline.transformer.dtype
    with torch.inference_mode():
        if component == "text_encoder":
            output = pipeline.text_encoder(tensors["input_ids"], attention_mask=tensors["attention_mask"])[0]
        else:
            rows = len(feeds["sample"])
            sizes = {name: tensors[name].expand(rows, -1).to(dtype) for name in ("resolution", "aspect_ratio")}
            output = pipeline.transformer(
                tensors["sample"].to(dtype),
                encoder_hidden_states=tensors["encoder_hidden_states"].to(dtype),
                timestep=tensors["timestep"].expand(rows),
                encoder_attention_mask=tensors["encoder_attention_mask"],
                added_cond_kwargs=sizes if pipeline.transformer.use_additional_conditions else None,
                return_dict=False,
            )[0]
    result: np.ndarray[Any, Any] = output.float().cpu().numpy()
    return result


@pytest.fixture
def short_transformer(folders: tuple[str, Path, Path]) -> Iterator[Path]:
    """Write the transformer for short captions next to the weights that it reads."""
    path = folders[2] / "transformer" / "absorbed.onnx"
    model = ir.load(path.with_name(ONNX_MODEL))
    names = [str(value.name) for value in model.graph.inputs if value.name not in ("sample", "timestep")]
    assert absorb_projections(model, names) > 0
    tidy(model)
    ir.save(model, path)
    yield path
    path.unlink()


@pytest.mark.parametrize("part", ["text_encoder", "transformer", "short_transformer"])
def test_error_is_at_most_twice_torchs(
    part: str, folders: tuple[str, Path, Path], pipelines: dict[str, Any], request: pytest.FixtureRequest, note: Any
) -> None:
    name, _, optimized = folders
    component = part.removeprefix("short_")
    path = optimized / component / ONNX_MODEL if part == component else request.getfixturevalue(part)
    config = getattr(pipelines["float32"], component).config
    cases = [text_case(config)] if component == "text_encoder" else denoiser_cases(config, min(config.sample_size, 128))
    for feeds in cases:
        wide, half = (theirs(pipelines[dtype], component, feeds) for dtype in ("float32", "float16"))
        mine = ours(path, feeds).astype(np.float32)
        if component == "text_encoder":  # no graph reads the output for padding
            wide, half, mine = (values[feeds["attention_mask"] == 1] for values in (wide, half, mine))
        row: dict[str, Any] = {"pipeline": name, "component": part, "shape": list(mine.shape)}
        row |= {"error": relative_error(mine, wide), "torch_fp16_error": relative_error(half, wide)}
        note("components", row)
        assert row["error"] <= 2 * row["torch_fp16_error"], row


def test_images_agree(folders: tuple[str, Path, Path], pipelines: dict[str, Any], note: Any) -> None:
    name, _, optimized = folders
    side = min(512, pipelines["float32"].transformer.config.sample_size * 8)
    steps: dict[str, Any] = {"num_inference_steps": 10, "height": side, "width": side, "use_resolution_binning": False}
    steps["clean_caption"] = False
    start = time.perf_counter()
    with OrtDiffusionPipeline.from_pretrained(optimized) as pipeline:
        loaded = time.perf_counter() - start
        for index, case in enumerate(CASES):
            start = time.perf_counter()
            generated = pipeline(**case, **steps, seed=3, output_type="np").images
            row: dict[str, Any] = {
                "pipeline": name,
                "case": index,
                "seconds": time.perf_counter() - start,
                "load_s": loaded,
            }
            pictures = {}
            for dtype, each in pipelines.items():
                shape = (len(generated), 4, side // 8, side // 8)
                noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
                noise = noise.to("cuda", each.transformer.dtype)
                pictures[dtype] = each(**case, **steps, latents=noise, output_type="np").images
            row["psnr_db"] = psnr(generated, pictures["float32"])
            row["torch_fp16_psnr_db"] = psnr(pictures["float16"], pictures["float32"])
            note("images", row)
            assert np.std(generated) > 0.02
            # Not much farther from float32 than torch's float16.
            assert row["psnr_db"] > min(45.0, row["torch_fp16_psnr_db"] - 6), row


def test_resized_images_are_returned_on_the_device(folders: tuple[str, Path, Path]) -> None:
    """Generated at a size of the table, resized on the host, and copied back to the device."""
    with OrtDiffusionPipeline.from_pretrained(folders[2]) as pipeline:
        given: dict[str, Any] = {"num_inference_steps": 2, "seed": 1, "height": 300, "width": 500}
        array = pipeline("a fox", **given, output_type="np").images
        shared = from_dlpack(pipeline("a fox", **given, output_type="ort").images)
        assert shared.is_cuda
        assert array.shape == tuple(shared.shape) == (1, 300, 500, 3)
        assert psnr(shared.cpu().numpy() / 255, array) > 45
