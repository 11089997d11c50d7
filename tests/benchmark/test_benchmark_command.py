"""The benchmark command and its errors."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.benchmarking import SCRIPT, read_rows
from support.logged_lines import logged_lines
from support.micro import write_micro
from support.preloaded import interpreter, python
from support.small_modules import small_unet

import sdonnx
from sdonnx.__main__ import main as sdonnx_main
from sdonnx.benchmark.compare import ComparisonRun
from sdonnx.benchmark.files import append_row
from sdonnx.benchmark.results import Result, Round
from sdonnx.benchmark.rivals import parse_rivals
from sdonnx.cli import benchmark as command
from sdonnx.cli.benchmark import FAILED
from sdonnx.cli.benchmark_options import compiled_types
from sdonnx.cli.command_line import CommandParser
from sdonnx.cli.quantization_options import quantization_config
from sdonnx.compiler.compile_options import check_options
from sdonnx.errors import OutputError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.installation import install_command
from sdonnx.reference.optimized_pipeline import reported_precision
from sdonnx.reference.workload import Workload
from sdonnx.terminal import FAILURE, INTERRUPTED, TERMINATED


def main(arguments: Sequence[str]) -> int:
    return sdonnx_main(["benchmark", *arguments])


LAB = Path(__file__).parents[2] / "lab"
PLAIN = f"{LAB}/plain_engine.py:onnxruntime-plain"
SMALL = ("-r", "cpu", "--height", "64", "-s", "2", "-c", "2", "--rounds", "1", "--warmups", "1")


@pytest.fixture
def preloaded_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start in processes that have torch imported already."""
    monkeypatch.setattr(sys, "executable", str(interpreter(tmp_path / "preloaded")))


def test_script_runs_in_any_folder_without_torch(micro_cpu: Path, tmp_path: Path) -> None:
    """The engine's process does not need torch either."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules.update(dict.fromkeys(['torch', 'diffusers', 'transformers']))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    arguments = [sys.executable, str(SCRIPT), "-p", str(micro_cpu), *SMALL[:6], "-c", "1", "--skip_warmup"]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = read_rows(tmp_path / "benchmark_result.csv")
    assert row["engine"] == "onnxruntime"
    # Without a warm-up the first timed run is monitored.
    assert row["warm_ups"] == "0"
    assert float(row["second_run_memory_MB"]) >= float(row["first_run_memory_MB"]) - 5 > 100
    assert row["psnr_db"] == row["ssim"] == ""


@pytest.mark.usefixtures("preloaded_engines")
def test_failed_engines_do_not_stop_the_others(
    micro_cpu: Path, micro: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An engine with a missing package and an engine that is killed each print one line; the status is 1."""
    path = tmp_path / "result.csv"
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    status = main([
        "-e", f"{LAB}/optimum_engine.py:optimum", "torch", "onnxruntime", "-p", str(micro_cpu), str(micro), *SMALL,
        "--python", f"torch={python}", "--csv", str(path), "-w", str(tmp_path / "work"),
    ])  # fmt: skip
    assert status == FAILED
    assert [row["engine"] for row in read_rows(path)] == ["onnxruntime"]
    errors = capfd.readouterr().err.splitlines()
    where = "64x64, batch 1, 2 steps"
    assert any(line.startswith(f"error: optimum, {where}: the engine optimum without ") for line in errors)
    assert f"error: torch eager, {where}: ended by SIGKILL, possibly because memory ran out" in errors


