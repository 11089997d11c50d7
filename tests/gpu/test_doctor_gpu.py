"""The doctor on a GPU: its verdict on the real kernels, its duration, and a backend that is made faulty."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdonnx.__main__ import main
from sdonnx.doctor.background_check import BackgroundCheck
from sdonnx.doctor.cache import read_verdict
from sdonnx.doctor.check_kernels import ATTENTION, BACKENDS, compare, read_kernel_cases
from sdonnx.doctor.environment import collect_facts, findings
from sdonnx.doctor.first_use import LIMIT_S, SELF_CHECK, KernelWarning, first_use, known_verdict
from sdonnx.doctor.gpu import identity
from sdonnx.doctor.sessions import Kernel, kernel_opener
from sdonnx.doctor.verdict import judge
from sdonnx.operators.case import Array
from sdonnx.runtime.device.device import device_for

CASE_SET = read_kernel_cases()


@pytest.fixture(autouse=True)
def libraries() -> None:
    device_for("cuda")


def test_this_machine_meets_all_requirements(note: Any) -> None:
    found = findings(collect_facts(), "cuda")
    note("doctor: environment", {finding.subject: finding.found for finding in found})
    assert [finding for finding in found if finding.state == "missing"] == []


def test_identity_is_complete() -> None:
    key = identity(0, CASE_SET.digest)
    assert all(key.values()), key


def test_full_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: Any) -> None:
    """Every case of the contracts is correct with the backend that ONNX Runtime chooses."""
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path))
    start = time.perf_counter()
    status = main(["doctor", "--provider", "cuda", "--json", str(tmp_path / "report.json")])
    seconds = time.perf_counter() - start
    report = json.loads((tmp_path / "report.json").read_text())
    rows, verdict = report["cases"], report["verdict"]
    backends = {
        name: {
            "wrong": sorted({f"{row['dtype']} {row['case']}" for row in of_name if row["state"] == "wrong"}),
            "not available": sum(row["state"] == "not available" for row in of_name),
            "largest error": max((float(row["error"]) for row in of_name if row["error"] is not None), default=None),
        }
        for name in BACKENDS
        for of_name in [[row for row in rows if row["backend"] == name]]
    }
    note("doctor: whole check", {"seconds": seconds, "rows": len(rows), "verdict": verdict, "backends": backends})
    assert (status, verdict["faults"], verdict["unavailable"]) == (0, [], [])
    assert seconds < 120
    cached = read_verdict(identity(0, CASE_SET.digest), tmp_path)
    assert cached is not None
    assert cached.full
    assert cached.sound


def test_a_first_use_takes_seconds_and_later_uses_read_a_file(tmp_path: Path, note: Any) -> None:
    seconds = []
    measured = tmp_path / "measured.json"  # none ships
    measured.write_text('{"verdicts": []}')
    for _ in range(3):
        start = time.perf_counter()
        found = first_use(0, folder=tmp_path / "cache", measured=measured)
        seconds.append(time.perf_counter() - start)
        assert found.sound
        assert found.complete
    note("doctor: first use", {"seconds": seconds, "cases": found.checked, "check_s": found.seconds})
    assert seconds[0] < LIMIT_S
    assert max(seconds[1:]) < 0.05


def test_the_verdict_of_the_background_check_is_acted_on(
    tiny_cuda_fp16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: Any
) -> None:
    """The check is real; its verdict is changed, and the graphs are loaded and captured again."""
    from sdonnx.metrics import psnr
    from sdonnx.runtime.device import kernel_workarounds as module
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    monkeypatch.delenv(SELF_CHECK)
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "known_verdict", lambda key: (None, False))
    check = BackgroundCheck(0)
    monkeypatch.setattr(module, "background_check", lambda index: check)
    with OrtDiffusionPipeline.from_pretrained(tiny_cuda_fp16) as pipeline:
        first = pipeline("a fox", 64, 64, num_inference_steps=4, seed=0, output_type="np").images
        start = time.perf_counter()
        check.join(300)
        note("doctor: in the background", {"seconds": time.perf_counter() - start})
        found = check.verdict
        assert found is not None
        assert found.sound
        # Later starts know it: from the cache, or because the verdict on this very machine ships.
        assert known_verdict(identity(0, CASE_SET.digest)) == (found, True)
        changed = replace(found, sdpa_kernel=BACKENDS["memory-efficient"], faulty_backends=("cuDNN",))
        monkeypatch.setattr(check, "_verdict", changed)
        with pytest.warns(KernelWarning, match="generate them again"):
            second = pipeline("a fox", 64, 64, num_inference_steps=4, seed=0, output_type="np").images
        assert len(pipeline.captured_sizes) == 1
    assert psnr(second, first) > 40


def test_each_backend_can_be_selected(note: Any) -> None:
    """sdpa_kernel reaches the kernel: the results of backends differ in their last bits."""
    checks = [c for c in CASE_SET.checks if c.first_use and c.case.op_type == ATTENTION and "H=64 N=2" in c.case.name]
    rows = list(compare(CASE_SET, checks, kernel_opener("cuda"), dtypes=["float16"], backends=BACKENDS))
    errors = {name: [row.error for row in rows if row.backend == name] for name in BACKENDS}
    note("doctor: backends", errors)
    assert len({tuple(of_name) for of_name in errors.values()}) > 1


def test_a_faulty_backend_is_avoided(note: Any) -> None:
    """The kernels are real, but results are changed while the backend that ONNX Runtime chooses is allowed."""
    real = kernel_opener("cuda")
    bad = BACKENDS["cuDNN"]
    graphs = {
        CASE_SET.graphs[kernel]
        for check in CASE_SET.checks
        if check.case.op_type == ATTENTION
        for kernel in check.kernels.values()
    }

    def opened(content: bytes, weights: Mapping[str, Array], sdpa_kernel: int) -> Kernel:
        kernel = real(content, weights, sdpa_kernel)
        if content not in graphs or (sdpa_kernel and not sdpa_kernel & bad):
            return kernel

        def faulty(feeds: Mapping[str, Array]) -> list[Array]:
            return [result * np.asarray(1.1, result.dtype) for result in kernel(feeds)]

        return faulty

    verdict, _ = judge(CASE_SET, opened, {"gpu": "a faulty one"}, full=False)
    row = {"sdpa_kernel": verdict.sdpa_kernel, "backends": verdict.faulty_backends, "seconds": verdict.seconds}
    note("doctor: faulty cuDNN", row)
    assert "cuDNN" in verdict.faulty_backends
    assert verdict.sdpa_kernel
    assert not verdict.sdpa_kernel & bad
    assert verdict.faults == ()


def test_another_reference_body_is_noticed() -> None:
    """The reference body is attention of another scale: the kernel seems wrong with every backend."""
    check = next(check for check in CASE_SET.checks if check.first_use and check.case.op_type == ATTENTION)
    other = next(check for check in CASE_SET.checks if "scale=0.05" in check.case.name)
    graphs = {**CASE_SET.graphs, check.reference: CASE_SET.graphs[other.reference]}
    changed = replace(CASE_SET, graphs=graphs, checks=(check,))
    verdict, _ = judge(changed, kernel_opener("cuda"), {"gpu": "this one"}, full=False)
    assert verdict.faulty_backends == ("math",)  # cases for which math is wrong do not count for other backends
    assert [row.operator for row in verdict.faults] == [ATTENTION]
    assert not verdict.sound


def test_the_pipeline_generates_without_an_avoided_backend(
    tiny_cuda_fp16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option reaches the sessions, and the image equals that of ONNX Runtime's choice."""
    from sdonnx.metrics import psnr
    from sdonnx.runtime.device import kernel_workarounds as module
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    monkeypatch.delenv(SELF_CHECK)
    verdict = first_use(0, folder=tmp_path)
    images = []
    for changed in (replace(verdict, sdpa_kernel=0), replace(verdict, sdpa_kernel=BACKENDS["memory-efficient"])):
        monkeypatch.setattr(module, "known_verdict", lambda key, found=changed: (found, True))
        with OrtDiffusionPipeline.from_pretrained(tiny_cuda_fp16) as pipeline:
            output = pipeline("a fox", 64, 64, num_inference_steps=4, seed=0, output_type="np")
            images.append(output.images)
    assert psnr(images[1], images[0]) > 40
