"""Engines that the laboratory adds to the benchmark: plain ONNX Runtime, and optimum."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optimum_engine import OptimumEngine
from plain_engine import BoundOnnxRuntimeEngine, PlainOnnxRuntimeEngine
from support.pipelines import refused

from sdonnx.benchmark.engine import Engine, EngineOptions
from sdonnx.benchmark.engines import find_engine
from sdonnx.errors import OptionError
from sdonnx.folder.prompt_file import PROMPTS
from sdonnx.metrics import psnr
from sdonnx.reference.diffusers_pipeline import DiffusersPipeline
from sdonnx.reference.workload import Workload

WORKLOAD = Workload(batch_size=2, height=64, width=64, steps=3, seed=5)
FILES = {name: Path(sys.modules[f"{name}_engine"].__file__ or "") for name in ("plain", "optimum")}


# diffusers converts torch tensors to numpy in a deprecated way.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (PlainOnnxRuntimeEngine, {}),
        (BoundOnnxRuntimeEngine, {"guidance_scale": 1.0}),
        (PlainOnnxRuntimeEngine, {"negative_prompt": "blurred", "scheduler": "euler", "height": 72, "width": 48}),
    ],
)
def test_images_are_those_of_diffusers(
    kind: type[PlainOnnxRuntimeEngine], changes: dict[str, Any], micro: Path, micro_exported: Path
) -> None:
    workload, images = replace(WORKLOAD, **changes), []
    engine, source = kind(EngineOptions(micro_exported, "cpu")), DiffusersPipeline(micro, "cpu")
    for each in (engine, source):
        each.load(workload)
        found = each.generate(PROMPTS[0], workload)
        images.append(np.stack([np.asarray(image, np.float32) / 255 for image in found]))
    assert psnr(*images) >= 50
    stages = engine.stages(PROMPTS[0], workload)
    assert stages.denoiser_calls >= 3
    assert min(stages.text_ms, stages.step_ms, stages.decode_ms) > 0
    assert engine.precision == "float32"


@pytest.mark.parametrize("name", ["plain:onnxruntime-plain", "plain:bound", "optimum:optimum"])
def test_engines_refuse_what_they_do_not_support(
    name: str, micro_exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _, key = name.partition(":")
    engine: type[Engine] = find_engine(f"{FILES[file]}:{key}")
    monkeypatch.setattr(engine, "modules", ())
    with refused(OptionError, f"--ip_adapter for the engine {engine.name}"):
        engine(EngineOptions(micro_exported, "cpu", adapters=("a.safetensors",)))


class OptimumsPart:
    """Simulates optimum's wrapper of a session."""

    def __init__(self) -> None:
        self.dtype, self.use_io_binding = torch.float32, True

    def forward(self) -> None:
        """Do nothing."""


class OptimumsPipeline:
    """Simulates optimum's pipelines and records every call."""

    calls: list[dict[str, Any]] = []  # noqa: RUF012  shared by all instances

    def __init__(self) -> None:
        self.unet, self.vae, self.text_encoder = OptimumsPart(), types.SimpleNamespace(), OptimumsPart()
        self.vae.config = types.SimpleNamespace(latent_channels=4)
        self.vae_scale_factor, self.device, self.provider = 8, "cpu", "CPUExecutionProvider"
        self.parts = [self.unet, self.text_encoder]
        self.scheduler = types.SimpleNamespace(config={"_class_name": "PNDMScheduler", "num_train_timesteps": 1000})

    @classmethod
    def from_pretrained(cls, folder: Path, **options: Any) -> OptimumsPipeline:
        cls.calls.append({"folder": folder} | options)
        return cls()

    def set_progress_bar_config(self, **options: Any) -> None:
        assert options == {"disable": True}

    def __call__(self, prompt: str, **options: Any) -> Any:
        self.calls.append({"prompt": prompt, "bound": self.unet.use_io_binding} | options)
        return types.SimpleNamespace(images=["image"] * options["num_images_per_prompt"])


def test_calls_of_optimum(micro_exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """optimum cannot be installed together with the required transformers, so its pipeline is simulated."""
    quiet = types.SimpleNamespace(set_verbosity_error=lambda: None)
    library = types.SimpleNamespace(ORTPipelineForText2Image=OptimumsPipeline)
    monkeypatch.setitem(sys.modules, "optimum.onnxruntime", library)
    monkeypatch.setitem(sys.modules, "optimum.utils.logging", quiet)
    monkeypatch.setattr(OptimumEngine, "modules", ())
    OptimumsPipeline.calls.clear()
    engine = OptimumEngine(EngineOptions(micro_exported, "cpu"))
    engine.load(Workload(scheduler="euler"))
    loaded, workload = OptimumsPipeline.calls.pop(), Workload(2, 64, 48, 3, seed=5)
    assert (loaded["folder"], loaded["provider"]) == (micro_exported, "CPUExecutionProvider")
    assert engine.scheduler == "EulerDiscreteScheduler"
    assert engine.precision == "float32"
    assert engine.generate("a fox", workload) == ["image"] * 2
    call = OptimumsPipeline.calls.pop()
    noise = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(5))
    assert torch.equal(call["latents"], noise)
    assert (call["num_inference_steps"], call["guidance_scale"]) == (3, 7.5)
