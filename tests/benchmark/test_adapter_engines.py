"""The benchmark with IP-Adapters: equal images from all engines, a row for each scale, and changing scales."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.benchmarking import read_rows
from support.micro import narrowed
from support.pipeline_cache import PipelineCache
from support.pipelines import refused
from support.preloaded import interpreter

from sdonnx.__main__ import main
from sdonnx.benchmark.engine import EngineOptions
from sdonnx.benchmark.engines import OnnxRuntimeEngine, TorchEngine
from sdonnx.benchmark.measure import SCALES
from sdonnx.errors import FolderError
from sdonnx.metrics import psnr
from sdonnx.reference.workload import Workload
from sdonnx.sample.architecture import ADAPTER_FILES

WORKLOAD = Workload(1, 64, 64, 2, ip_adapter_scale=0.6)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, pipelines: PipelineCache) -> Path:
    """Results of one command, from the sample pipeline to the report."""
    folder = tmp_path_factory.mktemp("adapters")
    arguments = [
        "--arch", "tiny-ip-adapter", "-e", "onnxruntime", "torch", "--height", "64", "-s", "2", "-c", "1",
        "--rounds", "1", "--ip_adapter_scale", "0", "0.8", "--run_multiple_resolutions", "-w", str(folder / "work"),
        "--csv", str(folder / "rows.csv"), "--json", str(folder / "rows.jsonl"), "--report", str(folder / "page.html"),
    ]  # fmt: skip
    source = pipelines.micro("tiny-ip-adapter")  # equal to the one that the command writes
    reusing = pipelines.reusing_components(source, [source / "ip_adapter" / ADAPTER_FILES[0]])
    with narrowed("tiny-ip-adapter"), reusing, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(interpreter(folder / "python")))  # of the engines
        status = main(["benchmark", *arguments])
    assert status == 0
    return folder


@pytest.mark.weekly
def test_each_scale_has_rows(measured: Path) -> None:
    rows = read_rows(measured / "rows.csv")
    assert [(row["ip_adapter_scale"], row["engine"]) for row in rows] == [
        ("0.0", "onnxruntime"), ("0.0", "torch"), ("0.8", "onnxruntime"), ("0.8", "torch"),
    ]  # fmt: skip
    # psnr_db is empty for identical images.
    assert all(float(row["differing"]) == 0 or float(row["psnr_db"]) > 60 for row in rows)
    # The count includes the image projection, which torch's UNet runs in each call.
    assert len({row["tflop_per_call"] for row in rows}) == 1
    page = (measured / "page.html").read_text()
    assert "adapter scale 0.8" in page


@pytest.mark.weekly
def test_scales_change_within_one_process(measured: Path) -> None:
    records = [json.loads(line) for line in (measured / "rows.jsonl").read_text().splitlines()]
    visited = [record["visited"] for record in records if record["benchmark"] == "resolutions"]
    assert len(visited) == 2
    for each in visited:
        assert [at["ip_adapter_scale"] for at in each][-3:] == list(SCALES)
        assert all(at["first_s"] > 0 for at in each)


def sample_folders(measured: Path) -> tuple[Path, Path, str]:
    work = measured / "work"
    adapter = work / "tiny-ip-adapter" / "ip_adapter" / "ip-adapter.safetensors"
    return work / "tiny-ip-adapter", work / "tiny-ip-adapter-optimized-cpu", str(adapter)


@pytest.mark.weekly
def test_engines_generate_equal_images(measured: Path, tmp_path: Path) -> None:
    source, optimized, adapter = sample_folders(measured)
    picture = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(3).integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(picture)
    ours = OnnxRuntimeEngine(EngineOptions(optimized, "cpu", adapters=(adapter,)))
    theirs = TorchEngine(EngineOptions(source, "cpu", adapters=(adapter,)))
    ours.load(WORKLOAD)
    theirs.load(WORKLOAD)
    images_by_prompt_image = []
    for workload in (WORKLOAD, replace(WORKLOAD, ip_adapter_image=str(picture))):
        images = [np.asarray(engine.generate("a fox", workload)[0]) / 255 for engine in (ours, theirs)]
        assert psnr(*images) > 50
        images_by_prompt_image.append(images[0])
    assert psnr(*images_by_prompt_image) < 40
    # A changed scale needs neither a capture nor another graph.
    stages = ours.stages("a fox", replace(WORKLOAD, ip_adapter_image=str(picture), ip_adapter_scale=0.1))
    assert stages.denoiser_calls == 3  # PNDM has one call more than steps
    picture.write_text("no image")
    with refused(FolderError, "cannot be read as an image"):
        ours.generate("a fox", replace(WORKLOAD, ip_adapter_image=str(picture)))


def test_rejects_an_adapter_without_its_image_encoder(measured: Path, tmp_path: Path) -> None:
    source, _, adapter = sample_folders(measured)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(adapter).read_bytes())
    engine = TorchEngine(EngineOptions(source, "cpu", adapters=(str(copy),)))
    with refused(FolderError, "diffusers cannot load", "copy.safetensors", "image_encoder in the same folder"):
        engine.load(WORKLOAD)


def test_rejects_folders_exported_with_other_adapters(measured: Path, micro_cpu: Path) -> None:
    _, optimized, adapter = sample_folders(measured)
    with refused(FolderError, "exported with ip-adapter", "none, the value of --ip_adapter"):
        OnnxRuntimeEngine(EngineOptions(optimized, "cpu"))
    with refused(FolderError, "exported with no adapter", "ip-adapter, the value of"):
        OnnxRuntimeEngine(EngineOptions(micro_cpu, "cpu", adapters=(adapter,)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ip_adapter_scale", "0.5"], "--ip_adapter as well"),
        (["--ip_adapter_image", "x.png"], "--ip_adapter as well"),
        (["--ip_adapter", "x.safetensors"], "a .safetensors file"),
        (["--ip_adapter", "PIPELINE"], "a .safetensors file, or a folder with one"),
        (["--ip_adapter", "ADAPTER", "--ip_adapter_scale", "nan"], "finite"),
        (["--ip_adapter", "ADAPTER", "--ip_adapter_image", "x.png"], "x.png cannot be read"),
    ],
)
def test_rejects_invalid_options(
    arguments: list[str], message: str, measured: Path, micro: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"PIPELINE": str(micro), "ADAPTER": sample_folders(measured)[2]}
    arguments = [named.get(each, each) for each in arguments]
    capsys.readouterr()
    assert main(["benchmark", "-p", str(micro), "-e", "torch", *arguments]) == 2
    assert message in capsys.readouterr().err
