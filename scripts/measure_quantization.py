"""Measure every quantization type on an exported pipeline: error of the denoiser, images, and bytes.

    python scripts/measure_quantization.py ONNX --json docs/results/quantization-cpu.json

Graphs are those of the CPU provider in float32, so that the only difference to the reference is the quantization. The
denoiser's error is the largest over recorded calls of the reference. Milliseconds are not measured: activations are
rounded by standard operators here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sdonnx.folder.pipeline_folder import ONNX_MODEL, ONNX_WEIGHTS, PipelineFolder
from sdonnx.folder.prompt_file import PROMPTS, read_prompts
from sdonnx.metrics import psnr, relative_error
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.optimize.request import OptimizeRequest
from sdonnx.precision_search.calibrate import calibrate
from sdonnx.precision_search.probe_settings import METHODS, ProbeSettings
from sdonnx.precision_search.record_inputs import Recording, run_probe
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.quantization.quantization_types import TYPES, QuantizationType
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exported", type=Path, help="the exported pipeline")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--name", default=None, help="the name of the pipeline in the file")
    parser.add_argument("--prompts", type=Path, help="a file with one prompt per line")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--size", type=int, default=None, help="pixels (default: the pipeline's)")
    parser.add_argument("--calibration_method", default="max", choices=METHODS)
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    options = parser.parse_args()
    prompts = PROMPTS[:2] if options.prompts is None else read_prompts(options.prompts)
    settings = ProbeSettings(tuple(prompts), options.steps, options.size)
    with tempfile.TemporaryDirectory() as work:
        rows = measure(
            options.exported, Path(work), settings, [TYPES[name] for name in options.types], options.calibration_method
        )
    options.json.write_text(
        json.dumps(
            {
                "pipeline": options.name or options.exported.resolve().name,
                "settings": {
                    "prompts": list(prompts),
                    "steps": options.steps,
                    "size": options.size,
                    "seed": 0,
                    "calibration_method": options.calibration_method,
                },
                "versions": {name: importlib.metadata.version(name) for name in ("onnxruntime", "onnx", "numpy")},
                "processor": platform.machine(),
                "types": rows,
            },
            indent=1,
        )
        + "\n"
    )


def measure(
    exported: Path, work: Path, settings: ProbeSettings, types: list[QuantizationType], method: str
) -> dict[str, dict[str, Any]]:
    """Return the measurements of each type by its name, and of the reference by "float32"."""
    denoiser = family_of(PipelineFolder.open(exported)).with_role(Role.DENOISER).name
    reference = work / "float32"
    optimize_folder(exported, reference, provider="cpu")
    recorded = run_probe(reference, "cpu", settings)
    rows: dict[str, dict[str, Any]] = {"float32": _sizes(reference, denoiser)}
    for kind in types:
        config = QuantizationConfig(kind)
        scales = None
        if kind.is_static:
            request = OptimizeRequest("cpu", quantization=config, scales={})
            scales = calibrate(exported, request, settings, method)
        folder = work / kind.name
        report = optimize_folder(exported, folder, provider="cpu", quantization=config, scales=scales)
        found = run_probe(folder, "cpu", settings, record=False)
        (quantized,) = report.components[denoiser].quantized.values()
        row = _sizes(folder, denoiser) | {"weights": len(quantized["modules"])}
        row |= {"error": _error(reference, folder, denoiser, recorded), "psnr_db": _decibels(recorded, found)}
        rows[kind.name] = row
        print(kind.name, row)
    return rows


def _sizes(folder: Path, denoiser: str) -> dict[str, Any]:
    return {"bytes": (folder / denoiser / ONNX_WEIGHTS).stat().st_size}


def _error(reference: Path, folder: Path, denoiser: str, recorded: Recording) -> float:
    device = device_for("cpu")
    graphs = [Graph(each / denoiser / ONNX_MODEL, device) for each in (folder, reference)]
    errors = []
    for feeds in recorded.feeds[denoiser]:
        ours, wide = (graph.run(feeds) for graph in graphs)
        errors += [relative_error(ours[name], wide[name]) for name in wide]
    return float(f"{max(errors):.4g}")


def _decibels(reference: Recording, found: Recording) -> list[float]:
    pairs = zip(found.images, reference.images, strict=True)
    return [round(float(psnr(np.clip(a, 0, 1), np.clip(b, 0, 1))), 1) for a, b in pairs]


if __name__ == "__main__":
    main()
