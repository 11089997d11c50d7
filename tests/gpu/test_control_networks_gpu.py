"""Stable Diffusion XL with a ControlNet on a GPU: fp16 error and time against torch, and memory of the weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from support.control_networks import picture, write_controlnet
from support.diffusers_pipelines import in_diffusers
from support.latency import median_seconds
from support.recording import Note

from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.folder.pipeline_folder import read_json
from sdonnx.metrics import relative_error
from sdonnx.models.spec import Role
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.write_sample import write_sample

Made = Callable[[str, Callable[[Path], object]], Path]

# As published: diffusers/controlnet-canny-sdxl-1.0.
_EMBEDDING = (16, 32, 96, 256)
_STEPS, _ROUNDS, _MIN_SPEEDUP = 20, 5, 1.1

CONTROL = {"controlnet_conditioning_scale": 0.5, "control_guidance_end": 1.0}


def in_torch(source: Path, net: Path, dtype: torch.dtype) -> Any:
    model: Any = diffusers.ControlNetModel
    controlnet = model.from_pretrained(net, torch_dtype=dtype)
    pipeline = in_diffusers(source, "StableDiffusionXLControlNetPipeline", controlnet=controlnet, dtype=dtype)
    pipeline.vae.register_to_config(force_upcast=False)  # as here: the random weights stay in the range of fp16
    return pipeline.to("cuda")


def free_memory() -> None:
    """Return the memory of pipelines that are no longer used to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def torch_latents(
    folder: Path, dtype: torch.dtype, image: Any, common: dict[str, Any], *, timed: bool = False
) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """Return the latents of torch, and the time of an image with torch.compile if `timed`."""
    pipeline = in_torch(folder / "source", folder / "net", dtype)
    edge = pipeline.unet.config.sample_size
    noise = torch.randn((1, 4, edge, edge), generator=torch.Generator().manual_seed(3)).to("cuda", dtype)
    found = pipeline(**common, image=image, latents=noise, output_type="latent").images.float().cpu().numpy()
    row: dict[str, Any] = {}
    if timed:
        for module in (pipeline.unet, pipeline.controlnet, pipeline.vae):
            module.to(memory_format=torch.channels_last)
        settings: dict[str, Any] = {"mode": "reduce-overhead", "fullgraph": True}
        pipeline.unet = torch.compile(pipeline.unet, **settings)
        pipeline.controlnet = torch.compile(pipeline.controlnet, **settings)
        pipeline.vae.decode = torch.compile(pipeline.vae.decode, **settings)
        start = time.perf_counter()
        pipeline(**common, image=image, output_type="pt")
        row["torch_first_image_s"] = time.perf_counter() - start
        row["torch_compile_s"] = median_seconds(lambda: pipeline(**common, image=image, output_type="pt"), _ROUNDS)
    return found, row


@pytest.fixture
def controlled(made: Made) -> Callable[[str], Path]:
    """Return a function that makes a pipeline with a ControlNet once: `source`, `net`, and `fast` in fp16."""

    def make(arch: str) -> Path:
        def fill(work: Path) -> None:
            write_sample(arch, work / "source")
            net = write_controlnet(
                work / "source", work / "net", 1, conditioning_embedding_out_channels=_EMBEDDING
            )  # as wide as the published one
            export_pipeline(work / "source", work / "onnx", controlnets=[net], dtype="float16")
            optimize_folder(work / "onnx", work / "fast", provider="cuda", float16=True)

        return made(f"controlled-{arch}", fill)

    return make


