"""The benchmark with IP-Adapters: the same images from every engine, a row for each weight, weights that change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarking import rows_of
from PIL import Image
from pipelines import refused

from sdonnx.benchmark.command import main
from sdonnx.benchmark.engine import EngineOptions
from sdonnx.benchmark.engines import ENGINES, OnnxRuntimeEngine, TorchEngine
from sdonnx.benchmark.measure import SCALES
from sdonnx.benchmark.results import Workload
from sdonnx.errors import FolderError, OptionError
from sdonnx.parity import psnr

WORKLOAD = Workload(1, 64, 64, 2, ip_adapter_scale=0.6)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One command, from nothing to the page."""
    folder = tmp_path_factory.mktemp("adapters")
    status = main([
        "--arch", "tiny-ip-adapter", "-e", "onnxruntime", "torch", "--height", "64", "-s", "2", "-c", "2",
        "--rounds", "1", "--ip_adapter_scale", "0", "0.8", "--run_multiple_resolutions", "-w", str(folder / "work"),
        "--csv", str(folder / "rows.csv"), "--json", str(folder / "rows.jsonl"), "--report", str(folder / "page.html"),
    ])  # fmt: skip
    assert status == 0
    return folder


def test_each_weight_has_its_rows(measured: Path) -> None:
    rows = rows_of(measured / "rows.csv")
    assert [(row["ip_adapter_scale"], row["engine"]) for row in rows] == [
        ("0.0", "onnxruntime"), ("0.0", "torch"), ("0.8", "onnxruntime"), ("0.8", "torch"),
    ]  # fmt: skip
    # psnr_db is empty where pixels are the same.
    assert all(float(row["differing"]) == 0 or float(row["psnr_db"]) > 60 for row in rows)
    # torch's UNet projects images at each call, which counts.
    assert len({row["tflop_per_call"] for row in rows}) == 1
    page = (measured / "page.html").read_text()
    assert "IP-Adapter 0.8" in page


def test_weights_are_changed_in_one_process(measured: Path) -> None:
    records = [json.loads(line) for line in (measured / "rows.jsonl").read_text().splitlines()]
    visited = [record["visited"] for record in records if record["benchmark"] == "resolutions"]
    assert len(visited) == 2
    for each in visited:
        assert [at["ip_adapter_scale"] for at in each][-3:] == list(SCALES)
        assert all(at["first_s"] > 0 for at in each)


def folders_of(measured: Path) -> tuple[Path, Path, str]:
    work = measured / "work"
    adapter = work / "tiny-ip-adapter" / "ip_adapter" / "ip-adapter.safetensors"
    return work / "tiny-ip-adapter", work / "tiny-ip-adapter-optimized-cpu", str(adapter)


def test_engines_draw_the_same(measured: Path, tmp_path: Path) -> None:
    source, optimized, adapter = folders_of(measured)
    picture = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(3).integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(picture)
    ours = OnnxRuntimeEngine(EngineOptions(optimized, "cpu", ip_adapters=(adapter,)))
    theirs = TorchEngine(EngineOptions(source, "cpu", ip_adapters=(adapter,)))
    ours.load(WORKLOAD)
    theirs.load(WORKLOAD)
    drawn = []
    for workload in (WORKLOAD, replace(WORKLOAD, ip_adapter_image=str(picture))):
        images = [np.asarray(engine.draw("a fox", workload)[0]) / 255 for engine in (ours, theirs)]
        assert psnr(*images) > 50
        drawn.append(images[0])
    assert psnr(*drawn) < 40
    # A weight costs neither a capture nor another graph: the steps are all that runs.
    stages = ours.stages("a fox", replace(WORKLOAD, ip_adapter_image=str(picture), ip_adapter_scale=0.1))
    assert stages.denoiser_calls == 3  # PNDM calls once more than there are steps
    picture.write_text("no image")
    with refused(FolderError, "cannot be read as an image"):
        ours.draw("a fox", replace(WORKLOAD, ip_adapter_image=str(picture)))


@pytest.mark.parametrize("name", ["onnxruntime-plain", "optimum"])
def test_engines_that_know_no_adapters(name: str, measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimized, adapter = folders_of(measured)
    monkeypatch.setattr(ENGINES[name], "require_packages", lambda *_, **__: None)
    with refused(OptionError, f"--ip_adapter for the engine {name}"):
        ENGINES[name](EngineOptions(optimized, "cpu", ip_adapters=(adapter,)))


def test_an_adapter_that_diffusers_cannot_load(measured: Path, tmp_path: Path) -> None:
    source, _, adapter = folders_of(measured)
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(Path(adapter).read_bytes())  # without its image encoder
    engine = TorchEngine(EngineOptions(source, "cpu", ip_adapters=(str(alone),)))
    with refused(FolderError, "diffusers cannot load", "alone.safetensors", "image_encoder beside"):
        engine.load(WORKLOAD)


def test_nothing_is_made_for_engines_that_know_no_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "work"
    assert main(["--arch", "tiny-ip-adapter", "-e", "onnxruntime-plain", "-w", str(work)]) == 2
    assert "--arch tiny-ip-adapter for the engine onnxruntime-plain" in capsys.readouterr().err
    assert not work.exists()


def test_folders_and_adapters_must_be_of_one_kind(measured: Path, tiny_cpu: Path) -> None:
    _, optimized, adapter = folders_of(measured)
    with refused(FolderError, "exported with ip-adapter", "none, as --ip_adapter says"):
        OnnxRuntimeEngine(EngineOptions(optimized, "cpu"))
    with refused(FolderError, "exported with no IP-Adapter", "ip-adapter, as"):
        OnnxRuntimeEngine(EngineOptions(tiny_cpu, "cpu", ip_adapters=(adapter,)))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ip_adapter_scale", "0.5"], "--ip_adapter too"),
        (["--ip_adapter_image", "x.png"], "--ip_adapter too"),
        (["--ip_adapter", "x.safetensors"], "a .safetensors file"),
        (["--ip_adapter", "PIPELINE"], "a .safetensors file, or a folder with one"),
        (["--ip_adapter", "ADAPTER", "--ip_adapter_scale", "nan"], "finite"),
        (["--ip_adapter", "ADAPTER", "--ip_adapter_image", "x.png"], "x.png cannot be read"),
    ],
)
def test_options_that_cannot_be_used(
    arguments: list[str], told: str, measured: Path, tiny_pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"PIPELINE": str(tiny_pipeline), "ADAPTER": folders_of(measured)[2]}
    arguments = [named.get(each, each) for each in arguments]
    capsys.readouterr()
    assert main(["-p", str(tiny_pipeline), "-e", "torch", *arguments]) == 2
    assert told in capsys.readouterr().err
