"""The command: one for the whole comparison, and every way in which it can go wrong."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarking import SCRIPT, rows_of, run

from sdonnx.__main__ import main as sdonnx_main
from sdonnx.benchmark import command
from sdonnx.benchmark.command import FAILED, main
from sdonnx.benchmark.compare import Contest
from sdonnx.benchmark.engine import FolderKind
from sdonnx.benchmark.files import append_row
from sdonnx.benchmark.prepare import folders_of, label_of
from sdonnx.benchmark.results import Result, Round, Workload
from sdonnx.errors import OutputError
from sdonnx.sample import write_sample
from sdonnx.terminal import FAILURE, INTERRUPTED

SMALL = ("-r", "cpu", "--height", "64", "-s", "2", "-c", "2", "--rounds", "1", "--warmups", "1")


@pytest.fixture(scope="module")
def extras(
    tiny_cpu: Path, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """What is measured beside the rows."""
    folder = tmp_path_factory.mktemp("extras")
    done = run(
        folder, "-e", "onnxruntime", "torch", "-p", str(tiny_cpu), str(tiny_pipeline), *SMALL[:4], "-s", "3", "-c", "1",
        "--rounds", "1", "--warmups", "1", "--json", "result.jsonl", "--throughput", "--run_multiple_resolutions",
        "--profile",
    )  # fmt: skip
    return folder, done


def test_what_is_measured_beside_the_rows(extras: Any) -> None:
    folder, done = extras
    assert done.returncode == 0, done.stderr
    for line in ("time = a * steps + b", "stall, s", "device time of an image, ms"):
        assert line in done.stdout
    records = [json.loads(line) for line in (folder / "result.jsonl").read_text().splitlines()]
    kinds = [record["benchmark"] for record in records]
    assert kinds == ["pipeline"] * 2 + ["throughput"] * 2 + ["resolutions"] * 2 + ["kernels"] * 2
    for record in records[2:4]:
        assert [steps for steps, _ in record["points"]] == [1, 2, 3]
        assert record["line"]["slope"] > 0
    assert all(len(record["visited"]) == 6 for record in records[4:6])
    assert all(record["milliseconds"]["convolution"] > 0 for record in records[6:])


def test_the_script_runs_anywhere_without_torch(tiny_cpu: Path, tmp_path: Path) -> None:
    """The engine's process, too, must not need it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules.update(dict.fromkeys(['torch', 'diffusers', 'transformers']))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    arguments = [sys.executable, str(SCRIPT), "-p", str(tiny_cpu), *SMALL[:6], "-c", "1", "--skip_warmup"]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path / "benchmark_result.csv")
    assert row["engine"] == "onnxruntime"
    # Without a warm-up the first run is the timed one, and its memory is read all the same.
    assert row["warm_ups"] == "0"
    assert float(row["second_run_memory_MB"]) >= float(row["first_run_memory_MB"]) - 5 > 100
    assert row["psnr_db"] == row["ssim"] == ""


