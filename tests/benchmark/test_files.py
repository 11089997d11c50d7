"""Rows, records and appending them to files."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.benchmarking import read_rows
from support.pipelines import refused

from sdonnx.benchmark.files import append_json, append_row, check_csv, check_writable
from sdonnx.benchmark.record import COLUMNS, csv_row, result_record
from sdonnx.benchmark.results import Agreement, Comparison, Result, Round, Stages
from sdonnx.errors import OutputError
from sdonnx.reference.workload import Workload

# ONNX Runtime's README for Stable Diffusion, the header of its benchmark_result.csv.
THEIR_COLUMNS = (
    "engine,version,provider,disable_safety_checker,height,width,steps,batch_size,batch_count,num_prompts,"
    "average_latency,median_latency,first_run_memory_MB,second_run_memory_MB"
)
HEADER = ",".join(COLUMNS)

ENGINE = {
    "name": "torch",
    "version": "2.13.0",
    "device": "cuda",
    "provider": "cuda compile default",
    "precision": "float16",
    "compile_mode": "default",
    "regional": False,
    "xformers": True,
    "io_binding": False,
    "safety_checker": False,
    "scheduler": "PNDMScheduler",
    "folder": "sd15",
    "family": "stable-diffusion",
}
MB = 2**20
ENVIRONMENT = {"machine": {"gpu": {"name": "H200"}}, "git": {"commit": "abc"}}


def result(**changes: Any) -> Result:
    rounds = [
        Round(1.25, (3.0,), (1.0, 2.0), (9 * MB, 8 * MB), "known", 6 * MB, 11 * MB, (1980,), 1, pipeline_load_s=0.75)
    ]
    stages = Stages(1.5, 20.0, 5.0, 50.0, 51)
    made = Result("torch-compile:default xformers", Workload(4, 512, 768, 50), ENGINE, rounds, stages)
    made.agreement = Agreement(61.234567, 0.99912345, 0.25)
    made.flops, made.matrix_rate = 1.6e12, 400e12
    return dataclasses.replace(made, **changes)


def test_csv_row() -> None:
    row = csv_row(result(), Comparison("", ENVIRONMENT, model="sd15"), 3, 5)
    assert ",".join(row) == HEADER
    assert HEADER.startswith(THEIR_COLUMNS)
    assert row == {
        "engine": "torch",
        "version": "sd15",
        "provider": "cuda compile default xformers",
        "disable_safety_checker": True,
        "height": 512,
        "width": 768,
        "steps": 50,
        "batch_size": 4,
        "batch_count": 5,
        "num_prompts": 3,
        "average_latency": 1.5,
        "median_latency": 1.5,
        "first_run_memory_MB": 9,
        "second_run_memory_MB": 8,
        "min_latency": 1,
        "p90_latency": 1.9,
        "p99_latency": 1.99,
        "spread": 0.5333,
        "iterations_per_second": 50,
        "text_ms": 1.5,
        "step_ms": 20,
        "decode_ms": 5,
        "load_s": 1.25,
        "pipeline_load_s": 0.75,
        "first_image_s": 4.25,
        "cached_first_image_s": None,
        "cached_pipeline_load_s": None,
        "warm_up_s": 3,
        "allocator_MB": 6,
        "host_peak_MB": 11,
        "psnr_db": 61.23,
        "ssim": 0.999123,
        "lpips": None,
        "differing": 0.25,
        "tflop_per_call": 1.6,
        # 1.6 TFLOP in 20 ms are 80 of 400 TFLOP/s.
        "share_of_matrix_rate": 0.2,
        "precision": "float16",
        "scheduler": "PNDMScheduler",
        "rounds": 1,
        "gpu": "H200",
        "remarks": "spread of 53%",
        "guidance_scale": 7.5,
        "seed": 0,
        "image_to_image_strength": None,
        "ip_adapter_scale": None,
        "io_binding": False,
        "compiler_config": None,
        "warm_ups": 1,
        "denoiser_calls": 51,
        "engine_version": "2.13.0",
        "commit": "abc",
    }


def test_csv_row_without_optional_values() -> None:
    nothing = {"machine": {"gpu": None}, "git": {"commit": None}}
    row = csv_row(result(stages=None, agreement=None, flops=None, failure="black"), Comparison("", nothing), 1, 1)
    empty = [name for name, value in row.items() if value is None]
    assert empty == [
        "iterations_per_second", "text_ms", "step_ms", "decode_ms", "cached_first_image_s", "cached_pipeline_load_s",
        "psnr_db", "ssim", "lpips", "differing", "tflop_per_call", "share_of_matrix_rate", "gpu",
        "image_to_image_strength", "ip_adapter_scale", "compiler_config", "denoiser_calls", "commit",
    ]  # fmt: skip
    assert row["remarks"] == "black; spread of 53%"


def test_result_record() -> None:
    comparison = Comparison("benchmark.py -e torch", {"packages": {"torch": "2.13.0"}})
    made = result()
    row = csv_row(made, Comparison("", ENVIRONMENT, model="sd15"), 1, 2)
    record = json.loads(json.dumps(result_record(made, ["a fox"], row, comparison), allow_nan=False))
    assert record["row"] == row
    assert (record["benchmark"], record["command"]) == ("pipeline", "benchmark.py -e torch")
    assert record["environment"] == comparison.environment
    assert record["engine"] == ENGINE
    assert record["prompts"] == ["a fox"]
    assert record["workload"] == dataclasses.asdict(made.workload)
    assert record["rounds"] == json.loads(json.dumps([dataclasses.asdict(made.rounds[0])]))
    assert record["summary"]["median_s"] == 1.5
    assert record["agreement"]["psnr_db"] == pytest.approx(61.234567)
    assert record["time"]


# Files


def row() -> dict[str, Any]:
    return dict.fromkeys(COLUMNS, 1)


@pytest.mark.parametrize("content", ["", f"{HEADER}\n", f"{HEADER}\n1,2", f"{HEADER}\r\n"])
def test_appends_a_row_on_a_new_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    path.write_bytes(content.encode())
    append_row(path, row())
    lines = path.read_text().splitlines()
    assert lines.count(HEADER) == 1
    assert lines[0] == HEADER
    assert lines[-1] == ",".join(["1"] * len(COLUMNS))


def test_csv_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    for number in (1, 2):
        append_row(path, row() | {"remarks": 'a, "b"', "psnr_db": None, "steps": number})
    rows = read_rows(path)
    assert [each["steps"] for each in rows] == ["1", "2"]
    assert (rows[0]["remarks"], rows[0]["psnr_db"]) == ('a, "b"', "")


@pytest.mark.parametrize("content", ["engine,version\n1,2\n", f"{THEIR_COLUMNS}\n", f"\n{HEADER}\n", "\x00\n"])
def test_rejects_a_file_with_other_columns(content: str, tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    path.write_text(content)
    with refused(OutputError, str(path)):
        append_row(path, row())
    with refused(OutputError, str(path)):
        check_csv(path, COLUMNS)
    assert path.read_text() == content


def test_json_records_are_lines(tmp_path: Path) -> None:
    """NaN and infinity become null, and undecodable bytes are escaped."""
    path = tmp_path / "result.jsonl"
    append_json(path, {"a": "é\n"})
    append_json(path, {"a": float("nan"), "b": [1.5, (float("inf"), "x")]})
    append_json(path, {"a": os.fsdecode(b"\xff")})
    lines = path.read_bytes().splitlines()
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines[:2]]
    assert found == [{"a": "é\n"}, {"a": None, "b": [1.5, [None, "x"]]}]
    assert lines[2] == b'{"a": "\\udcff"}'


def test_rejects_paths_that_are_not_writable(tmp_path: Path) -> None:
    with refused(OutputError, "nowhere is not a folder"):
        check_writable(tmp_path / "nowhere" / "result.csv")
    with refused(OutputError, "is not a file"):
        check_writable(tmp_path)
    if os.geteuid():  # root may write anywhere
        (tmp_path / "locked").touch(0o400)
        with refused(OutputError, "is not writable"):
            check_writable(tmp_path / "locked")
    with refused(OutputError, "writing /dev/full failed (No space left on device)"):
        append_json(Path("/dev/full"), {"a": 1})
