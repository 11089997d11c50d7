"""A new process with an empty cache: the time to its first image, with our own kernels."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.first_starts import load_into_page_cache, started

from sdonnx.doctor.first_check import SELF_CHECK
from sdonnx.doctor.kernel_library import is_trusted, usable_library
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.quantization.quantization_types import TYPES
from sdonnx.runtime.device.device import device_for


@pytest.mark.parametrize(
    ("arch", "quantization", "steps", "scheduler", "limit_s"),
    [
        ("tiny", None, 4, "euler", 4.0),
        pytest.param("sd15", None, 50, "pndm", 4.0, marks=pytest.mark.weekly),
        pytest.param("sdxl", None, 20, "euler", 6.0, marks=pytest.mark.weekly),
        pytest.param("sdxl", "fp8_e4m3_e4m3_dynamic", 20, "euler", 6.0, marks=pytest.mark.weekly),
    ],
)
def test_the_first_image_of_a_trusted_gpu_has_our_kernels(
    arch: str,
    quantization: str | None,
    steps: int,
    scheduler: str,
    limit_s: float,
    build: Any,
    made: Any,
    tmp_path: Path,
    note: Any,
) -> None:
    """The folder is in the page cache. Nothing is checked and nothing is cached, except in the mode strict."""
    capability = device_for("cuda").capability()
    library, reason = usable_library(capability)
    if library is None or capability is None or not is_trusted(capability):
        pytest.skip(reason or "a GPU that is not trusted")
    folder = build(arch)[1]
    if quantization is not None:
        exported, config = folder.with_name("onnx"), QuantizationConfig(TYPES[quantization])
        make = partial(optimize_folder, exported, float16=True, quantization=config)
        folder = made(f"{arch}-{quantization}", lambda work: make(work / "made")) / "made"
    load_into_page_cache(folder)
    call = (folder, steps, scheduler)
    started(*call, tmp_path / "warm-up")  # loads CUDA's libraries from the disk
    rows = {
        "empty cache": started(*call, tmp_path / "cache"),
        "later process": started(*call, tmp_path / "cache"),
        "strict": started(*call, tmp_path / "strict", {SELF_CHECK: "strict"}),
    }
    for start, row in rows.items():
        note(
            "first start",
            {"arch": arch, "quantization": quantization, "steps": steps, "scheduler": scheduler, "start": start, **row},
        )
    assert {row["graph"] for row in rows.values()} == {"step-kernels.onnx"}
    assert all(row["images_are_equal"] for row in rows.values())
    assert list((tmp_path / "cache").glob("kernels-*")) == []
    assert len(list((tmp_path / "strict").glob("kernels-*.json"))) == 2
    assert rows["empty cache"]["first_image_s"] <= limit_s
    assert rows["empty cache"]["second_image_s"] <= 1.03 * rows["later process"]["second_image_s"]
