"""`--force_fp32_ops auto` with a GPU's kernels: plain fp16 returns NaN, auto generates an image."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from support.recording import Note

from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.precision.policy import Precision
from sdonnx.precision_search.optimize_automatically import optimize_automatically
from sdonnx.runtime.pipeline import NotFiniteWarning, OrtDiffusionPipeline
from sdonnx.sample.write_sample import write_sample

CASES = [
    ("attention", "tiny", "unet", "unet:MultiHeadAttention"),
    ("vae", "tiny", "vae_decoder", None),
    ("t5", "pixart-tiny", "text_encoder", None),
    pytest.param("attention", "sd21", "unet", "unet:MultiHeadAttention", marks=pytest.mark.weekly),
    pytest.param("vae", "sd21", "vae_decoder", None, marks=pytest.mark.weekly),
]


def generates_finite_image(folder: Path) -> bool:
    """Return whether an image of the folder contains neither NaN nor Inf."""
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        image = pipeline("a fox", num_inference_steps=2, seed=0, output_type="np").images[0]
    return bool(np.isfinite(image).all())


@pytest.mark.parametrize(("kind", "arch", "component", "by_hand"), CASES)
def test_auto_avoids_overflow(
    kind: str, arch: str, component: str, by_hand: str | None, tmp_path: Path, note: Note
) -> None:
    write_sample(arch, tmp_path / "torch", overflow=kind)
    export_pipeline(tmp_path / "torch", tmp_path / "onnx")
    optimize_folder(tmp_path / "onnx", tmp_path / "plain", float16=True)
    with pytest.warns(NotFiniteWarning, match="force_fp32_ops auto"):
        assert not generates_finite_image(tmp_path / "plain")
    if by_hand is not None:
        optimize_folder(tmp_path / "onnx", tmp_path / "hand", float16=True, force_fp32_ops=[by_hand])
        assert generates_finite_image(tmp_path / "hand")
    start = time.monotonic()
    report = optimize_automatically(
        tmp_path / "onnx", tmp_path / "auto", OptimizeRequest(precision=Precision("float16"))
    )
    seconds = time.monotonic() - start
    assert generates_finite_image(tmp_path / "auto")
    found = report.automatic
    assert found is not None
    note("overflow", {"pipeline": arch, "overflow": kind, **found, "seconds": round(seconds, 1)})
    assert not found["emulated"]
    for name, each in found["components"].items():
        assert bool(each["kept"]) == (name == component and kind != "vae")
        assert each["smallest"]
    if kind == "vae":  # it is scaled and needs nothing in float32
        assert report.components[component].norm_scale < 1
        return
    with_set, without = found["components"][component]["milliseconds"]
    assert with_set > 0
    assert without > 0
