"""The benchmark's rows and records, its arithmetic, and that its engines draw the same."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import mmap
import platform
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pynvml
import pytest
import torch
from PIL.Image import Image

from sdonnx.__main__ import main as sdonnx_main
from sdonnx.benchmark import main
from sdonnx.benchmark.engine import EngineOptions, Workload
from sdonnx.benchmark.engines import OnnxRuntimeEngine, TorchEngine
from sdonnx.benchmark.measure import PROMPTS, Measurement, measure_engine
from sdonnx.benchmark.memory import GpuMemory, PeakMemory, ResidentMemory, first_gpu, memory_source, open_gpu
from sdonnx.benchmark.record import append_row, commit_of
from sdonnx.errors import OutputError
from sdonnx.parity import psnr

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "benchmark.py"

HEADER = (
    "engine,version,provider,disable_safety_checker,height,width,steps,batch_size,batch_count,num_prompts,"
    "average_latency,median_latency,first_run_memory_MB,second_run_memory_MB"
)

SMALL = ("-r", "cpu", "--height", "64", "--width", "64", "-s", "2")
SMALL_WORKLOAD = Workload(batch_size=2, height=64, width=64, steps=3, seed=5)


# Rows and records


class Results:
    """What both engines appended to one pair of files: 2 prompts, 2 batches of each."""

    def __init__(self, folder: Path, tiny_pipeline: Path, tiny_cpu: Path) -> None:
        self.csv, self.json = folder / "result.csv", folder / "result.jsonl"
        self.folders = {"onnxruntime": tiny_cpu, "torch": tiny_pipeline}
        for engine, pipeline in self.folders.items():
            command = [
                "-e",
                engine,
                "-p",
                str(pipeline),
                "-v",
                "2.1",
                *SMALL,
                "-n",
                "2",
                "-c",
                "2",
                "-b",
                "2",
            ]
            assert main([*command, "--csv", str(self.csv), "--json", str(self.json)]) == 0
        self.rows = list(csv.DictReader(self.csv.read_text().splitlines()))
        self.records = [json.loads(line) for line in self.json.read_text().splitlines()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tiny_pipeline: Path, tiny_cpu: Path) -> Results:
    return Results(tmp_path_factory.mktemp("benchmark"), tiny_pipeline, tiny_cpu)


def test_engines_append_to_one_file_under_one_header(results: Results) -> None:
    lines = results.csv.read_text().splitlines()
    assert lines[0] == HEADER
    assert [line.split(",")[0] for line in lines[1:]] == ["onnxruntime", "torch"]


def test_rows_say_what_was_asked_for(results: Results) -> None:
    for row in results.rows:
        assert row["version"] == "2.1"
        assert row["provider"] == "cpu"
        assert row["disable_safety_checker"] == "True"
        assert [row[name] for name in ("height", "width", "steps")] == ["64", "64", "2"]
        assert [row[name] for name in ("batch_size", "batch_count", "num_prompts")] == ["2", "2", "2"]


def test_latencies_are_those_of_each_batch(results: Results) -> None:
    for row, record in zip(results.rows, results.records, strict=True):
        latencies = record["measured"]["latencies_s"]
        assert len(latencies) == 4
        assert 0 < min(latencies) <= max(latencies) < 60
        assert float(row["average_latency"]) == pytest.approx(np.mean(latencies), abs=1e-6)
        assert float(row["median_latency"]) == pytest.approx(np.median(latencies), abs=1e-6)


def test_memory_is_the_peak_of_the_runs(results: Results) -> None:
    for row, record in zip(results.rows, results.records, strict=True):
        peaks = record["measured"]["peak_bytes"]
        warm_ups = len(record["measured"]["warm_up_s"])
        assert len(peaks) == warm_ups + 4
        assert float(row["first_run_memory_MB"]) == pytest.approx(peaks[0] / 2**20, abs=0.05)
        assert float(row["second_run_memory_MB"]) == pytest.approx(max(peaks[warm_ups:]) / 2**20, abs=0.05)
        # The weights alone are 100 MB and more.
        assert 100 * 2**20 < min(peaks) <= max(peaks) < psutil.virtual_memory().total


def test_record_is_complete(results: Results) -> None:
    for engine, row, record in zip(results.folders, results.rows, results.records, strict=True):
        assert {name: str(value) for name, value in record["row"].items()} == row
        assert record["command"]
        assert record["engine"] == {
            "name": engine,
            "version": importlib.metadata.version(engine),
            "device": "cpu",
            "precision": "float32",
            "compile_mode": None,
            "scheduler": "PNDMScheduler",
            "folder": str(results.folders[engine]),
            "family": "stable-diffusion",
        }
        assert record["workload"]["prompts"] == list(PROMPTS[:2])
        assert record["workload"]["seed"] == 0
        measured = record["measured"]
        assert measured["memory_kind"] == "resident memory of the process"
        assert measured["first_image_s"] == pytest.approx(measured["load_s"] + measured["warm_up_s"][0])
        assert len(measured["warm_up_s"]) == 3


def test_environment_names_versions_and_machine(results: Results) -> None:
    environment = results.records[0]["environment"]
    versions = environment["packages"]
    assert versions["python"] == platform.python_version()
    for name in ("torch", "diffusers", "onnxruntime", "numpy", "transformers"):
        assert versions[name] == importlib.metadata.version(name)
    assert versions["sdonnx"]
    assert environment["machine"]["cpu"]
    assert environment["machine"]["cpus"] == len(psutil.Process().cpu_affinity())


def test_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert commit_of(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert commit_of(tmp_path) == {"commit": head, "changed": False}
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == {"commit": head, "changed": True}


def test_script_runs_anywhere_without_torch(tiny_cpu: Path, tmp_path: Path) -> None:
    arguments = ["benchmark.py", "-p", str(tiny_cpu), *SMALL[2:], "-c", "1", "--skip_warmup"]
    code = (
        "import runpy, sys; sys.modules.update(dict.fromkeys(['torch', 'diffusers', 'transformers']));"
        f"sys.argv = {arguments!r}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "benchmark_result.csv").read_text().splitlines()))
    assert [row["engine"] for row in rows] == ["onnxruntime"]
    # Without a warm-up the first run is the timed one.
    assert rows[0]["first_run_memory_MB"] == rows[0]["second_run_memory_MB"]
    assert rows[0]["average_latency"] in done.stdout


# Engines


class Drawn:
    """Images of one workload by both engines, and how often torch's denoiser really ran."""

    def __init__(self, tiny_pipeline: Path, tiny_cpu: Path) -> None:
        self.ours = OnnxRuntimeEngine(EngineOptions(tiny_cpu))
        self.torch = TorchEngine(EngineOptions(tiny_pipeline, "cpu"))
        self.ours.load()
        self.torch.load()
        self.calls = 0

        def count(*_: Any) -> None:
            self.calls += 1

        hook = self.torch._pipeline.unet.register_forward_hook(count)
        self.theirs = pixels(self.torch.draw(PROMPTS[0], SMALL_WORKLOAD))
        hook.remove()


