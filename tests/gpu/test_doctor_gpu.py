"""The doctor on a GPU: its verdict on the real kernels, what it costs, and a kernel that is made to lie."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdonnx.__main__ import main
from sdonnx.doctor.cache import read_verdict
from sdonnx.doctor.corner import Array
from sdonnx.doctor.environment import facts, findings
from sdonnx.doctor.first_use import LIMIT_S, first_use
from sdonnx.doctor.gpu import identity
from sdonnx.doctor.kernels import ATTENTION, BACKENDS, compare, read_corners
from sdonnx.doctor.sessions import Kernel, open_on
from sdonnx.doctor.verdict import judge
from sdonnx.runtime.device import device_for

CORNERS = read_corners()


@pytest.fixture(autouse=True)
def libraries() -> None:
    device_for("cuda")


def test_this_machine_lacks_nothing(note: Any) -> None:
    found = findings(facts(), "cuda")
    note("doctor: environment", {finding.subject: finding.found for finding in found})
    assert [finding for finding in found if finding.state == "missing"] == []


def test_the_machine_is_told() -> None:
    key = identity(0, CORNERS.digest)
    assert all(key.values()), key


def test_the_whole_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: Any) -> None:
    """Every corner that the contracts promise is right by ONNX Runtime's own choice of back end."""
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path))
    start = time.perf_counter()
    status = main(["doctor", "--provider", "cuda", "--json", str(tmp_path / "report.json")])
    seconds = time.perf_counter() - start
    report = json.loads((tmp_path / "report.json").read_text())
    rows, verdict = report["corners"], report["verdict"]
    alone = {
        name: {
            "wrong": sorted({f"{row['dtype']} {row['corner']}" for row in of_name if row["state"] == "wrong"}),
            "not available": sum(row["state"] == "not available" for row in of_name),
            "largest error": max((float(row["error"]) for row in of_name if row["error"] is not None), default=None),
        }
        for name in BACKENDS
        for of_name in [[row for row in rows if row["backend"] == name]]
    }
    note("doctor: whole check", {"seconds": seconds, "rows": len(rows), "verdict": verdict, "back ends": alone})
    assert (status, verdict["faults"], verdict["unavailable"]) == (0, [], [])
    assert seconds < 120
    kept = read_verdict(identity(0, CORNERS.digest), tmp_path)
    assert kept is not None
    assert kept.full
    assert kept.sound


def test_a_first_use_takes_seconds_and_later_ones_read_a_file(tmp_path: Path, note: Any) -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        found = first_use(0, folder=tmp_path)
        seconds.append(time.perf_counter() - start)
        assert found.sound
        assert found.complete
    note("doctor: first use", {"seconds": seconds, "corners": found.checked, "check_s": found.seconds})
    assert seconds[0] < LIMIT_S
    assert max(seconds[1:]) < 0.05


def test_each_back_end_can_be_asked_for(note: Any) -> None:
    """sdpa_kernel reaches the kernel: back ends differ in their last bits, math computes all that others cannot."""
    checks = [c for c in CORNERS.checks if c.first and c.corner.op_type == ATTENTION and "H=64 N=2" in c.corner.name]
    rows = list(compare(CORNERS, checks, open_on("cuda"), dtypes=["float16"], backends=BACKENDS))
    errors = {name: [row.error for row in rows if row.backend == name] for name in BACKENDS}
    note("doctor: back ends", errors)
    assert len({tuple(of_name) for of_name in errors.values()}) > 1


def test_a_back_end_that_is_made_to_lie_is_avoided(note: Any) -> None:
    """The real kernels, but for the back end that ONNX Runtime chooses, whose results are changed."""
    real = open_on("cuda")
    bad = BACKENDS["cuDNN"]
    graphs = {
        CORNERS.graphs[kernel]
        for check in CORNERS.checks
        if check.corner.op_type == ATTENTION
        for kernel in check.kernels.values()
    }

    def opened(content: bytes, weights: Mapping[str, Array], sdpa_kernel: int) -> Kernel:
        kernel = real(content, weights, sdpa_kernel)
        if content not in graphs or (sdpa_kernel and not sdpa_kernel & bad):
            return kernel

        def lying(feeds: Mapping[str, Array]) -> Sequence[Array]:
            return [result * np.asarray(1.1, result.dtype) for result in kernel(feeds)]

        return lying

    verdict, _ = judge(CORNERS, opened, {"gpu": "one that lies"}, full=False)
    note("doctor: cuDNN lies", {"sdpa_kernel": verdict.sdpa_kernel, "lying": verdict.lying, "seconds": verdict.seconds})
    assert "cuDNN" in verdict.lying
    assert verdict.sdpa_kernel
    assert not verdict.sdpa_kernel & bad
    assert verdict.faults == ()


def test_a_doctored_reference_is_found() -> None:
    """Attention of another scale in place of the body: whatever back end is taken, the kernel seems to lie."""
    check = next(check for check in CORNERS.checks if check.first and check.corner.op_type == ATTENTION)
    other = next(check for check in CORNERS.checks if "scale=0.05" in check.corner.name)
    graphs = {**CORNERS.graphs, check.reference: CORNERS.graphs[other.reference]}
    doctored = replace(CORNERS, graphs=graphs, checks=(check,))
    verdict, _ = judge(doctored, open_on("cuda"), {"gpu": "this one"}, full=False)
    assert verdict.lying == ("math",)  # as wrong as the others are where they cannot be told from it
    assert [row.operator for row in verdict.faults] == [ATTENTION]
    assert not verdict.sound


def test_the_pipeline_draws_with_an_avoided_back_end(
    tiny_cuda_fp16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option reaches the sessions, and the image is the one of ONNX Runtime's own choice."""
    from sdonnx.parity import psnr
    from sdonnx.runtime import pipeline as module
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    own = first_use(0, folder=tmp_path)
    images = []
    for verdict in (replace(own, sdpa_kernel=0), replace(own, sdpa_kernel=BACKENDS["memory-efficient"])):
        monkeypatch.setattr(module, "verdict_on", lambda device, found=verdict: found)
        with OrtDiffusionPipeline.from_pretrained(tiny_cuda_fp16) as drawn:
            output = drawn("a fox", 64, 64, num_inference_steps=4, seed=0, output_type="np")
            images.append(output.images)
    assert psnr(images[1], images[0]) > 40
