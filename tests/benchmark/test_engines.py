"""Engines generate equal images and measure their stages."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch._inductor.config as inductor
from PIL import Image
from support.logged_lines import logged_lines
from support.pipelines import refused

from sdonnx.benchmark.engine import Engine, EngineOptions
from sdonnx.benchmark.engines import (
    OnnxRuntimeEngine,
    SdonnxCompileEngine,
    TorchEngine,
)
from sdonnx.benchmark.measure import measure_resolutions, measure_throughput
from sdonnx.compiler.compile_module import CompiledModule
from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.folder_version import FolderKind
from sdonnx.folder.prompt_file import PROMPTS
from sdonnx.metrics import psnr
from sdonnx.reference.workload import Workload

WORKLOAD = Workload(batch_size=2, height=64, width=64, steps=3, seed=5)

Pixels = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def folders(micro: Path, micro_exported: Path, micro_cpu: Path) -> dict[FolderKind, Path]:
    return {FolderKind.DIFFUSERS: micro, FolderKind.EXPORTED: micro_exported, FolderKind.OPTIMIZED: micro_cpu}


@pytest.fixture(scope="module")
def wide(tiny_pipeline: Path, tiny_exported: Path, tiny_cpu: Path) -> dict[FolderKind, Path]:
    """Folders of a UNet that spends most of its time in matmuls."""
    return {FolderKind.DIFFUSERS: tiny_pipeline, FolderKind.EXPORTED: tiny_exported, FolderKind.OPTIMIZED: tiny_cpu}


def made(kind: type[Engine], folders: dict[FolderKind, Path], **options: Any) -> Engine:
    return kind(EngineOptions(folders[kind.reads], "cpu", **options))


@pytest.fixture(scope="module")
def engines(folders: dict[FolderKind, Path]) -> dict[str, Engine]:
    """All engines that can be loaded in one process."""
    kinds: tuple[type[Engine], ...] = (
        OnnxRuntimeEngine,
        TorchEngine,
        SdonnxCompileEngine,
    )
    ready = {kind.name: made(kind, folders) for kind in kinds}
    for engine in ready.values():
        engine.load(WORKLOAD)
    return ready


def pixels(images: list[Image.Image]) -> Pixels:
    """Return images as (B,H,W,3) from 0 to 1."""
    return np.stack([np.asarray(image, np.float32) / 255 for image in images])


@pytest.fixture(scope="module")
def expected(engines: dict[str, Engine]) -> Pixels:
    """The images of diffusers."""
    return pixels(engines["torch"].generate(PROMPTS[0], WORKLOAD))


@pytest.mark.parametrize("name", ["onnxruntime", "sdonnx-compile"])
def test_engines_generate_equal_images(name: str, engines: dict[str, Engine], expected: Pixels) -> None:
    images = pixels(engines[name].generate(PROMPTS[0], WORKLOAD))
    assert images.shape == (2, 64, 64, 3)
    assert psnr(images, expected) >= 50
    assert psnr(pixels(engines[name].generate(PROMPTS[1], WORKLOAD)), expected) < 40


@pytest.mark.parametrize("name", ["onnxruntime", "sdonnx-compile"])
@pytest.mark.parametrize(
    "options",
    [{"guidance_scale": 1.0}, {"negative_prompt": "blurred"}, {"height": 72, "width": 48}, {"batch_size": 1}],
    ids=lambda options: next(iter(options)),
)
def test_engines_generate_equal_images_with_other_options(
    name: str, options: dict[str, Any], engines: dict[str, Engine]
) -> None:
    from dataclasses import replace

    workload = replace(WORKLOAD, **options)
    theirs = pixels(engines["torch"].generate(PROMPTS[0], workload))
    assert psnr(pixels(engines[name].generate(PROMPTS[0], workload)), theirs) >= 50


# diffusers converts torch tensors to numpy in a deprecated way.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("scheduler", ["euler", "UniPCMultistepScheduler"])
def test_engines_use_the_same_sampler(scheduler: str, folders: dict[FolderKind, Path]) -> None:
    workload = Workload(1, 64, 64, 3, scheduler=scheduler)
    images = []
    for each in (OnnxRuntimeEngine, TorchEngine):
        engine = made(each, folders)
        engine.load(workload)
        assert engine.scheduler == ("EulerDiscreteScheduler" if scheduler == "euler" else scheduler)
        images.append(pixels(engine.generate(PROMPTS[0], workload)))
    assert psnr(*images) >= 50


# diffusers' AutoPipeline imports all pipelines; one that needs sentencepiece uses torch.jit.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_image_to_image(folders: dict[FolderKind, Path], tmp_path: Path) -> None:
    path = tmp_path / "start.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 90, 3)).astype(np.uint8)).save(path)
    workload = Workload(1, 64, 72, 4, scheduler="ddim", image=str(path), strength=0.5)
    images = []
    for kind in (OnnxRuntimeEngine, SdonnxCompileEngine, TorchEngine):
        engine = made(kind, folders)
        engine.load(workload)
        images.append(pixels(engine.generate(PROMPTS[0], workload)))
        assert engine.stages(PROMPTS[0], workload).denoiser_calls == 2
    assert images[0].shape == (1, 64, 72, 3)
    assert min(psnr(each, images[-1]) for each in images[:-1]) >= 50
    path.write_text("no image")
    with refused(FolderError, "cannot be read as an image"):
        engine.generate(PROMPTS[0], workload)


@pytest.mark.parametrize("name", ["onnxruntime", "torch", "sdonnx-compile"])
def test_stages_are_most_of_a_run(name: str, engines: dict[str, Engine]) -> None:
    import time

    engines[name].generate(PROMPTS[0], WORKLOAD)
    shares = []
    for _ in range(3):
        start = time.perf_counter()
        stages = engines[name].stages(PROMPTS[0], WORKLOAD)
        wall_ms = (time.perf_counter() - start) * 1e3
        assert stages.denoiser_calls == 4  # PNDM has one call more than steps
        assert min(stages.text_ms, stages.step_ms, stages.decode_ms) > 0
        assert stages.iterations_per_second == pytest.approx(1e3 / stages.step_ms)
        shares.append((stages.text_ms + stages.denoiser_calls * stages.step_ms + stages.decode_ms) / wall_ms)
    # step_ms does not include the first call, which can be slower. The work around the stages is small.
    assert 0.5 < sorted(shares)[1] < 1.5


def test_measuring_stages_restores_the_pipeline(engines: dict[str, Engine], expected: Pixels) -> None:
    unet = engines["torch"]._source.pipeline.unet  # type: ignore[attr-defined]
    engines["torch"].stages(PROMPTS[0], WORKLOAD)
    assert "forward" not in vars(unet)
    assert "decode" not in vars(engines["torch"]._source.pipeline.vae)  # type: ignore[attr-defined]
    assert engines["onnxruntime"]._source.pipeline._graphs.observer is None  # type: ignore[attr-defined]
    assert psnr(pixels(engines["torch"].generate(PROMPTS[0], WORKLOAD)), expected) > 90


def test_measuring_stages_compiles_nothing_again(engines: dict[str, Engine], expected: Pixels) -> None:
    """And torch computes none of the calls."""
    engine: Any = engines["sdonnx-compile"]
    assert isinstance(engine._source.pipeline.unet, CompiledModule)
    before = type(engine._source.pipeline.vae).decode
    with logged_lines(logging.DEBUG) as lines:
        engine.stages(PROMPTS[0], WORKLOAD)
    assert lines == []
    assert type(engine._source.pipeline.vae).decode is before
    assert psnr(pixels(engine.generate(PROMPTS[0], WORKLOAD)), expected) >= 50


def test_load_of_diffusers_pipeline_is_measured_without_compilation(
    engines: dict[str, Engine], folders: dict[FolderKind, Path]
) -> None:
    known = {name for name, engine in engines.items() if engine.pipeline_load_s}
    assert known == {"torch", "sdonnx-compile"}
    compiled = made(SdonnxCompileEngine, folders)
    with mock.patch("sdonnx.compiler.compile_pipe.compile_pipe", side_effect=lambda pipe, **options: time.sleep(2)):
        start = time.perf_counter()
        compiled.load(WORKLOAD)
        total = time.perf_counter() - start
    assert compiled.pipeline_load_s is not None
    assert 0 < compiled.pipeline_load_s <= total - 2


def test_options_of_the_compiler(folders: dict[FolderKind, Path]) -> None:
    engine = made(SdonnxCompileEngine, folders, compiler_config='{"mode": "max-optimize:cache-all"}')
    assert (engine.provider, engine.precision) == ("cpu", "float32")
    assert engine.version == importlib.metadata.version("onnxruntime")
    engine = made(SdonnxCompileEngine, folders, compiler_config="fastest")
    with refused(OptionError, "the mode 'fastest' is unknown"):
        engine.load(WORKLOAD)


def test_memory_of_a_compiled_pipeline_is_not_that_of_torch(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 77)
    for name in ("torch", "sdonnx-compile"):
        monkeypatch.setattr(engines[name], "device", "cuda")
    assert (engines["torch"].allocator_bytes(), engines["sdonnx-compile"].allocator_bytes()) == (77, None)


def test_extra_measurements_of_torch(folders: dict[FolderKind, Path]) -> None:
    """The command is tested with engines that start their processes without torch."""
    engine, prompt = made(TorchEngine, folders), PROMPTS[0]
    workload = Workload(1, 64, 64, 3)
    points = measure_throughput(engine, workload, prompt, 1, lambda text: None)
    assert [steps for steps, _ in points] == [1, 2, 3]
    assert all(seconds > 0 for _, seconds in points)
    sizes = [(64, 64), (72, 48)]
    visited = measure_resolutions(engine, workload, prompt, sizes, lambda text: None)
    assert [(at.height, at.width) for at in visited] == sizes


def test_compilation_settings(
    folders: dict[FolderKind, Path], expected: Pixels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings follow diffusers' guide. With a compiler that changes nothing, the images are equal."""
    for name in ("conv_1x1_as_mm", "coordinate_descent_tuning", "epilogue_fusion"):
        monkeypatch.setattr(inductor, name, getattr(inductor, name))
    monkeypatch.setattr(inductor, "coordinate_descent_check_all_directions", False)
    compiled: list[tuple[str, dict[str, Any]]] = []

    def compiler(target: Any, **options: Any) -> Any:
        compiled.append((getattr(target, "__name__", type(target).__name__), options))
        return target

    monkeypatch.setattr(torch, "compile", compiler)
    engine = made(TorchEngine, folders, compile_mode="max-autotune", compiler_config='{"dynamic": true}')
    engine.load(WORKLOAD)
    options = {"mode": "max-autotune", "fullgraph": True, "dynamic": True}
    assert compiled == [("UNet2DConditionModel", options), ("decode", options)]
    unet = engine._source.pipeline.unet  # type: ignore[attr-defined]
    assert unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert unet.mid_block.attentions[0].transformer_blocks[0].attn1.fused_projections
    assert engine.provider == "cpu compile max-autotune"
    assert inductor.conv_1x1_as_mm
    assert not inductor.epilogue_fusion
    assert psnr(pixels(engine.generate(PROMPTS[0], WORKLOAD)), expected) >= 50