@pytest.fixture(scope="module")
def drawn(tiny_pipeline: Path, tiny_cpu: Path) -> Drawn:
    return Drawn(tiny_pipeline, tiny_cpu)


def pixels(images: list[Image]) -> npt.NDArray[np.float32]:
    """(B,H,W,3) from 0 to 1."""
    return np.stack([np.asarray(image, np.float32) / 255 for image in images])


def test_engines_draw_the_same(drawn: Drawn) -> None:
    ours = pixels(drawn.ours.draw(PROMPTS[0], SMALL_WORKLOAD))
    assert ours.shape == (2, 64, 64, 3)
    assert psnr(ours, drawn.theirs) >= 50
    assert psnr(pixels(drawn.ours.draw(PROMPTS[1], SMALL_WORKLOAD)), drawn.theirs) < 40


def test_engines_call_the_denoiser_equally_often(drawn: Drawn) -> None:
    assert drawn.calls == 4  # PNDM: one call more than its 3 steps
    assert drawn.torch.denoiser_calls(3) == drawn.calls
    assert drawn.ours.denoiser_calls(3) == drawn.calls


def test_default_provider_is_what_the_folder_is_for(drawn: Drawn) -> None:
    assert drawn.ours.device == drawn.ours.provider == "cpu"


def test_compiling_is_set_up_as_documented(drawn: Drawn, tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that changes nothing, the set-up must change nothing of the images."""
    compiled: list[tuple[str, dict[str, Any]]] = []

    def compiler(target: Any, **options: Any) -> Any:
        compiled.append((getattr(target, "__name__", type(target).__name__), options))
        return target

    monkeypatch.setattr(torch, "compile", compiler)
    engine = TorchEngine(EngineOptions(tiny_pipeline, "cpu", "max-autotune"))
    engine.load()
    options = {"mode": "max-autotune", "fullgraph": True}
    assert compiled == [("UNet2DConditionModel", options), ("decode", options)]
    unet = engine._pipeline.unet
    assert unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert unet.mid_block.attentions[0].transformer_blocks[0].attn1.fused_projections
    assert engine.provider == "cpu compile max-autotune"
    assert psnr(pixels(engine.draw(PROMPTS[0], SMALL_WORKLOAD)), drawn.theirs) >= 50


# Measuring


def test_runs_and_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    # Load takes 4 s, then runs of 3, 1 and 2 s.
    clock: Iterator[float] = iter([10, 14, 20, 23, 30, 31, 40, 42])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    engine: Any = types.SimpleNamespace(
        name="known",
        device="cpu",
        load=lambda: drawn.append("load"),
        draw=lambda prompt, workload: drawn.append(prompt),
        denoiser_calls=lambda steps: steps + 1,
    )
    told: list[str] = []
    measured = measure_engine(engine, SMALL_WORKLOAD, ["a"], 2, warm_ups=1, told=told.append)
    assert drawn == ["load", "warm up", "a", "a"]
    assert (measured.load_s, measured.warm_up_s, measured.latencies_s) == (4, (3,), (1, 2))
    assert measured.first_image_s == 7
    assert measured.denoiser_calls == 4
    assert told == [
        "known: loaded in 4.00 s",
        "known: warm-up 1 of 1: 3.000 s",
        "known: run 1 of 2: 1.000 s",
        "known: run 2 of 2: 2.000 s",
    ]


def test_statistics_of_a_measurement() -> None:
    measured = Measurement(1.0, (9.0, 8.0), (1.0, 2.0, 6.0), (70, 90, 40, 50, 45), "known", 4)
    assert (measured.average_s, measured.median_s, measured.first_image_s) == (3, 2, 10)
    assert (measured.first_run_bytes, measured.second_run_bytes) == (70, 50)
    skipped = Measurement(1.0, (), (2.0, 3.0), (70, 60), "known", 4)
    assert (skipped.first_image_s, skipped.first_run_bytes, skipped.second_run_bytes) == (3, 70, 70)


def test_peak_sees_memory_that_is_given_back() -> None:
    source, size = ResidentMemory(), 128 * 2**20
    before = source.bytes_used()
    with PeakMemory(source, interval_s=0.001) as memory, mmap.mmap(-1, size) as block:
        block[:] = bytes([1]) * size
        deadline = time.monotonic() + 10
        while memory.peak_bytes < before + size // 2 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert memory.peak_bytes > before + size // 2
    assert source.bytes_used() < memory.peak_bytes - size // 2


class Nvml:
    """What NVML would say, in place of the driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.processes = 1000, [types.SimpleNamespace(pid=1, usedGpuMemory=600)]
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda gpu: types.SimpleNamespace(used=self.used))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda gpu: self.processes)


