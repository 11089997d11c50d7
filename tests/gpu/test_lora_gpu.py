"""LoRA at run time on a GPU: fp16 error against torch, time of a switch and of a step, memory, and bits."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from support.diffusers_pipelines import in_diffusers
from support.latency import median_seconds
from support.recording import Note

from sdonnx.folder.weight_table import WeightTable
from sdonnx.metrics import relative_error
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.quantization.quantization_types import TYPES
from sdonnx.runtime.device.session import Graph, Run
from sdonnx.runtime.device.session_weights import reads_in_place
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

Build = Callable[[str], tuple[Path, Path]]

_RANK, _STEPS, _ROUNDS = 32, 10, 20
_WEIGHTS = (0.8, -0.3)

CALL: dict[str, Any] = {"prompt": "a red fox in the snow", "num_inference_steps": _STEPS}


def _is_linear_in_attention(name: str, shape: tuple[int, ...]) -> bool:
    return ".attn" in name and len(shape) == 2


def torch_latents(source: Path, files: list[Path], dtype: torch.dtype, device: str) -> Any:
    """Return latents of diffusers with the files added to the weights, in float32, as torch multiplies them."""
    pipeline = in_diffusers(source)
    modules = dict(pipeline.unet.named_modules())
    with torch.no_grad():
        for file, weight in zip(files, _WEIGHTS, strict=True):
            tensors = {name: torch.from_numpy(values).float() for name, values in load_file(file).items()}
            for name, down in tensors.items():
                if name.endswith(".lora_A.weight"):
                    module = name.removeprefix("unet.").removesuffix(".lora_A.weight")
                    modules[module].weight += weight * (tensors[name.replace("lora_A", "lora_B")] @ down)
    pipeline = pipeline.to(device, dtype)
    edge = pipeline.unet.config.sample_size
    noise = torch.randn((1, 4, edge, edge), generator=torch.Generator().manual_seed(3)).to(device, dtype)
    found = pipeline(**CALL, latents=noise, output_type="latent").images.float().cpu().numpy()
    del pipeline
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def measure(pipeline: OrtDiffusionPipeline, files: list[Path]) -> tuple[dict[str, Any], Any]:
    """Return measurements of switches between two files, and the latents with both."""

    def latents() -> Any:
        return np.asarray(pipeline(**CALL, seed=3, output_type="latent").images)

    def seconds() -> float:
        return median_seconds(lambda: pipeline(**CALL, seed=3, output_type="latent"), 5)

    base = latents()
    row: dict[str, Any] = {"image_s": seconds(), "memory": pipeline.device.memory()}
    start = time.perf_counter()
    pipeline.load_lora_weights(files[0], adapter_name="a")
    row["load_s"] = time.perf_counter() - start
    start = time.perf_counter()
    latents()
    row["first_image_s"] = time.perf_counter() - start
    pipeline.load_lora_weights(files[1], adapter_name="b")
    pipeline.set_adapters(["a", "b"], list(_WEIGHTS))
    both = latents()
    row |= {"lora_image_s": seconds(), "lora_memory": pipeline.device.memory()}
    with mock.patch.object(Graph, "_load", autospec=True, side_effect=Graph._load) as loads:
        row["switch_s"] = median_seconds(
            lambda: pipeline.set_adapters("a", float(np.random.default_rng().normal())), _ROUNDS
        )
        pipeline.set_adapters(["a", "b"], list(_WEIGHTS))
        again = latents()
        pipeline.unload_lora_weights()
        removed = latents()
        row["loads"] = loads.call_count
    assert np.array_equal(again, both)
    assert np.array_equal(removed, base)
    return row, both


@pytest.mark.parametrize("arch", ["tiny", "sdxl-tiny", pytest.param("sdxl", marks=pytest.mark.weekly)])
def test_switches(arch: str, build: Build, tmp_path: Path, note: Note) -> None:
    source, folder = build(arch)
    files = [
        write_adapter(folder, tmp_path / f"{seed}.safetensors", seed, _is_linear_in_attention, _RANK) for seed in (1, 2)
    ]
    exact, half = (torch_latents(source, files, dtype, "cuda") for dtype in (torch.float32, torch.float16))
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        assert reads_in_place(pipeline.device)
        row, found = measure(pipeline, files)
    row |= {"pipeline": arch, "rank": _RANK, "error": relative_error(found, exact)}
    row["torch_error"] = relative_error(half, exact)
    note("LoRA files of rank 32 on all linear layers of attentions", row)
    assert row["loads"] == 0
    assert row["error"] <= 2 * row["torch_error"], row


def write_adapter(
    folder: Path, out: Path, seed: int, chosen: Callable[[str, tuple[int, ...]], bool], rank: int = 8
) -> Path:
    """Write a LoRA for weights of a UNet, chosen by name and shape; convolutions have LoCon."""
    table = WeightTable.read(folder / "unet")
    assert table is not None
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in table.shapes.items():
        if name in table.places and chosen(name, shape):
            module, inputs = name.removesuffix(".weight"), int(np.prod(shape[1:]))
            down = random.normal(size=(rank, *shape[1:])) / np.sqrt(inputs)
            up = random.normal(size=(shape[0], rank, *(1 for _ in shape[2:]))) * 0.05
            tensors[f"unet.{module}.lora_A.weight"] = down.astype(np.float16)
            tensors[f"unet.{module}.lora_B.weight"] = up.astype(np.float16)
    assert tensors
    save_file(tensors, out)
    return out


def require_switches_in_place(folder: Path, files: list[Path]) -> None:
    """Switch from one file to another and back, and to none: the same bits, and nothing is loaded or captured again."""

    def latents(pipeline: OrtDiffusionPipeline) -> Any:
        return np.asarray(pipeline(**CALL, seed=3, output_type="latent").images)

    fresh = []  # without a change in place after the load
    for file in files:
        with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
            pipeline.load_lora_weights(file)
            fresh.append(latents(pipeline))
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        assert reads_in_place(pipeline.device)
        base = latents(pipeline)
        for number, file in enumerate(files):
            pipeline.load_lora_weights(file, adapter_name=str(number))
        pipeline.set_adapters(["0", "1"])
        latents(pipeline)
        found = []
        with (
            mock.patch.object(Graph, "_load", autospec=True, side_effect=Graph._load) as loads,
            mock.patch.object(Run, "capture", autospec=True, side_effect=Run.capture) as captures,
        ):
            for number in (0, 1, 0):
                pipeline.set_adapters(str(number))
                found.append(latents(pipeline))
            pipeline.unload_lora_weights()
            removed = latents(pipeline)
        assert (loads.call_count, captures.call_count) == (0, 0)
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(removed, base)
    for each, expected in zip(found, fresh, strict=False):
        assert relative_error(each, expected) < 0.1 * relative_error(base, expected)


@pytest.mark.parametrize("arch", ["tiny", "sdxl-tiny"])
def test_convolutions_in_place(arch: str, build: Build, tmp_path: Path) -> None:
    """LoCon for all convolutions, next to linear layers."""
    _, folder = build(arch)
    files = [write_adapter(folder, tmp_path / f"{seed}.safetensors", seed, lambda *_: True) for seed in (1, 2)]
    require_switches_in_place(folder, files)


@pytest.mark.parametrize("name", ["fp8_e4m3_e4m3_dynamic", "fp8_e4m3_weightonly", "fp8_e4m3_e5m2_weightonly"])
def test_fp8_in_place(name: str, build: Build, tmp_path: Path) -> None:
    """Weights in 8-bit floating point that the graph restores, such as those that multiply the prompt."""
    _, wide = build("tiny")
    folder = tmp_path / "folder"
    optimize_folder(wide.parent / "onnx", folder, float16=True, quantization=QuantizationConfig(TYPES[name]))
    table = WeightTable.read(folder / "unet")
    assert table is not None
    stored = {entry for entry, each in table.initializers.items() if each.dtype.startswith("F8")}
    chosen = {weight for weight, places in table.places.items() if any(each.initializer in stored for each in places)}
    assert any(".attn2.to_k" in weight for weight in chosen)
    files = [
        write_adapter(folder, tmp_path / f"{seed}.safetensors", seed, lambda weight, _: weight in chosen)
        for seed in (1, 2)
    ]
    require_switches_in_place(folder, files)