@pytest.mark.parametrize(("mode", "guidance", "cloned"), [("reduce-overhead", 1.0, True), ("default", 1.0, False)])
def test_copies_predictions_that_a_replay_overwrites(
    mode: str, guidance: float, cloned: bool, folders: dict[FolderKind, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda target, **_: target)
    engine = made(TorchEngine, folders, compile_mode=mode)
    engine.load(Workload(1, 64, 64, 3, guidance_scale=guidance))
    scheduler = engine._source.pipeline.scheduler  # type: ignore[attr-defined]
    assert ("step" in vars(scheduler)) == cloned
    scheduler.set_timesteps(3)
    prediction = torch.ones(1, 4, 8, 8)
    scheduler.step(prediction, scheduler.timesteps[0], torch.zeros(1, 4, 8, 8))
    kept = scheduler.ets[-1]
    assert (kept.data_ptr() == prediction.data_ptr()) != cloned


def test_regional_compilation_compiles_the_repeated_blocks(
    folders: dict[FolderKind, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compiled.append((type(module).__name__, options))
    )
    engine = made(TorchEngine, folders, compile_mode="default", regional=True)
    engine.load(WORKLOAD)
    assert {name for name, _ in compiled} == {"BasicTransformerBlock"}
    assert compiled[0][1] == {"mode": "default", "fullgraph": True}
    assert engine.provider == "cpu regional compile default"


def test_enables_xformers(folders: dict[FolderKind, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(OptionError, "--use_xformers without xformers"):
        made(TorchEngine, folders, xformers=True)
    import diffusers

    enabled: list[bool] = []
    monkeypatch.setattr("sdonnx.benchmark.engines.pytorch.is_importable", lambda module: True)
    monkeypatch.setattr(
        diffusers.DiffusionPipeline,
        "enable_xformers_memory_efficient_attention",
        lambda pipeline, *_: enabled.append(True),
    )
    made(TorchEngine, folders, xformers=True).load(WORKLOAD)
    assert enabled == [True]


# Folders and packages


@pytest.mark.parametrize("kind", [OnnxRuntimeEngine, TorchEngine])
def test_rejects_a_folder_of_another_kind(kind: type[Engine], folders: dict[FolderKind, Path]) -> None:
    for other, path in folders.items():
        if other is not kind.reads:
            with refused(FolderError, f"{path} is {other}; expected {kind.reads} for the engine {kind.name}"):
                kind(EngineOptions(path, "cpu"))


@pytest.mark.parametrize("kind", [OnnxRuntimeEngine, TorchEngine])
def test_rejects_a_folder_without_a_safety_checker(kind: type[Engine], folders: dict[FolderKind, Path]) -> None:
    with refused(FolderError, "has no safety checker; expected a safety checker"):
        made(kind, folders, safety_checker=True)


@pytest.mark.parametrize("kind", [TorchEngine, OnnxRuntimeEngine])
def test_rejects_missing_packages(
    kind: type[Engine], folders: dict[FolderKind, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "modules", (*kind.modules, "no_such_package", "no_such.package"))
    with refused(OptionError, f"the engine {kind.name} without ", "no_such_package, no_such.package", "pip install"):
        made(kind, folders)
