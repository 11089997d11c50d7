"""Measure every quantization type on an exported pipeline: error of the denoiser, images, bytes and milliseconds.

    python lab/measure_quantization.py ONNX --json docs/results/quantization-cpu.json
    python lab/measure_quantization.py ONNX --provider cuda --captions 2000 --json quantization-gpu.json

On a CPU all graphs are in float32, so that the only difference to the reference is the quantization. On a GPU they are
in fp16, which is a row of its own, and the reference is in float32. The denoiser's error is the largest over recorded
calls of the reference. With --captions, which is for trained samples, the images of held-out captions are judged; the
noise of each is the same for all types. Milliseconds are measured for a step with guidance and the scheduler, on a GPU.
Types that differ only in their names, as weight-only types with two formats of activations do, are measured once:
"equal_to" names the first of them. `lab/write_quantization_tables.py` writes the tables of the documentation.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sdonnx.environment_record import environment
from sdonnx.folder.pipeline_folder import ONNX_MODEL, ONNX_WEIGHTS, PipelineFolder
from sdonnx.folder.prompt_file import PROMPTS, read_prompts
from sdonnx.metrics import psnr, relative_error
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.precision_search.calibrate import calibrate
from sdonnx.precision_search.quantization_trials import judged_captions
from sdonnx.precision_search.record_inputs import Recording, run_probe
from sdonnx.precision_search.search_options import METHODS, ProbeSettings
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.quantization.quantization_types import TYPES, QuantizationType
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.sample.shapes.shape_judge import held_out_captions

_CAPTION_STEPS = 25  # as in the training's record
_TIMED_STEPS = (2, 42)


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
    parser.add_argument("--provider", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--captions", type=int, default=0, help="number of held-out captions to judge")
    options = parser.parse_args()
    prompts = PROMPTS[:2] if options.prompts is None else read_prompts(options.prompts)
    settings = ProbeSettings(tuple(prompts), options.steps, options.size)
    record: dict[str, Any] = {
        "pipeline": options.name or options.exported.resolve().name,
        "settings": {
            "prompts": list(prompts),
            "steps": options.steps,
            "size": options.size,
            "seed": 0,
            "calibration_method": options.calibration_method,
            "provider": options.provider,
            "captions": options.captions,
        },
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "types": {},
    }
    with tempfile.TemporaryDirectory() as work:
        types = [TYPES[name] for name in options.types]
        method, provider = options.calibration_method, options.provider
        for name, row in measure(options.exported, Path(work), settings, types, method, provider, options.captions):
            record["types"][name] = row
            # After each type, so that a run that is stopped leaves what it has measured.
            options.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(
    exported: Path,
    work: Path,
    settings: ProbeSettings,
    types: list[QuantizationType],
    method: str,
    provider: str,
    captions: int,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the measurements of each type, first of the reference, "float32".

    Args:
        exported: the exported pipeline.
        work: an empty folder.
        settings: the images of the error, the PSNR and the calibration.
        types: the types.
        method: the method of the calibration.
        provider: "cpu", or "cuda", where a row "float16" is added.
        captions: number of held-out captions to judge.
    """
    denoiser = family_of(PipelineFolder.open(exported)).with_role(Role.DENOISER).name
    prompts = held_out_captions(captions, settings.seed)
    is_gpu = provider == "cuda"
    measured: dict[QuantizationType, tuple[str, dict[str, Any]]] = {}
    reference = work / "float32"
    optimize_folder(exported, reference, provider=provider)
    recorded = run_probe(reference, provider, settings)
    row = _sizes(reference, denoiser) | _drawn(reference, provider, prompts)
    print("float32", row, flush=True)
    yield "float32", row
    for kind in [None, *types] if is_gpu else types:
        name = "float16" if kind is None else kind.name
        nameless = None if kind is None else replace(kind, name="")
        if nameless in measured:
            first, row = measured[nameless]
            yield name, row | {"equal_to": first}
            continue
        config = None if kind is None else QuantizationConfig(kind)
        scales = None
        if kind is not None and kind.is_static:
            request = OptimizeRequest(provider, quantization=config, scales={})
            scales = calibrate(exported, request, settings, method)
        folder = work / name
        report = optimize_folder(
            exported, folder, provider=provider, float16=is_gpu, quantization=config, scales=scales
        )
        found = run_probe(folder, provider, settings, record=False)
        row = _sizes(folder, denoiser)
        if kind is not None:
            (quantized,) = report.components[denoiser].quantized.values()
            row["weights"] = len(quantized["modules"])
        row |= {
            "error": _error(reference, folder, denoiser, recorded, provider),
            "psnr_db": _decibels(recorded, found),
        }
        row |= _drawn(folder, provider, prompts)
        if nameless is not None:
            measured[nameless] = (name, row)
        print(name, row, flush=True)
        yield name, row


def _drawn(folder: Path, provider: str, captions: Sequence[str]) -> dict[str, Any]:
    """Return the accuracy of a folder's images, by measure, and on a GPU the milliseconds of a step."""
    measured: dict[str, Any] = {}
    with OrtDiffusionPipeline.from_pretrained(folder, provider) as pipeline:
        pipeline.set_progress_bar_config(disable=True)
        if captions:
            measured["accuracy"] = judged_captions(pipeline, captions, _CAPTION_STEPS, 0)
        if provider == "cuda":
            measured["step_ms"] = _step_ms(pipeline)
    return measured


def _step_ms(pipeline: OrtDiffusionPipeline) -> float:
    """Return the milliseconds of a step at the pipeline's size: the median of what further steps of an image take."""

    def seconds(steps: int) -> float:
        start = time.perf_counter()
        pipeline(PROMPTS[0], num_inference_steps=steps, output_type="latent", seed=0)
        return time.perf_counter() - start

    few, many = _TIMED_STEPS
    for steps in _TIMED_STEPS:
        seconds(steps)  # captures
    times = [seconds(many) - seconds(few) for _ in range(9)]
    return round(statistics.median(times) / (many - few) * 1e3, 4)


def _sizes(folder: Path, denoiser: str) -> dict[str, Any]:
    return {"bytes": (folder / denoiser / ONNX_WEIGHTS).stat().st_size}


def _error(reference: Path, folder: Path, denoiser: str, recorded: Recording, provider: str) -> float:
    device = device_for(provider)
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