@pytest.mark.parametrize("arch", ["sdxl-tiny", pytest.param("sdxl", marks=pytest.mark.weekly)])
def test_error_and_time(arch: str, controlled: Callable[[str], Path], note: Note) -> None:
    """Compare the error of latents with torch's in fp16, and the time of an image with torch.compile's if full-size."""
    folder = controlled(arch)
    # diffusers generates images of the size of the control image.
    edge = read_json(folder / "source" / "unet" / "config.json")["sample_size"] * 8
    image = picture(1, (edge, edge))
    common: dict[str, Any] = {"prompt": "a red fox in the snow", "num_inference_steps": _STEPS, **CONTROL}
    exact, _ = torch_latents(folder, torch.float32, image, common)
    free_memory()
    half, row = torch_latents(folder, torch.float16, image, common, timed=arch == "sdxl")
    free_memory()
    row |= {"pipeline": arch, "torch_error": relative_error(half, exact)}
    note("a ControlNet", row)  # what was measured so far, if the session is cut off
    with OrtDiffusionPipeline.from_pretrained(folder / "fast") as ours:
        given = {**common, "control_image": image, "seed": 3}
        found = np.asarray(ours(**given, output_type="latent").images)
        row["error"] = relative_error(found, exact)
        again = np.asarray(ours(**given, output_type="latent").images)
        np.testing.assert_array_equal(found, again)  # a replay reads the buffers of its own call
        row["seconds"] = median_seconds(lambda: ours(**given, output_type="ort"), _ROUNDS)
        plain = {name: value for name, value in given.items() if not name.startswith("control")}
        row["plain_seconds"] = median_seconds(lambda: ours(**plain, output_type="ort"), _ROUNDS)
    assert row["error"] <= 2 * row["torch_error"], row
    if arch == "sdxl":
        assert row["torch_compile_s"] >= _MIN_SPEEDUP * row["seconds"], row


@pytest.mark.parametrize("arch", ["sdxl-tiny", pytest.param("sdxl", marks=pytest.mark.weekly)])
def test_guess_mode_computes_half_of_the_rows(arch: str, controlled: Callable[[str], Path], note: Note) -> None:
    """Compare the error of latents with torch's in fp16, and the time of an image with the time for all rows."""
    folder = controlled(arch)
    edge = read_json(folder / "source" / "unet" / "config.json")["sample_size"] * 8
    image = picture(1, (edge, edge))
    common: dict[str, Any] = {"prompt": "a red fox in the snow", "num_inference_steps": _STEPS, **CONTROL}
    guess = common | {"guess_mode": True}
    exact, _ = torch_latents(folder, torch.float32, image, guess)
    free_memory()
    half, _ = torch_latents(folder, torch.float16, image, guess)
    free_memory()
    row: dict[str, Any] = {"pipeline": arch, "torch_error": relative_error(half, exact)}
    with OrtDiffusionPipeline.from_pretrained(folder / "fast") as ours:

        def latents(arguments: dict[str, Any]) -> Any:
            return np.asarray(ours(**arguments, control_image=image, seed=3, output_type="latent").images)

        found, whole = latents(guess), latents(common)
        row["error"] = relative_error(found, exact)
        np.testing.assert_array_equal(latents(guess), found)  # after a call that wrote all rows
        np.testing.assert_array_equal(latents(common), whole)
        for name, arguments in (("guess_seconds", guess), ("seconds", common)):
            given = {**arguments, "control_image": image, "seed": 3, "output_type": "ort"}
            row[name] = median_seconds(lambda given=given: ours(**given), _ROUNDS)  # type: ignore[misc]
    note("guess_mode of a ControlNet", row)
    assert row["error"] <= 2 * row["torch_error"], row
    if arch == "sdxl":
        assert row["guess_seconds"] < row["seconds"], row


def test_weights_are_on_the_device_once(controlled: Callable[[str], Path], note: Note) -> None:
    """The controlled step graph needs less than a tenth of the UNet's weights in addition."""
    folder = controlled("sd15") / "fast"
    weights = (folder / "unet" / "model.onnx.data").stat().st_size
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        device = pipeline.device

        def load() -> tuple[int, int]:
            free = device.memory()
            pipeline._graphs.get(Role.CONTROLLED_DENOISER)
            after = device.memory()
            assert free is not None
            assert after is not None
            return free[0], after[0]

        before, after = pipeline._run(load)
    note("memory of the controlled step graph", {"weights": weights, "added": before - after})
    assert before - after < weights / 10
