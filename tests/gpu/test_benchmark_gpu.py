"""The benchmark on a GPU: device clock and consistency of the results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.benchmarking import read_rows

from sdonnx.__main__ import main
from sdonnx.benchmark.operator_times import IDLE
from sdonnx.runtime.device.cuda import cuda
from sdonnx.runtime.device.device import device_for

PLAIN = f"{Path(__file__).parents[2] / 'lab' / 'plain_engine.py'}:onnxruntime-plain"

Build = Callable[[str], tuple[Path, Path]]


def test_marks_use_the_device_clock() -> None:
    """Compare our marks with torch's events around a wait on the stream."""
    device = device_for("cuda")
    stream: Any = torch.cuda.ExternalStream(cuda(0).stream)
    with torch.cuda.stream(stream):
        theirs = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        start = time.perf_counter()
        ours = [device.mark()]
        theirs[0].record()
        torch.cuda._sleep(200_000_000)  # clock cycles, a tenth of a second
        theirs[1].record()
        ours.append(device.mark())
    assert time.perf_counter() - start < 0.05, "nothing waits for the device"
    milliseconds = device.milliseconds(*ours)
    assert milliseconds == pytest.approx(theirs[0].elapsed_time(theirs[1]), rel=0.01)
    assert milliseconds > 50


@pytest.mark.parametrize("arch", ["tiny", pytest.param("sd15", marks=pytest.mark.weekly)])
def test_complete_comparison(arch: str, build: Build, tmp_path: Path, note: Any) -> None:
    source, optimized = build(arch)
    paths = {name: tmp_path / name for name in ("result.csv", "result.jsonl", "report.html")}
    status = main(["benchmark",
        "-p", str(source), str(optimized), "-e", "onnxruntime", PLAIN, "torch", "-s", "8", "-c", "4",
        "--profile", "--throughput", "--run_multiple_resolutions", "-w", str(tmp_path / "work"),
        "--csv", str(paths["result.csv"]), "--json", str(paths["result.jsonl"]), "--report", str(paths["report.html"]),
    ])  # fmt: skip
    rows = {row["engine"]: row for row in read_rows(paths["result.csv"])}
    for name, row in rows.items():
        note("benchmark", {"pipeline": arch, "status": status, "engine": name} | row)
    records = [json.loads(line) for line in paths["result.jsonl"].read_text().splitlines()]
    for record in records:
        if record["benchmark"] == "kernels":
            note("kernels", {"pipeline": arch} | {key: record[key] for key in ("rival", "milliseconds", "launches")})
    assert paths["report.html"].stat().st_size > 10_000
    for name in ("onnxruntime", "torch"):
        row = rows[name]
        assert float(row["psnr_db"]) > 45
        stages_ms = sum(float(row[stage]) for stage in ("text_ms", "decode_ms")) + 9 * float(row["step_ms"])
        # PNDM has one denoiser call more than steps. The remaining time is spent on the host.
        assert 0.5 < stages_ms / 1e3 / float(row["median_latency"]) < 1.1
        assert 0 < float(row["share_of_matrix_rate"]) < 1
    assert float(rows["torch"]["allocator_MB"]) > 0
    kernels = {record["rival"]: record["milliseconds"] for record in records if record["benchmark"] == "kernels"}
    for name in ("onnxruntime", "torch"):
        assert {"convolution", "attention", "normalization", IDLE} <= set(kernels[name])
    clocks = [clock for record in records[:3] for each in record["rounds"] for clock in each["clocks_mhz"]]
    assert min(clocks) > 0
