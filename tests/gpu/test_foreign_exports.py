"""Folders from other exporters generate the same image in fp16 on the GPU as this project's export."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.exporters import EXPORTERS, export_folder

from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.metrics import psnr
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.write_sample import write_sample

STEPS, REPEATS = 20, 5
BY_NAME = {exporter.name: exporter for exporter in EXPORTERS}


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("tiny", ["torchscript-17", "torchscript-14", "torchscript-14-baddbmm"]),
        pytest.param("sd15", ["torchscript-14"], marks=pytest.mark.weekly),
    ],
)
def test_foreign_export_generates_the_same_image(arch: str, names: list[str], tmp_path: Path, note: Any) -> None:
    write_sample(arch, tmp_path / "source")
    folders = {"sdonnx": tmp_path / "sdonnx"} | {name: tmp_path / name for name in names}
    export_pipeline(tmp_path / "source", folders["sdonnx"])
    for name in names:
        export_folder(tmp_path / "source", folders[name], BY_NAME[name])
    images, rows = {}, []
    for name, folder in folders.items():
        out = tmp_path / f"{name}-fp16"
        start = time.perf_counter()
        report = optimize_folder(folder, out, float16=True)
        row: dict[str, Any] = {"pipeline": arch, "exporter": name, "optimize_s": time.perf_counter() - start}
        assert not any(component.warnings for component in report.components.values()), name
        assert json.loads((out / "sdonnx.json").read_text())["precision"] == "float16"
        pipeline = OrtDiffusionPipeline.from_pretrained(out)
        latencies = []
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            images[name] = pipeline("a fox", num_inference_steps=STEPS, seed=1, output_type="np").images
            latencies.append(time.perf_counter() - start)
        rows.append(row | {"steps": STEPS, "latency_s": sorted(latencies[1:])})
        del pipeline
    for row in rows:
        row["psnr_db"] = psnr(images[row["exporter"]], images["sdonnx"]) if row["exporter"] != "sdonnx" else None
        note("exporters", row)
    assert np.std(images["sdonnx"]) > 0.02
    assert all(row["psnr_db"] > 45 for row in rows if row["psnr_db"] is not None), rows
