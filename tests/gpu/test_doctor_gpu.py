"""The doctor on a GPU: the real kernels, the duration of the checks, and backends that are left out."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdonnx.__main__ import main
from sdonnx.cli.doctor import faults_of, faulty_backends
from sdonnx.doctor.check_kernels import (
    ATTENTION,
    BACKENDS,
    DEFAULT_BACKEND,
    compare,
    kernel_opener,
    read_kernel_cases,
)
from sdonnx.doctor.environment import collect_facts, findings
from sdonnx.doctor.first_check import LIMIT_S, SELF_CHECK, machine_of
from sdonnx.doctor.kernel_library import usable_library
from sdonnx.folder.folder_version import read_report
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.kernel_choice import choose_kernels

CASE_SET = read_kernel_cases()


@pytest.fixture(autouse=True)
def libraries() -> None:
    device_for("cuda")


def test_this_machine_meets_all_requirements(note: Any) -> None:
    found = findings(collect_facts(), "cuda")
    note("doctor: environment", {finding.subject: finding.found for finding in found})
    assert [finding for finding in found if finding.state == "missing"] == []


def test_every_version_is_known() -> None:
    key = machine_of(0, None)
    assert all(key.values()), key


def test_full_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: Any) -> None:
    """Every case of the contracts is correct with the backends that the run-time allows."""
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path))
    start = time.perf_counter()
    status = main(["doctor", "--provider", "cuda", "--json", str(tmp_path / "report.json")])
    seconds = time.perf_counter() - start
    report = json.loads((tmp_path / "report.json").read_text())
    rows, found = report["cases"], report["verdict"]
    backends = {
        name: {
            "wrong": sorted({f"{row['dtype']} {row['case']}" for row in of_name if row["state"] == "wrong"}),
            "not available": sum(row["state"] == "not available" for row in of_name),
            "largest error": max((float(row["error"]) for row in of_name if row["error"] is not None), default=None),
        }
        for name in BACKENDS
        for of_name in [[row for row in rows if row["backend"] == name]]
    }
    note("doctor: whole check", {"seconds": seconds, "rows": len(rows), "verdict": found, "backends": backends})
    assert (status, found["faults"]) == (0, [])
    assert seconds < 120


def test_a_gpu_that_is_not_trusted_is_checked_once(
    tiny_cuda_fp16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: Any
) -> None:
    """The check takes as long as its limit at most, and later pipelines read its results."""
    library, reason = usable_library(device_for("cuda").capability())
    if library is None:
        pytest.skip(reason)
    monkeypatch.delenv(SELF_CHECK, raising=False)
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path))
    monkeypatch.setattr("sdonnx.runtime.device.kernel_choice.is_trusted", lambda capability: False)
    report, seconds = read_report(tiny_cuda_fp16), []
    for _ in range(3):
        start = time.perf_counter()
        assert choose_kernels(device_for("cuda"), report, tiny_cuda_fp16).library == library.path
        seconds.append(time.perf_counter() - start)
    note("doctor: before a first image", {"seconds": seconds})
    assert seconds[0] < LIMIT_S + 2  # and the time in which libraries are loaded
    assert max(seconds[1:]) < 0.1


def test_each_backend_can_be_selected(note: Any) -> None:
    """sdpa_kernel reaches the kernel: the results of backends differ in their last bits."""
    checks = [c for c in CASE_SET.checks if c.first_use and c.case.op_type == ATTENTION and "H=64 N=2" in c.case.name]
    rows = list(compare(CASE_SET, checks, kernel_opener("cuda"), dtypes=["float16"], backends=BACKENDS))
    errors = {name: [row.error for row in rows if row.backend == name] for name in BACKENDS}
    note("doctor: backends", errors)
    assert len({tuple(of_name) for of_name in errors.values()}) > 1


def test_another_reference_body_is_noticed() -> None:
    """The reference body is attention of another scale: the kernel seems wrong with every backend."""
    check = next(check for check in CASE_SET.checks if check.first_use and check.case.op_type == ATTENTION)
    other = next(check for check in CASE_SET.checks if "scale=0.05" in check.case.name)
    graphs = {**CASE_SET.graphs, check.reference: CASE_SET.graphs[other.reference]}
    changed = replace(CASE_SET, graphs=graphs, checks=(check,))
    rows = list(compare(changed, [check], kernel_opener("cuda"), backends={**DEFAULT_BACKEND, **BACKENDS}))
    assert faulty_backends(rows) == ["math"]  # cases for which math is wrong do not count for other backends
    assert {row.operator for row in faults_of(rows)} == {ATTENTION}


def test_the_pipeline_generates_without_an_avoided_backend(
    tiny_cuda_fp16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option reaches the sessions, and the image is the same as with ONNX Runtime's choice."""
    from sdonnx.metrics import psnr
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    images = []
    monkeypatch.setenv("SDONNX_KERNELS", "0")
    for bits in (0, BACKENDS["memory-efficient"]):
        monkeypatch.setattr("sdonnx.runtime.device.kernel_choice.sdpa_kernel", lambda *_, bits=bits: bits)
        with OrtDiffusionPipeline.from_pretrained(tiny_cuda_fp16) as pipeline:
            output = pipeline("a fox", 64, 64, num_inference_steps=4, seed=0, output_type="np")
            images.append(output.images)
    assert psnr(images[1], images[0]) > 40
