"""The scripts of examples/, each as a process on a small pipeline, against the images of diffusers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from support.diffusers_pipelines import in_diffusers
from support.lora_files import write_lora
from support.pipeline_cache import PipelineCache
from support.preloaded import python

from sdonnx.metrics import psnr
from sdonnx.models.image_adapters import ADAPTERS
from sdonnx.sample.architecture import ADAPTER_FILES

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

PROMPT = "a red fox"


def run(script: str, folder: Path, *arguments: str) -> list[str]:
    """Run a script in a folder, without a GPU, and return the lines that it prints."""
    command = python(str(EXAMPLES / script), "--prompt", PROMPT, "--steps", "2", "--seed", "3", *arguments)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def pixels(image: Any) -> npt.NDArray[np.float64]:
    return np.asarray(image, np.float64) / 255


def agreement(saved: Path, pipe: Any, **arguments: Any) -> float:
    """Return the PSNR of a saved image to diffusers' image, in dB."""
    theirs = pipe(PROMPT, num_inference_steps=2, generator=torch.Generator("cpu").manual_seed(3), **arguments).images[0]
    with Image.open(saved) as ours:
        assert ours.size == theirs.size
        return psnr(pixels(ours), pixels(theirs))


def test_stable_diffusion_at_two_sizes(micro: Path, tmp_path: Path) -> None:
    config = '{"mode": "max-optimize:max-autotune", "memory_format": "channels_last"}'
    lines = run(
        "text_to_image_sd21.py", tmp_path, "--model", str(micro), "--height", "64", "48", "--compiler-config", config
    )
    assert [line.split(":")[0] for line in lines] == [
        f"{size}, {name} image" for size in ("64x64", "48x48") for name in ("first", "second")
    ]
    pipe = in_diffusers(micro)
    for size in (64, 48):
        assert agreement(tmp_path / f"h{size}-w{size}-sd21.png", pipe, height=size, width=size) > 50


def test_pixart(pipelines: PipelineCache, tmp_path: Path) -> None:
    model = pipelines.micro("pixart-tiny")
    size = {"height": 64, "width": 48}
    lines = run("text_to_image_pixart.py", tmp_path, "--model", str(model), "--height", "64", "--width", "48")
    assert [line.split(":")[0] for line in lines] == ["first image", "second image"]
    assert agreement(tmp_path / "pixart.png", in_diffusers(model), use_resolution_binning=False, **size) > 50


@pytest.mark.weekly
def test_stable_diffusion_xl_at_several_sizes(pipelines: PipelineCache, tmp_path: Path) -> None:
    model = pipelines.micro("sdxl-tiny")
    lines = run(
        "text_to_image_sdxl_multiple_resolutions.py", tmp_path, "--model", str(model),
        "--height", "64", "--width", "64", "--sizes", "64x48", "40x72",
    )  # fmt: skip
    assert [line.split(":")[0] for line in lines] == [
        "64x64, warm-up", *(f"{size}, {name} image" for size in ("64x48", "40x72") for name in ("first", "second"))
    ]  # fmt: skip
    pipe = in_diffusers(model)
    for height, width in ((64, 48), (40, 72)):
        assert agreement(tmp_path / f"h{height}-w{width}-sdxl.png", pipe, height=height, width=width) > 50


@pytest.mark.weekly
def test_scales_of_an_ip_adapter(pipelines: PipelineCache, tmp_path: Path) -> None:
    model = pipelines.nano("sdxl-tiny-ip-adapter")
    shown = np.random.default_rng(0).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    picture = Image.fromarray(shown).resize((64, 64), Image.Resampling.BICUBIC)
    picture.save(tmp_path / "picture.png")
    lines = run(
        "ip_adapter_changing_scales.py", tmp_path, "--model", str(model), "--ip-adapter", str(model),
        "--subfolder", ADAPTERS, "--weight-name", ADAPTER_FILES[0], "--input-image", "picture.png",
        "--scale", "0.2", "1", "--height", "64", "--width", "48",
    )  # fmt: skip
    assert [line.split(":")[0] for line in lines] == ["warm-up", "scale 0.2", "scale 1"]
    pipe = in_diffusers(model)
    pipe.load_ip_adapter(str(model), subfolder=ADAPTERS, weight_name=ADAPTER_FILES[0])
    size = {"height": 64, "width": 48}
    for scale in (0.2, 1.0):
        pipe.set_ip_adapter_scale(scale)
        saved = tmp_path / f"ip-adapter-{scale:g}.png"
        assert agreement(saved, pipe, ip_adapter_image=picture, **size) > 50
    with Image.open(tmp_path / "ip-adapter-0.2.png") as weak, Image.open(tmp_path / "ip-adapter-1.png") as strong:
        assert psnr(pixels(weak), pixels(strong)) < 45


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
def test_weights_of_lora(pipelines: PipelineCache, tmp_path: Path) -> None:
    model = pipelines.nano("sdxl-tiny")
    layers = {"one": ["to_q", "to_v"], "two": ["to_out.0", "conv1"]}
    files = [
        str(write_lora(model, tmp_path / name, seed, {"unet": each}))
        for seed, (name, each) in enumerate(layers.items())
    ]
    lines = run(
        "lora_changing_weights.py", tmp_path, "--model", str(model), "--lora", *files, "--weights", "1,0", "0.25,0.5",
        "--height", "64", "--width", "48",
    )  # fmt: skip
    assert [line.split(":")[0] for line in lines] == [
        "without LoRA", "weights 1,0", "weights 1,0 again", "weights 0.25,0.5", "weights 0.25,0.5 again"
    ]  # fmt: skip
    pipe = in_diffusers(model)
    for name, file in zip(layers, files, strict=True):
        pipe.load_lora_weights(file, adapter_name=name)
    for weights in ((1, 0), (0.25, 0.5)):
        pipe.set_adapters(list(layers), list(weights))
        saved = tmp_path / f"lora-{weights[0]}-{weights[1]}.png"
        assert agreement(saved, pipe, height=64, width=48) > 50


def test_every_example_is_tested() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in source] == []
