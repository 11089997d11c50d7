"""Calibrate the scales of activations: run the pipeline in float32 and measure what each matmul reads.

The measurement is deterministic: the same pipeline, prompts, steps and provider lead to the same scales.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.errors import OptionError, PrecisionError
from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.graph.edit import constant, insert
from sdonnx.optimize.exported_pipeline import open_exported, quantization_policies
from sdonnx.optimize.optimize_request import OptimizeRequest, ProgressCallback
from sdonnx.precision_search.record_inputs import Feeds, probe_device, run_graph, run_probe, runnable, write_wide
from sdonnx.precision_search.search_options import METHODS, ProbeSettings
from sdonnx.quantization.quantization_config import QuantizationPolicy
from sdonnx.quantization.quantization_types import NumberFormat
from sdonnx.quantization.quantize_weights import weighted_nodes
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph

__all__ = ["Activations", "calibrate", "chosen_magnitude"]

# Of the largest magnitudes of all recorded calls: a few calls with outliers do not decide.
_PERCENTILE = 99.0

# Shares of the largest magnitude that are tried for the smallest squared error.
_SHARES = np.linspace(0.3, 1.0, 71)

# Numbers of each value and call that the squared error is computed from, evenly spaced.
_SAMPLES = 512

_MEASURED = "calibration.onnx"


@dataclass
class Activations:
    """What a matmul reads in the recorded calls.

    Attributes:
        most: largest magnitude of each call.
        samples: some of the numbers of all calls; empty unless they are needed.
    """

    most: list[float] = field(default_factory=list)
    samples: list[np.ndarray[Any, Any]] = field(default_factory=list)


def calibrate(
    source: Path,
    request: OptimizeRequest,
    settings: ProbeSettings,
    method: str = "max",
    progress: ProgressCallback | None = None,
) -> dict[str, dict[str, float]]:
    """Return the largest magnitude to represent of the activations that each module reads, by component and module.

    Args:
        source: the exported pipeline.
        request: the options. Only modules of types with calibrated scales are measured.
        settings: the images to generate.
        method: one of METHODS.
        progress: callback for progress.

    Raises:
        PrecisionError: a value is NaN or infinite, or activations are always zero.
        SdonnxError: an option or the folder cannot be used.
    """
    if method not in METHODS:
        raise OptionError(f"the calibration method {method!r}", f"one of {', '.join(METHODS)}")
    pipeline = open_exported(source, request)
    family = pipeline.family
    policies = quantization_policies(request, family)
    device = probe_device(request.provider)
    work = Path(tempfile.mkdtemp(prefix="sdonnx-calibration-"))
    try:
        wide = work / "wide"
        wide.mkdir()
        write_wide(pipeline, wide, request, progress)
        folder = runnable(wide, work / "recorded", [spec.name for spec in family.components], device, request.provider)
        if progress is not None:
            progress("generating images to calibrate", 0, 0)
        recorded = run_probe(folder, device.provider, settings)
        found = {}
        for spec in family.components:
            if policies[spec.name].is_active and recorded.feeds.get(spec.name):
                activations = _measured(
                    wide / spec.name, policies[spec.name], recorded.feeds[spec.name], device, method
                )
                found[spec.name] = {
                    path: chosen_magnitude(each, method, number_format, f"{spec.name}:{path}")
                    for path, (each, number_format) in activations.items()
                }
        return found
    finally:
        shutil.rmtree(work, ignore_errors=True)


def chosen_magnitude(activations: Activations, method: str, number_format: NumberFormat, name: str) -> float:
    """Return the largest magnitude that the scale of a matmul's activations represents.

    Args:
        activations: what was measured.
        method: one of METHODS: the largest magnitude, a percentile of the largest of each call, or that with the
            smallest squared error of the rounded numbers.
        number_format: the format of the activations.
        name: the component and module, for errors.

    Raises:
        PrecisionError: a value is NaN or infinite, or all are zero.
    """
    most = np.array(activations.most, np.float64)
    if not np.isfinite(most).all():
        raise PrecisionError(
            f"{name} reads NaN or infinity while it is calibrated",
            "a pipeline that generates images in float32",
            "generate an image with the exported folder in float32 to see it, or take a dynamic type",
        )
    if not most.max(initial=0) > 0:
        raise PrecisionError(
            f"{name} reads only zeros while it is calibrated, whose scale is zero",
            "activations of some size",
            'leave it out with {"modules": {"' + name + '": "none"}}, or calibrate with other prompts',
        )
    if method == "percentile":
        return float(np.percentile(most, _PERCENTILE))
    if method == "max":
        return float(most.max())
    numbers = np.concatenate(activations.samples).astype(np.float32)
    errors = [_squared_error(numbers, number_format, most.max() * share) for share in _SHARES]
    return float(most.max() * _SHARES[int(np.argmin(errors))])


def _squared_error(numbers: np.ndarray[Any, Any], number_format: NumberFormat, most: float) -> float:
    scale = np.float32(most / number_format.max_value)
    restored = number_format.rounded((numbers / scale).astype(np.float32)).astype(np.float32) * scale
    return float(np.mean(np.square(restored - numbers), dtype=np.float64))


def _measured(
    folder: Path, policy: QuantizationPolicy, feeds: Sequence[Feeds], device: Device, method: str
) -> dict[str, tuple[Activations, NumberFormat]]:
    """Return what the matmuls of calibrated types of a component read, by module, with the formats."""
    model = ir.load(folder / ONNX_MODEL)
    readers: dict[ir.Value, dict[str, NumberFormat]] = {}
    for each in weighted_nodes(model.graph):
        found, x = policy.type_of(each.paths), each.node.inputs[0]
        if found is not None and found.is_static and found.activations is not None and x is not None:
            names = each.paths or (str(each.weight.name),)
            readers.setdefault(x, {}).update(dict.fromkeys(names, found.activations))
    if not readers:
        return {}
    values = list(readers)
    _add_measurements(model, values, samples=method == "mse")
    results = {index: Activations() for index in range(len(values))}
    for outputs in _run(folder, model, feeds, device):
        for index, found_here in results.items():
            found_here.most.append(float(outputs["most"][index]))
            if method == "mse":
                found_here.samples.append(outputs[f"samples.{index}"][:_SAMPLES])
    return {
        path: (results[index], number_format)
        for index, value in enumerate(values)
        for path, number_format in readers[value].items()
    }


def _add_measurements(model: ir.Model, values: Collection[ir.Value], *, samples: bool) -> None:
    """Replace the outputs by `most`, the largest magnitude of each value, and `samples.I`, some of its numbers."""
    graph = model.graph
    end = ir.node("Identity", [next(iter(values))])
    graph.append(end)
    whole, first = constant(graph, [-1], np.int64, "flat"), constant(graph, [0], np.int64, "first_axis")
    one, count = constant(graph, [1], np.int64, "one_step"), constant(graph, [_SAMPLES], np.int64, "samples")
    last = constant(graph, [np.iinfo(np.int64).max], np.int64, "last")
    most, outputs = [], []
    for index, value in enumerate(values):
        flat = insert(end, "Reshape", [value, whole])
        most.append(insert(end, "ReduceMax", [insert(end, "Abs", [flat]), first], {"keepdims": 1}, shape=[1]))
        if samples:
            size = insert(end, "Shape", [flat], dtype=ir.DataType.INT64, shape=[1])
            step = insert(end, "Max", [insert(end, "Div", [size, count], shape=[1]), one], shape=[1])
            picked = insert(end, "Slice", [flat, first, last, first, step], shape=[f"samples_{index}"])
            picked.name = f"samples.{index}"
            outputs.append(picked)
    joined = insert(end, "Concat", most, {"axis": 0}, shape=[len(most)])
    joined.name = "most"
    graph.remove(end)
    graph.outputs.clear()
    graph.outputs.extend([joined, *outputs])


def _run(folder: Path, model: ir.Model, feeds: Sequence[Feeds], device: Device) -> list[Feeds]:
    def results(graph: Graph) -> list[Feeds]:
        return [graph.run({name: each[name] for name in graph.inputs}) for each in feeds]

    return run_graph(model, folder / _MEASURED, device, results)