def test_gpu_memory_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(monkeypatch)
    memory = GpuMemory("gpu")
    assert memory.bytes_used() == 0
    nvml.used = 5000
    nvml.processes.append(types.SimpleNamespace(pid=psutil.Process().pid, usedGpuMemory=3000))
    assert memory.bytes_used() == 3000
    assert memory.kind == "NVML, this process"


@pytest.mark.parametrize("hidden", ["absent", "without a figure"])
def test_gpu_memory_without_figures_of_processes(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(monkeypatch)
    memory = GpuMemory("gpu")
    nvml.used = 5000
    if hidden == "without a figure":
        nvml.processes.append(types.SimpleNamespace(pid=psutil.Process().pid, usedGpuMemory=None))
    assert memory.bytes_used() == 4000
    nvml.used = 900  # another process has given memory back
    assert memory.bytes_used() == 0
    assert memory.kind == "NVML, growth of the whole GPU's"


@pytest.mark.gpu
def test_gpu_memory_on_a_gpu() -> None:
    source = memory_source("cuda")
    before = source.bytes_used()
    block = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    assert source.bytes_used() - before >= block.nbytes
    assert first_gpu() == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert pynvml.nvmlDeviceGetName(open_gpu()) == torch.cuda.get_device_name(0)


# Files


def row() -> dict[str, str | int | float | bool]:
    return dict.fromkeys(HEADER.split(","), 1)


@pytest.mark.parametrize("content", ["", f"{HEADER}\n", f"{HEADER}\n1,2", f"{HEADER}\r\n"])
def test_row_goes_on_a_line_of_its_own(content: str, tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    path.write_bytes(content.encode())
    append_row(path, row())
    lines = path.read_text().splitlines()
    assert lines.count(HEADER) == 1
    assert lines[0] == HEADER
    assert lines[-1] == ",".join(["1"] * 14)


@pytest.mark.parametrize("content", ["engine,version\n1,2\n", f"model_name,{HEADER}\n", f"\n{HEADER}\n", "\x00\n"])
def test_file_with_other_columns_is_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    path.write_text(content)
    with pytest.raises(OutputError, match="choose another file with --csv"):
        append_row(path, row())
    assert path.read_text() == content


# Errors


class Failed:
    """A command that must fail with one line, before it has measured or written anything."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys, self.folder = capsys, folder

    def __call__(self, *arguments: str) -> str:
        before = sorted(self.folder.iterdir())
        assert main([*arguments, "--csv", str(self.folder / "result.csv")]) == 2
        captured = self.capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert sorted(self.folder.iterdir()) == before
        return captured.err


@pytest.fixture
def failed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Failed:
    return Failed(capsys, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-e", "tensorrt"], "the engine 'tensorrt' is unknown; expected one of onnxruntime, torch"),
        (["-r", "rocm"], "the provider 'rocm' is unknown; expected one of cuda, cpu"),
        (["-v", "3"], "the version '3' is unknown"),
        (["-b", "0"], "--batch_size is 0; expected 1 to"),
        (["-s", "1001"], "--steps is 1001; expected 1 to 1000"),
        (["-c", "-1"], "--batch_count is -1"),
        (["-n", "11"], "--num_prompts is 11; expected 1 to 10"),
        (["--seed", str(2**64)], "--seed is 18446744073709551616"),
        (["--height", "100"], "--height is 100; expected a multiple of 8"),
        (["--width", "0"], "--width is 0"),
        (["--enable_safety_checker"], "leave the option out"),
        (["--compile_mode", "default"], "--compile_mode without --enable_torch_compile"),
        (["--enable_torch_compile"], "the compile mode 'reduce-overhead' for the engine onnxruntime"),
        (
            ["-e", "torch", "--enable_torch_compile", "--compile_mode", "x"],
            "expected one of default, reduce-ov",
        ),
        (["--json", "nowhere/result.jsonl"], "nowhere is no folder"),
    ],
)
def test_unusable_options(arguments: list[str], message: str, failed: Failed, tiny_pipeline: Path) -> None:
    assert message in failed("-p", str(tiny_pipeline), *arguments)


def test_missing_folder(failed: Failed) -> None:
    assert "nowhere does not exist" in failed("-p", "nowhere")


def test_other_columns_are_found_before_measuring(failed: Failed, tiny_cpu: Path) -> None:
    (failed.folder / "result.csv").write_text("engine,version\n")
    assert "result.csv has the columns engine, version; expected engine" in failed("-p", str(tiny_cpu), *SMALL)


def test_diffusers_folder_for_onnxruntime(failed: Failed, tiny_pipeline: Path) -> None:
    message = failed("-p", str(tiny_pipeline))
    assert "is a diffusers pipeline; expected an optimized pipeline for the engine onnxruntime" in message


def test_exported_folder_for_either_engine(failed: Failed, tiny_pipeline: Path) -> None:
    exported = failed.folder / "exported"
    (exported / "unet").mkdir(parents=True)
    (exported / "unet" / "model.onnx").touch()
    shutil.copy(tiny_pipeline / "model_index.json", exported)
    assert "is an exported pipeline, not optimized" in failed("-p", str(exported))
    assert "expected a diffusers pipeline for the engine torch" in failed("-e", "torch", "-p", str(exported))


def test_optimized_folder_for_torch(failed: Failed, tiny_cpu: Path) -> None:
    assert "is an ONNX pipeline; expected a diffusers pipeline" in failed("-e", "torch", "-p", str(tiny_cpu))


def test_folder_for_another_provider(failed: Failed, tiny_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdonnx.benchmark.memory.first_gpu", lambda: None)
    assert "CUDA finds no GPU" in failed("-r", "cuda", "-p", str(tiny_cpu))


def test_incomplete_diffusers_folder(failed: Failed, tiny_pipeline: Path) -> None:
    broken = failed.folder / "broken"
    shutil.copytree(tiny_pipeline, broken, ignore=shutil.ignore_patterns("diffusion_pytorch_model.safetensors"))
    assert f"diffusers cannot load {broken}" in failed("-e", "torch", "-r", "cpu", "-p", str(broken))


def test_missing_package(failed: Failed, tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchEngine, "modules", ("torch", "no_such_package"))
    message = failed("-e", "torch", "-p", str(tiny_pipeline))
    assert "the engine torch without no_such_package" in message
    assert "pip install 'sdonnx[export]'" in message


def test_result_is_shown_where_it_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tiny_cpu: Path, tmp_path: Path
) -> None:
    path = tmp_path / "result.csv"

    def fill(*_: Any) -> None:
        raise OutputError("writing failed (No space left on device)", "space", "free some")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdonnx.benchmark.append_row", fill)
        assert main(["-p", str(tiny_cpu), *SMALL, "-c", "1", "--skip_warmup", "--csv", str(path)]) == 2
    captured = capsys.readouterr()
    assert "average_latency" in captured.out
    assert captured.err == "error: writing failed (No space left on device); expected space; free some\n"


def test_command_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert sdonnx_main(["benchmark", "-p", "nowhere"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