def test_rivals_of_one_kind_fail_by_themselves(
    tiny_cpu: Path, tiny_pipeline: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An engine whose package is missing, and one that dies, beside one that works: status 1, and a line each."""
    path = tmp_path / "result.csv"
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    status = main([
        "-e", "optimum", "torch", "onnxruntime", "-p", str(tiny_cpu), str(tiny_pipeline), *SMALL,
        "--python", f"torch={python}", "--csv", str(path), "-w", str(tmp_path / "work"),
    ])  # fmt: skip
    assert status == FAILED
    assert [row["engine"] for row in rows_of(path)] == ["onnxruntime"]
    errors = capfd.readouterr().err.splitlines()
    where = "64x64, batch 1, 2 steps"
    assert any(line.startswith(f"error: optimum, {where}: the engine optimum without ") for line in errors)
    assert f"error: torch, {where}: ended by SIGKILL, as processes are that use too much memory" in errors


def test_other_weights_are_found(tiny_cpu: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    write_sample("tiny", other, seed=7)
    arguments = ["-p", str(other), str(tiny_cpu), *SMALL, "--csv", str(tmp_path / "result.csv")]
    assert main(arguments) == FAILED
    (row,) = rows_of(tmp_path / "result.csv")
    assert "other images than the reference's" in row["remarks"]
    assert float(row["psnr_db"]) < 25
    captured = capfd.readouterr()
    assert "error: onnxruntime, 64x64, batch 1, 2 steps: other images than the reference's" in captured.err
    assert "not to be trusted" in captured.out


def test_what_was_measured_is_kept_when_interrupted(tiny_cpu: Path, tiny_exported: Path, tmp_path: Path) -> None:
    """Ctrl-C in the second of two workloads: the first is in the files, and so is what was complete of the second."""
    arguments = [
        sys.executable, str(SCRIPT), "-e", "onnxruntime", "onnxruntime-plain", "-p", str(tiny_cpu), str(tiny_exported),
        *SMALL[:6], "-b", "1", "2", "-c", "2", "--rounds", "1", "--skip_warmup", "--report", "report.html",
    ]  # fmt: skip
    process = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    starts = 0
    for line in process.stdout:
        starts += line.rstrip().endswith(": starts")
        if starts == 4:
            process.send_signal(signal.SIGINT)
            break
    out, errors = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, errors
    assert "interrupted; what was measured is kept" in out
    rows = rows_of(tmp_path / "benchmark_result.csv")
    assert [row["batch_size"] for row in rows] == ["1", "1", "2"]
    assert (tmp_path / "report.html").stat().st_size > 10_000


# Errors


class Failed:
    """A command that must fail with one line, before it has measured or written anything."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys, self.folder = capsys, folder

    def __call__(self, *arguments: str) -> str:
        before = sorted(self.folder.iterdir())
        assert main([*arguments, "--csv", str(self.folder / "result.csv")]) == FAILURE
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
        (["-e", "tensorrt"], "the engine 'tensorrt' is unknown; expected one of onnxruntime, onnxruntime-plain, torch"),
        (["-r", "rocm"], "the provider 'rocm' is unknown; expected one of cuda, cpu"),
        (["-b", "1", "0"], "--batch_size is 0; expected 1 to"),
        (["-s", "1001"], "--steps is 1001; expected 1 to 1000"),
        (["-c", "-1"], "--batch_count is -1"),
        (["-n", "11"], "--num_prompts is 11; expected 1 to 10"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--warmups", "-1"], "--warmups is -1"),
        (["--warmups", "2", "--skip-warmup"], "--skip_warmup and --warmups; expected one of them"),
        (["--seed", str(2**64)], "--seed is 18446744073709551616"),
        (["--height", "64", "100"], "--height is 100; expected a multiple of 8"),
        (["--width", "0"], "--width is 0"),
        (["--height", "64", "72", "--width", "64"], "2 heights and 1 widths"),
        (["--strength", "0"], "--strength is 0.0"),
        (["--input-image", "nowhere.png"], "nowhere.png is no file"),
        (["--timeout", "0"], "--timeout is 0.0"),
        (["--timeout", "1e11"], "--timeout is 100000000000.0"),
        (["--guidance_scale", "nan"], "--guidance_scale is nan"),
        (["--scheduler", "nosuch"], "nosuch"),
        (["--output-image", "x.docx"], "--output_image x.docx; expected a name such as x.png"),
        (["--input-image", __file__], "cannot be read"),
        (["--throughput", "-s", "1"], "--throughput with one step"),
        (["--python", "venv/bin/python"], "--python venv/bin/python; expected ENGINE=PYTHON"),
        (["--python", "rocm=python"], "--python rocm=python"),
        (["--enable_safety_checker", "-e", "torch"], "has no safety checker"),
        (["--compile_mode", "default"], "--compile_mode without --enable_torch_compile"),
        (["--enable_torch_compile"], "--enable_torch_compile without the engine torch"),
        (["-e", "torch", "--use-xformers", "-r", "cpu"], "--use_xformers without xformers"),
        (["-e", "torch", "--enable_torch_compile", "--compile_mode", "x"], "expected one of default, reduce-overhead"),
        (["--json", "nowhere/result.jsonl"], "nowhere is no folder"),
        (["--report", "nowhere/report.html"], "nowhere is no folder"),
        (["--arch", "tiny"], "--arch and "),
    ],
)
def test_unusable_options(arguments: list[str], message: str, failed: Failed, tiny_pipeline: Path) -> None:
    assert message in failed("-p", str(tiny_pipeline), *arguments)


def test_neither_folder_nor_sample(failed: Failed) -> None:
    assert "no pipeline; expected -p FOLDER or --arch NAME" in failed()


def test_missing_folder(failed: Failed) -> None:
    assert "nowhere does not exist" in failed("-p", "nowhere")


def test_unknown_sample(failed: Failed) -> None:
    assert "sd99" in failed("--arch", "sd99", "-e", "torch", "-w", str(failed.folder))


def test_two_folders_of_one_kind(failed: Failed, tiny_cpu: Path) -> None:
    copy = failed.folder / "copy"
    shutil.copytree(tiny_cpu, copy, copy_function=os.link)
    assert f"{tiny_cpu} and {copy} are both an optimized pipeline" in failed("-p", str(tiny_cpu), str(copy))


def test_other_columns_are_found_before_measuring(failed: Failed, tiny_cpu: Path) -> None:
    (failed.folder / "result.csv").write_text("engine,version\n")
    assert "result.csv has the columns 'engine, version'; expected engine" in failed("-p", str(tiny_cpu), *SMALL)


def test_an_engine_without_its_folder(failed: Failed, tiny_cpu: Path) -> None:
    message = failed("-e", "torch", "-p", str(tiny_cpu), "-r", "cpu")
    assert f"{tiny_cpu} is an optimized pipeline; expected a diffusers pipeline for the engine torch" in message