@pytest.mark.usefixtures("preloaded_engines")
def test_detects_other_weights(micro_cpu: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    write_micro("tiny", other, seed=7)
    arguments = ["-p", str(other), str(micro_cpu), *SMALL, "--csv", str(tmp_path / "result.csv")]
    assert main(arguments) == FAILED
    (row,) = read_rows(tmp_path / "result.csv")
    assert "the images differ from the reference" in row["remarks"]
    assert float(row["psnr_db"]) < 25
    captured = capfd.readouterr()
    assert "error: sdonnx, 64x64, batch 1, 2 steps: the images differ from the reference" in captured.err
    assert "untrusted" in captured.out


def test_interruption_keeps_complete_results(micro_cpu: Path, micro_exported: Path, tmp_path: Path) -> None:
    """Ctrl-C in the second of two workloads: the files contain the first and the complete rows of the second."""
    arguments = [
        sys.executable, str(SCRIPT), "-e", "onnxruntime", PLAIN, "-p", str(micro_cpu),
        str(micro_exported), *SMALL[:6], "-b", "1", "2", "-c", "2", "--rounds", "1", "--skip_warmup",
        "--report", "report.html",
    ]  # fmt: skip
    process = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    starts = 0
    for line in process.stdout:
        starts += line.rstrip().endswith(": started")
        if starts == 4:
            process.send_signal(signal.SIGINT)
            break
    out, errors = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, errors
    assert "interrupted; complete measurements are kept" in out
    rows = read_rows(tmp_path / "benchmark_result.csv")
    assert [row["batch_size"] for row in rows] == ["1", "1", "2"]
    assert (tmp_path / "report.html").stat().st_size > 10_000


# Errors


class Failed:
    """Runs a command that must fail with one line before it measures or writes anything."""

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
        (["-e", "tensorrt"], "the engine 'tensorrt' is unknown; expected one of onnxruntime, torch, sdonnx-compile"),
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
        (["-e", "optimum"], "the engine 'optimum' is unknown"),
        (["-e", "nowhere.py:mine"], "nowhere.py cannot be loaded (FileNotFoundError"),
        (["-e", f"{LAB}/plain_engine.py:mine"], "mine' is unknown; expected one of onnxruntime-plain, bound"),
        (["--input-image", "nowhere.png"], "nowhere.png is not a file"),
        (["--timeout", "0"], "--timeout is 0.0"),
        (["--timeout", "1e11"], "--timeout is 100000000000.0"),
        (["--guidance_scale", "nan"], "--guidance_scale is nan"),
        (["--scheduler", "nosuch"], "nosuch"),
        (["--output-image", "x.docx"], "--output_image x.docx; expected a name such as x.png"),
        (["--input-image", __file__], "cannot be read"),
        (["--profile", "-r", "cpu"], "--profile on a CPU; expected a GPU"),
        (["--throughput", "-s", "1"], "--throughput with one step"),
        (["--python", "venv/bin/python"], "--python venv/bin/python; expected ENGINE=PYTHON"),
        (["--python", "rocm=python"], "--python rocm=python"),
        (["--enable_safety_checker", "-e", "torch"], "has no safety checker"),
        (["--compile_mode", "default"], "--compile_mode without --enable_torch_compile"),
        (["--enable_torch_compile"], "--enable_torch_compile without the engine torch"),
        (["-e", "torch", "--use-xformers", "-r", "cpu"], "--use_xformers without xformers"),
        (["-e", "torch", "--enable_torch_compile", "--compile_mode", "x"], "expected one of default, reduce-overhead"),
        (["--json", "nowhere/result.jsonl"], "nowhere is not a folder"),
        (["--report", "nowhere/report.html"], "nowhere is not a folder"),
        (["--arch", "tiny"], "--arch and "),
        (["--compiler", "nexfort"], "--compiler nexfort, a backend of OneDiff; expected one of none, sdonnx, torch"),
        (["--compiler", "none", "-e", "torch"], "--compiler and --engine"),
        (["--compiler", "sdonnx", "--compiler-config", "fastest"], "the mode 'fastest' is unknown"),
        (["--compiler-config", "{}"], "--compiler_config for engines that compile nothing"),
        (["--run-rare-resolutions", "70x64"], "--run_rare_resolutions 70x64; expected HEIGHTxWIDTH in multiples of 8"),
        (["--run_multiple_resolutions", "big"], "--run_multiple_resolutions big; expected HEIGHTxWIDTH"),
        (["--compiler", "sdonnx", "--quantize", "--export-qdq"],
         "--export_qdq for sdonnx-compile; expected the engine onnxruntime, which reads an optimized folder; "
         "pass -e sdonnx-compile onnxruntime in place of --compiler, or omit the option"),
        (["-e", "sdonnx-compile", "torch", "--quantize", "auto", "--min-psnr", "30"],
         "--min_psnr for sdonnx-compile, torch; expected the engine onnxruntime, which reads an optimized folder; "
         "pass -e sdonnx-compile torch onnxruntime, or omit the option"),
        (["--compiler", "sdonnx", "--quantize", "--quant-submodules-config-path", "x.json"], "x.json cannot be read"),
        (["--compiler", "sdonnx", "--quantize", "auto", "--quant-submodules-config-path", "x.json"], "x.json cannot"),
        (["--compiler", "sdonnx", "--quantize", "auto", "--quantize-config", '{"modules": {"unet:conv_in": "int8"}}'],
         "--quantize auto and --quantize_config without a type for the denoiser; expected a quant_type; add"),
        (["--compiler", "sdonnx", "--quantize", "int3"], "the quantization type 'int3' is unknown"),
        (["--compiler", "sdonnx", "--quantize", "int8_static"], "int8_static, which needs a calibration"),
        (["-e", "torch", "--quantize-config", "{}"], "--quantize_config for torch"),
        (["--quantize", "int3"], "int3"),
        (["--max-error", "0.1"], "--max_error without --quantize auto"),
        (["--quant-submodules-config-path", "x.json"], "--quant_submodules_config_path without --quantize"),
    ],
)  # fmt: skip
def test_rejects_invalid_options(arguments: list[str], message: str, failed: Failed, micro: Path) -> None:
    assert message in failed("-p", str(micro), *arguments)


