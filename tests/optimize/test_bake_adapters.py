"""Folders with LoRA files in their weights: equal to loaded ones, and to a merged pipeline that was optimized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support.lora_files import pipeline_of, write_lora
from support.pipeline_cache import PipelineCache
from support.pipelines import refused
from support.plain_lora import lora_image

from sdonnx.__main__ import main
from sdonnx.errors import FolderError, OptionError, OutputError, WeightsError
from sdonnx.folder.certificate import CERTIFICATE
from sdonnx.folder.weight_table import PROVENANCE
from sdonnx.metrics import psnr
from sdonnx.optimize.bake_adapters import bake_adapters
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

# Names of layers whose weights the optimizer transposes, joins, appends to others, or rearranges for channels last.
UNET = [
    "to_q", "to_k", "to_v", "to_out.0", "proj", "net.2", "proj_in", "proj_out", "conv1", "conv2", "conv_shortcut",
    "time_emb_proj", "linear_1", "linear_2",
]  # fmt: skip
TEXT = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
ENCODERS = {"tiny": ["text_encoder"], "sdxl-tiny": ["text_encoder", "text_encoder_2"]}

# Weights in float16, relative to the largest: both round once, from float32.
ROUNDING = 1e-3


@pytest.fixture(scope="module", params=["tiny", pytest.param("sdxl-tiny", marks=pytest.mark.weekly)])
def arch(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def lora(arch: str, pipelines: PipelineCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that changes every kind of layer."""
    layers = {"unet": UNET, **dict.fromkeys(ENCODERS[arch], TEXT)}
    return write_lora(pipelines.nano(arch), tmp_path_factory.mktemp("lora"), 0, layers)


@pytest.fixture(scope="module")
def merged(arch: str, lora: Path, pipelines: PipelineCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The diffusers folder with the file in its weights."""
    pipe = pipeline_of(pipelines.nano(arch))
    pipe.load_lora_weights(lora.parent)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    folder: Path = tmp_path_factory.mktemp("merged") / "pipeline"
    pipe.save_pretrained(folder)
    return folder


def _values(path: Path) -> dict[str, Any]:
    graph = ir.load(path).graph
    return {
        name: value.const_value.numpy() for name, value in graph.initializers.items() if value.const_value is not None
    }


@pytest.mark.parametrize("options", [{"provider": "cuda", "float16": True}, {"provider": "cpu"}], ids=["cuda", "cpu"])
def test_every_graph_is_that_of_the_merged_pipeline(
    options: dict[str, Any], arch: str, lora: Path, merged: Path, pipelines: PipelineCache, tmp_path: Path
) -> None:
    base = pipelines.optimized(pipelines.exported(pipelines.nano(arch)), **options)
    expected = pipelines.optimized(pipelines.exported(merged), **options)
    changed = bake_adapters(base, tmp_path / "baked", [(lora, 1.0)])
    assert changed.keys() == {"unet", *ENCODERS[arch]}
    compared = 0
    for path in sorted(expected.rglob("*.onnx")):
        relative = path.relative_to(expected)
        before, found, right = (_values(folder / relative) for folder in (base, tmp_path / "baked", expected))
        assert found.keys() == right.keys(), relative
        for name, values in right.items():
            if np.array_equal(values, before[name]):
                assert np.array_equal(found[name], before[name]), name
                continue
            compared += 1
            largest = np.abs(values.astype(np.float32)).max()
            error = np.abs(found[name].astype(np.float32) - values.astype(np.float32)).max() / largest
            assert error < (ROUNDING if values.dtype == np.float16 else 1e-5), (relative, name)
    assert compared > 30


def test_images_are_those_of_loaded_files(arch: str, lora: Path, pipelines: PipelineCache, tmp_path: Path) -> None:
    folder = pipelines.optimized(pipelines.exported(pipelines.nano(arch)), provider="cpu")
    assert main(["bake", "-m", str(folder), "--lora", f"{lora}:0.7", str(lora), "-o", str(tmp_path / "out")]) == 0
    loaded = OrtDiffusionPipeline.from_pretrained(folder)
    for name in ("a", "b"):
        loaded.load_lora_weights(lora, adapter_name=name)
    loaded.set_adapters(["a", "b"], [0.7, 1.0])
    baked = OrtDiffusionPipeline.from_pretrained(tmp_path / "out")
    assert np.array_equal(lora_image(baked), lora_image(loaded))
    report = json.loads((tmp_path / "out" / "sdonnx.json").read_text())
    assert [(each["file"], each["weights"]["unet"]) for each in report["adapters"]] == [
        (lora.name, 0.7),
        (lora.name, 1),
    ]
    # The table says where the weights of the new folder are, too.
    baked.load_lora_weights(lora, adapter_name="c")
    loaded.load_lora_weights(lora, adapter_name="c")
    loaded.set_adapters(["a", "b", "c"], [0.7, 1.0, 1.0])
    assert psnr(lora_image(baked), lora_image(loaded)) > 70  # the weights between were rounded


def test_a_certificate_is_not_copied(arch: str, lora: Path, pipelines: PipelineCache, tmp_path: Path) -> None:
    folder = pipelines.optimized(pipelines.exported(pipelines.nano(arch)), provider="cpu")
    shutil.copytree(folder, tmp_path / "certified")
    (tmp_path / "certified" / CERTIFICATE).write_text("{}")
    bake_adapters(tmp_path / "certified", tmp_path / "out", [(lora, {"unet": 0.5})])
    assert not (tmp_path / "out" / CERTIFICATE).exists()
    assert (tmp_path / "out" / "unet" / PROVENANCE).is_file()


def test_refused_input_writes_nothing(
    arch: str, lora: Path, pipelines: PipelineCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = pipelines.exported(pipelines.nano(arch))
    folder = pipelines.optimized(exported, provider="cpu")
    out = tmp_path / "out"
    with refused(FolderError, "sdonnx optimize"):
        bake_adapters(exported, out, [(lora, 1.0)])
    with refused(OptionError, "vae"):
        bake_adapters(folder, out, [(lora, {"vae": 1.0})])
    with refused(WeightsError, "missing.safetensors"):
        bake_adapters(folder, out, [(tmp_path / "missing.safetensors", 1.0)])
    with refused(WeightsError, "range"):
        half = pipelines.optimized(exported, provider="cuda", float16=True)
        bake_adapters(half, out, [(lora, 1e6)])
    with refused(OutputError, "input"):
        bake_adapters(folder, folder / "inside", [(lora, 1.0)])
    assert main(["bake", "-m", str(folder), "--lora", "no.safetensors:0.5", "-o", str(out)]) == 2
    assert "no.safetensors, which does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