def test_no_gpu(failed: Failed, tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdonnx.benchmark.memory.first_gpu", lambda: None)
    assert "CUDA finds no GPU" in failed("-r", "cuda", "-p", str(tiny_pipeline))


@pytest.mark.parametrize("module", ["skimage", "psutil"])
def test_missing_packages(module: str, failed: Failed, tiny_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "is_there", lambda name: name != module)
    message = failed("-p", str(tiny_cpu))
    assert f"{module} missing" in message
    assert "pip install 'sdonnx[benchmark]'" in message


def test_nothing_measured_is_an_error(tiny_cpu: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (broken := tmp_path / "broken").mkdir()
    shutil.copytree(tiny_cpu, broken, dirs_exist_ok=True, copy_function=os.link)
    (broken / "unet" / "step.onnx").unlink()
    path = tmp_path / "result.csv"
    assert main(["-p", str(broken), *SMALL, "--csv", str(path)]) == FAILURE
    captured = capfd.readouterr()
    assert "error: onnxruntime, 64x64" in captured.err
    assert "appended" not in captured.out
    assert not path.exists()


def test_a_result_is_shown_where_it_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tiny_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result("onnxruntime", Workload(1, 64, 64, 2), {"name": "onnxruntime", "provider": "cpu", "precision": "a"})
    result.engine |= {"xformers": False, "safety_checker": False, "scheduler": "b", "io_binding": False, "version": "1"}
    result.rounds.append(Round(1.0, (), (0.125,), (2**20,), "known"))

    def race(self: Contest) -> None:
        self._comparison.results.append(result)
        self._keep(result)

    def full(*_: Any) -> None:
        raise OutputError("writing failed (No space left on device)", "space", "free some")

    monkeypatch.setattr(Contest, "run", race)
    monkeypatch.setattr(command, "append_row", full)
    assert main(["-p", str(tiny_cpu), *SMALL, "--csv", str(tmp_path / "result.csv")]) == FAILURE
    captured = capsys.readouterr()
    assert "0.1250" in captured.out
    assert captured.err == "error: writing failed (No space left on device); expected space; free some\n"
    assert append_row is not full


def test_an_interruption_while_folders_are_made(tiny_pipeline: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-u", str(SCRIPT), "-p", str(tiny_pipeline), *SMALL, "-w", "work"]
    process = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "export in float32" in process.stdout.readline()
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED
    assert "interrupted; nothing was measured yet" in errors
    assert not (tmp_path / "work").exists() or not any((tmp_path / "work").iterdir())


def test_an_interruption_while_the_report_is_written(
    tiny_cpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sdonnx.benchmark.report.write_report", interrupt)
    monkeypatch.setattr(Contest, "run", lambda self: None)
    path = tmp_path / "result.csv"
    arguments = ["-p", str(tiny_cpu), *SMALL, "--csv", str(path), "--report", str(tmp_path / "report.html")]
    assert main(arguments) == INTERRUPTED
    assert "interrupted while writing; the rows are in" in capsys.readouterr().err


def test_folders_are_told_apart(tiny_pipeline: Path, tiny_exported: Path, tiny_cpu: Path) -> None:
    folders = folders_of([tiny_cpu, tiny_exported, tiny_pipeline])
    assert folders == {
        FolderKind.OPTIMIZED: tiny_cpu,
        FolderKind.EXPORTED: tiny_exported,
        FolderKind.DIFFUSERS: tiny_pipeline,
    }
    # The model is called as its source is.
    assert label_of(folders, None) == tiny_pipeline.name
    assert label_of({FolderKind.OPTIMIZED: tiny_cpu}, None) == tiny_cpu.name
    assert label_of({}, "sd15") == "sd15"


def test_every_name_is_spelled_both_ways(tiny_cpu: Path, tmp_path: Path) -> None:
    """Options of ONNX Runtime's and OneDiff's scripts, as they are written there."""
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    ort = "-e torch -r cuda -v 1.5 -p a -w b -b 2 --height 64 --width 64 -s 20 -n 2 -c 3 --enable_safety_checker"
    ort += " --enable_torch_compile --use_xformers --use_io_binding --skip_warmup -g"
    theirs = parser.parse_args(shlex.split(ort))
    assert (theirs.pipeline, theirs.batch_size, theirs.enable_cuda_graph) == ([Path("a")], [2], True)
    onediff = "--model a --prompt fox --negative-prompt blurred --seed 3 --warmups 2 --batch 4 --output-image o.png"
    onediff += " --print-output --throughput --run_multiple_resolutions --scheduler euler --input-image i.png"
    onediffs = parser.parse_args(shlex.split(onediff))
    assert (onediffs.pipeline, onediffs.batch_size) == ([Path("a")], [4])
    assert (onediffs.negative_prompt, onediffs.input_image, onediffs.print_output) == ("blurred", "i.png", True)


def test_command_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert sdonnx_main(["benchmark", "-p", "nowhere"]) == FAILURE
    assert "nowhere does not exist" in capsys.readouterr().err