def test_rejects_a_missing_pipeline(failed: Failed) -> None:
    assert "no pipeline; expected -p FOLDER or --arch NAME" in failed()
    message = failed("-v", "1.5")
    assert "-v 1.5 is a label of the rows" in message
    assert "pass -p with the folder of" in message
    assert "--arch sd15" in message
    assert "--arch sd" not in failed("-v", "mine")


def test_rejects_two_folders_of_one_kind(failed: Failed, micro_cpu: Path) -> None:
    copy = failed.folder / "copy"
    shutil.copytree(micro_cpu, copy, copy_function=os.link)
    assert f"{micro_cpu} and {copy} are both an optimized pipeline" in failed("-p", str(micro_cpu), str(copy))


def test_rejects_to_quantize_an_optimized_folder(failed: Failed, micro_cpu: Path) -> None:
    message = failed("-p", str(micro_cpu), "--quantize", "int8_dynamic")
    assert f"--quantize and {micro_cpu}, which is optimized; expected a folder that the command optimizes" in message


def test_rejects_a_csv_file_with_other_columns(failed: Failed, micro_cpu: Path) -> None:
    (failed.folder / "result.csv").write_text("engine,version\n")
    assert "result.csv has the columns 'engine, version'; expected engine" in failed("-p", str(micro_cpu), *SMALL)


def test_rejects_an_engine_without_its_folder(failed: Failed, micro_cpu: Path) -> None:
    message = failed("-e", "torch", "-p", str(micro_cpu), "-r", "cpu")
    assert f"{micro_cpu} is an optimized pipeline; expected a diffusers pipeline for the engine torch" in message


