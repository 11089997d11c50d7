"""A new process on a machine whose kernels were not checked: the time to its first image, and the check behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.first_starts import (
    cached_verdicts,
    load_into_page_cache,
    of_other_versions,
    package_with,
    started,
    verdict_file,
)

from sdonnx.doctor.first_use import LIMIT_S, SELF_CHECK
from sdonnx.doctor.kernel_library import usable_library
from sdonnx.runtime.device.device import device_for


@pytest.mark.parametrize(
    ("arch", "steps", "scheduler", "limit_s"),
    [
        ("tiny", 4, "euler", 4.0),
        pytest.param("sd15", 50, "pndm", 4.0, marks=pytest.mark.weekly),
        pytest.param("sdxl", 20, "euler", 6.0, marks=pytest.mark.weekly),
    ],
)
def test_the_first_image_does_not_wait_for_the_check(
    arch: str, steps: int, scheduler: str, limit_s: float, build: Any, tmp_path: Path, note: Any
) -> None:
    """The folder is in the page cache. Verdicts are unknown, cached, or shipped: for this machine or a near one."""
    folder = build(arch)[1]
    load_into_page_cache(folder)
    library, _ = usable_library(device_for("cuda").capability())
    without = package_with(verdict_file([]), tmp_path / "without")
    call = (folder, steps, scheduler)
    started(without, *call, tmp_path / "warm-up")  # loads CUDA's libraries from the disk
    rows = {
        "no verdict": started(without, *call, tmp_path / "none"),
        "cached verdict": started(without, *call, tmp_path / "none"),
        "strict, no verdict": started(without, *call, tmp_path / "strict", {SELF_CHECK: "strict"}),
    }
    verdicts = cached_verdicts(tmp_path / "strict")
    assert len(verdicts) == (1 if library is None else 2)
    shipped = package_with(verdict_file(verdicts), tmp_path / "shipped")
    rows["shipped verdict"] = started(shipped, *call, tmp_path / "empty")
    near = package_with(verdict_file([of_other_versions(each) for each in verdicts]), tmp_path / "near")
    rows["shipped verdict of other versions"] = started(near, *call, tmp_path / "confirmed")
    for start, row in rows.items():
        note("first start", {"arch": arch, "steps": steps, "scheduler": scheduler, "start": start, **row})
    ours = "step.onnx" if library is None else "step-kernels.onnx"
    assert {start: row["graph"] for start, row in rows.items()} == dict.fromkeys(rows, ours) | {
        "no verdict": "step.onnx"
    }
    # ONNX Runtime's kernels add in no fixed order, so that its images of one seed differ in the last bits.
    assert all(row["images_are_equal"] for row in rows.values() if row["graph"] != "step.onnx")
    fast = [rows[start] for start in ("no verdict", "shipped verdict", "shipped verdict of other versions")]
    for start in ("no verdict", "shipped verdict of other versions"):
        row = rows.pop(start)
        assert row["sound"]
        assert row["own_kernels_sound"] == (None if library is None else True)
        assert row["check_s"] < 2 * LIMIT_S + 20
    assert all(row["sound"] is None for row in rows.values())  # no check runs
    assert [row["first_image_s"] <= limit_s for row in fast] == [True, True, True]