def test_rejects_cuda_without_a_gpu(failed: Failed, micro: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdonnx.environment_record.first_gpu", lambda: None)
    assert "CUDA finds no GPU" in failed("-r", "cuda", "-p", str(micro))


@pytest.mark.parametrize("module", ["skimage", "psutil"])
def test_rejects_missing_packages(
    module: str, failed: Failed, micro_cpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "is_importable", lambda name: name != module)
    message = failed("-p", str(micro_cpu))
    assert f"{module} missing" in message
    assert install_command("benchmark") in message


def test_fails_without_any_result(micro_cpu: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (broken := tmp_path / "broken").mkdir()
    shutil.copytree(micro_cpu, broken, dirs_exist_ok=True, copy_function=os.link)
    (broken / "unet" / "step.onnx").unlink()
    path = tmp_path / "result.csv"
    assert main(["-p", str(broken), *SMALL, "--csv", str(path)]) == FAILURE
    captured = capfd.readouterr()
    assert "error: sdonnx, 64x64" in captured.err
    assert "appended" not in captured.out
    assert not path.exists()


def test_prints_results_if_writing_fails(
    capsys: pytest.CaptureFixture[str], micro_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result("onnxruntime", Workload(1, 64, 64, 2), {"name": "onnxruntime", "provider": "cpu", "precision": "a"})
    result.engine |= {"xformers": False, "safety_checker": False, "scheduler": "b", "io_binding": False, "version": "1"}
    result.rounds.append(Round(1.0, (), (0.125,), (2**20,), "known"))

    def run(self: ComparisonRun) -> None:
        self._comparison.results.append(result)
        self._keep(result)

    def full(*_: Any) -> None:
        raise OutputError("writing failed (No space left on device)", "space", "free some")

    monkeypatch.setattr(ComparisonRun, "run", run)
    monkeypatch.setattr(command, "append_row", full)
    assert main(["-p", str(micro_cpu), *SMALL, "--csv", str(tmp_path / "result.csv")]) == FAILURE
    captured = capsys.readouterr()
    assert "0.125" in captured.out
    assert captured.err == "error: writing failed (No space left on device); expected space; free some\n"
    assert append_row is not full


def test_interruption_while_making_folders(micro: Path, tmp_path: Path) -> None:
    arguments = python("-u", str(SCRIPT), "-p", str(micro), *SMALL, "-w", "work")
    process = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "export in float32" in process.stdout.readline()
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == TERMINATED
    assert "interrupted before the first measurement" in errors
    assert not (tmp_path / "work").exists() or not any((tmp_path / "work").iterdir())


def test_interruption_while_writing_the_report(
    micro_cpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sdonnx.benchmark.report.report_page.write_report", interrupt)
    monkeypatch.setattr(ComparisonRun, "run", lambda self: None)
    path = tmp_path / "result.csv"
    arguments = ["-p", str(micro_cpu), *SMALL, "--csv", str(path), "--report", str(tmp_path / "report.html")]
    assert main(arguments) == INTERRUPTED
    assert "interrupted while writing the report; the rows are in" in capsys.readouterr().err


def test_accepts_options_of_onnxruntime_and_onediff(micro_cpu: Path, tmp_path: Path) -> None:
    """The options are spelled as in ONNX Runtime's and OneDiff's scripts."""
    parser = CommandParser()
    command.add_arguments(parser)
    ort = "-e torch -r cuda -v 1.5 -p a -w b -b 2 --height 64 --width 64 -s 20 -n 2 -c 3 --enable_safety_checker"
    ort += " --enable_torch_compile --use_xformers --use_io_binding --skip_warmup -g"
    theirs = parser.parse(shlex.split(ort))
    assert (theirs.pipeline, theirs.batch_size, theirs.enable_cuda_graph) == ([Path("a")], [2], True)
    onediff = "--model a --prompt fox --negative-prompt blurred --seed 3 --warmups 2 --batch 4 --output-image o.png"
    onediff += " --print-output --throughput --run_multiple_resolutions 1 --scheduler euler --input-image i.png"
    onediff += " --run_rare_resolutions 1 --compiler sdonnx --quantize --quant-submodules-config-path m.json"
    onediff += """ --compiler-config '{"mode": "max-optimize"}' --quantize-config '{"quant_type": "int8_dynamic"}'"""
    onediffs = parser.parse(shlex.split(onediff))
    assert (onediffs.pipeline, onediffs.batch_size) == ([Path("a")], [4])
    assert (onediffs.negative_prompt, onediffs.input_image, onediffs.print_output) == ("blurred", "i.png", True)
    assert (onediffs.run_multiple_resolutions, onediffs.run_rare_resolutions) == (["1"], ["1"])
    assert (onediffs.compiler, onediffs.compiler_config) == (["sdonnx"], '{"mode": "max-optimize"}')
    assert (onediffs.quantize, onediffs.quantize_config) == ("", '{"quant_type": "int8_dynamic"}')


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ([], ()),
        (["--run_multiple_resolutions", "false", "--run_rare_resolutions", "0"], ()),
        (["--run_rare_resolutions"], ((64, 96), (520, 1032), (544, 408), (408, 208), (208, 1048))),
        (["--run-multiple-resolutions", "72x48", "64x96", "--run-rare-resolutions", "104x8"],
         ((64, 96), (72, 48), (104, 8))),
        (["--run_multiple_resolutions", "true"], ((64, 96), (48, 96), (64, 72), (80, 96), (32, 96), (80, 120))),
    ],
)  # fmt: skip
def test_sizes_in_one_process(
    arguments: list[str], sizes: tuple[Any, ...], micro_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(ComparisonRun, "run", lambda self: found.append(self._setup.resolutions))
    path = str(tmp_path / "result.csv")
    main(["-p", str(micro_cpu), "-r", "cpu", "--height", "64", "--width", "96", "--csv", path, *arguments])
    assert found == [sizes]


@pytest.mark.usefixtures("preloaded_engines")
def test_quantizes_the_folder_that_it_optimizes(
    micro_exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ComparisonRun, "run", lambda self: None)
    path, work = str(tmp_path / "result.csv"), tmp_path / "work"
    config = '{"modules": {"unet:conv_in": "int8_weightonly"}}'
    main([
        "-p", str(micro_exported), *SMALL, "--csv", path, "-w", str(work), "--quantize-config", config
    ])  # fmt: skip
    (folder,) = work.iterdir()
    assert reported_precision(PipelineFolder.open(folder)) == "float32, unet in int8_weightonly"


@pytest.mark.usefixtures("preloaded_engines")
@pytest.mark.weekly
def test_compiler_of_onediff(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first image is timed with an empty cache and, in a second process, with a filled one."""
    monkeypatch.chdir(tmp_path)
    status = main([
        "-p", str(micro), *SMALL, "--compiler", "sdonnx", "--compiler-config", '{"mode": "max-optimize"}',
        "--csv", "result.csv", "--output-image", "o.png", "--print-output",
    ])  # fmt: skip
    assert status == 0
    (row,) = read_rows(tmp_path / "result.csv")
    assert (row["engine"], row["provider"]) == ("sdonnx-compile", "cpu")
    assert row["compiler_config"] == '{"mode": "max-optimize"}'
    assert float(row["first_image_s"]) > float(row["load_s"]) > 0
    assert float(row["cached_first_image_s"]) > 0
    assert float(row["psnr_db"] or 999) > 50
    shown = capfd.readouterr().out
    assert "image: o-sdonnx-compile-64x64-b1.png" in shown
    assert (tmp_path / "o-sdonnx-compile-64x64-b1.png").is_file()


def options_of(*given: str) -> argparse.Namespace:
    parser = CommandParser()
    command.add_arguments(parser)
    return parser.parse(list(given))


def compiled(*given: str) -> dict[str, Any]:
    """Return the options of `sdonnx.compile_pipe` for options of the command."""
    return compiled_types(options_of("-e", "sdonnx-compile", *given))


CONFIG = '{"quant_type": "int8_dynamic", "modules": {"unet:conv_in": "none"}}'


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), {}),
        (("--quantize",), {"quant_type": "fp8"}),
        (("--quantize", "int8_weightonly"), {"quant_type": "int8_weightonly"}),
        (("--quantize-config", CONFIG), {"quantize_config": CONFIG}),
        (("--quantize", "int8_dynamic", "--export-qdq"), {}),  # an option of folders
        (("-e", "onnxruntime", "--quantize", "--quant-submodules-config-path", "nowhere.json"), {}),
        (("--quantize", "auto"), {"mode": "O3"}),
        (("--quantize", "auto", "--quantize-config", CONFIG), {"mode": "O3", "quantize_config": CONFIG}),
    ],
)
def test_options_that_quantize_are_those_of_the_compiler(given: tuple[str, ...], expected: dict[str, str]) -> None:
    assert compiled(*given) == expected


def test_modules_of_a_file_are_a_configuration_of_the_compiler(tmp_path: Path) -> None:
    """The engine onnxruntime has the same modules: the denoiser's modules with the highest SSIM."""
    path = tmp_path / "modules.json"
    path.write_text(json.dumps({"a": {"ssim": 0.9}, "b": {"ssim": 0.5}, "c": {"ssim": 0.99}}))
    file = ("--quant-submodules-config-path", str(path))
    assert compiled("--quantize", "int8", *file) == {
        "quant_type": "int8_dynamic", "quantize_config": {"modules": {}, "submodules": ["c", "a"]},
    }  # fmt: skip
    assert compiled("--quantize", *file)["quant_type"] == "fp8_e4m3_e4m3_dynamic"
    config = {"quant_type": "int8_dynamic", "top_percentage": 50, "modules": {"unet:b": "fp8_e4m3_weightonly"}}
    found = compiled("--quantize", *file, "--quantize-config", json.dumps(config))
    assert found["quantize_config"] == {"modules": {"unet:b": "fp8_e4m3_weightonly"}, "submodules": ["c"]}
    of_folders = options_of("--quantize", *file, "--quantize-config", json.dumps(config))
    assert check_options(found).quantization == quantization_config(of_folders)


def test_compiler_quantizes_the_modules_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "modules.json"
    path.write_text(json.dumps({"conv_in": {"ssim": 0.99}}))
    types = compiled("--quantize", "int8_weightonly", "--quantize-config", '{"top_percentage": 100}',
                     "--quant-submodules-config-path", str(path))  # fmt: skip
    (rival,) = parse_rivals(["sdonnx-compile"], config="max-optimize", types=types)
    with logged_lines(logging.INFO) as lines:
        sdonnx.compile(small_unet(), options=rival.compiler_config)
    assert "1 weights in int8_weightonly" in next(line for line in lines if line.startswith("quantized in"))
