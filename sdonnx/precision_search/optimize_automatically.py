"""Optimize a folder to float16, find the nodes that must stay out of it, and prove that the images are right."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from sdonnx.errors import OptionError, PrecisionError
from sdonnx.folder.lock import PARTIAL, hidden_folder
from sdonnx.folder.pipeline_folder import PipelineFolder, atomic_folder, finite
from sdonnx.metrics import psnr
from sdonnx.models.spec import Family
from sdonnx.optimize.exported_pipeline import open_exported
from sdonnx.optimize.optimize_request import OptimizeRequest, ProgressCallback
from sdonnx.optimize.optimizer import write_optimized
from sdonnx.optimize.report import OptimizeReport
from sdonnx.precision.policy import PrecisionPolicy
from sdonnx.precision_search.component_trials import Component
from sdonnx.precision_search.norm_scale import MeasuredScale, flag_of, searched_scale, write_scaled
from sdonnx.precision_search.probe_folder import probe_device, runnable, write_wide
from sdonnx.precision_search.probe_settings import AUTO, ProbeSettings
from sdonnx.precision_search.record_inputs import Recording, run_probe
from sdonnx.precision_search.search import Search, search
from sdonnx.runtime.device.device import Device

__all__ = ["MIN_PSNR_DB", "optimize_automatically"]

MIN_PSNR_DB = 35.0
"""Minimum PSNR of each image against the one generated in float32, as in `sdonnx verify`."""

MessageCallback = Callable[[str], None]


def optimize_automatically(
    source: Path,
    out: Path,
    request: OptimizeRequest,
    settings: ProbeSettings | None = None,
    *,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    on_message: MessageCallback = lambda text: None,
) -> OptimizeReport:
    """Optimize the ONNX pipeline in `source` to float16 with the necessary exceptions, and write it to `out`.

    Args:
        source: a folder of ONNX components.
        out: the folder to write.
        request: options, with a precision of float16. Its `keep_float32` is kept in addition to the nodes found.
        settings: images to generate for the search.
        overwrite: replace the pipeline in `out`, if there is one.
        progress: callback for the progress of writing a component.
        on_message: callback for other messages.

    Returns:
        The report. Its field `automatic` describes the search.

    Raises:
        PrecisionError: the pipeline generates NaN in float32, or no set of exceptions makes float16 agree with float32.
        SdonnxError: an option or the folder cannot be used, or the output cannot be written.
    """
    settings = settings or ProbeSettings()
    out = out.resolve() if out.name in ("", "..") else out
    if not request.precision.is_reduced:
        raise OptionError(f"--force_fp32_ops {AUTO} without --float16", "both", "add --float16")
    pipeline = open_exported(source, request)
    family = pipeline.family
    policies = request.precision.policies([spec.name for spec in family.components])
    device = probe_device()
    start = time.perf_counter()
    with atomic_folder(out, overwrite, [source]) as partial:
        # Next to the output and under its lock, so that the next run removes the folder if this one is killed.
        work = hidden_folder(partial.parent / out.name, PARTIAL)
        try:
            wide = work / "wide"
            wide.mkdir()
            write_wide(pipeline, wide, request, progress)
            on_message("generating in float32")
            recorded = run_probe(runnable(wide, work / "recorded", policies, device), device.provider, settings)
            if not all(np.isfinite(image).all() for image in recorded.images):
                raise PrecisionError(
                    "images contain NaN or infinity in float32 as well",
                    "a pipeline that generates images in float32",
                    f"leave out --force_fp32_ops {AUTO}",
                )
            found, scales = _search_components(family, wide, recorded, device, policies, on_message)
            shutil.rmtree(wide)
            kept = tuple(f"{name}:{each}" for name in policies for each in _patterns(policies[name], found.get(name)))
            measured_scales = (flag_of(name, each.scale) for name, each in scales.items() if each.scale != 1)
            norm_scale = (*request.precision.norm_scale, *measured_scales)
            final = replace(request, precision=replace(request.precision, keep_float32=kept, norm_scale=norm_scale))
            plain, proven = replace(final, quantization=None, export_qdq=False, scales=None), partial
            if request.quantization is not None:  # the images of a quantized folder are others
                proven = work / "plain"
                proven.mkdir()
            report = write_optimized(open_exported(source, plain), proven, plain, progress)
            report.write(proven)
            on_message("generating in fp16")
            runs = runnable(proven, work / "proof", policies, device)
            proof = run_probe(runs, device.provider, settings, record=False)
            decibels = [_require_same(*each) for each in zip(proof.images, recorded.images, strict=True)]
            if request.quantization is not None:
                report = write_optimized(open_exported(source, final), partial, final, progress)
            seconds = time.perf_counter() - start
            report = replace(report, automatic=_report(settings, device, found, scales, decibels, seconds))
            report.write(partial)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return report


def _patterns(policy: PrecisionPolicy, found: Search | None) -> tuple[str, ...]:
    """Return the requested patterns of a component, then the patterns found."""
    return (*policy.float32, *(each.pattern for each in found.kept)) if found else policy.float32


def _search_components(
    family: Family,
    wide: Path,
    recorded: Recording,
    device: Device,
    policies: Mapping[str, PrecisionPolicy],
    on_message: MessageCallback,
) -> tuple[dict[str, Search], dict[str, MeasuredScale]]:
    """Search each component that computes in float16 and was called.

    Returns:
        The results of the searches, and the factors of the inputs of group norms that were chosen by measurements.
    """
    found, scales = {}, {}
    opened = PipelineFolder.open(wide)
    for spec in family.components:
        feeds = recorded.feeds.get(spec.name, [])
        if not feeds:
            continue
        on_message(f"{spec.name}: searching for values outside the range of fp16")
        policy = policies[spec.name]
        component = Component(wide / spec.name, spec, feeds, device, policy.fallback)
        chosen = searched_scale(component, spec, opened.config(spec.name), policy)
        if chosen is None:
            continue
        scale, measured = chosen
        if measured is not None:
            scales[spec.name] = measured
        if scale != 1:
            component = Component(write_scaled(wide / spec.name, scale), spec, feeds, device, policy.fallback)
        found[spec.name] = search(component, policy.float32)
    return found, scales


def _require_same(image: Any, reference: Any) -> float:
    """Return the PSNR in dB of an image against the one in float32."""
    decibels = psnr(np.clip(image, 0, 1), np.clip(reference, 0, 1))
    if decibels < MIN_PSNR_DB:
        raise PrecisionError(
            f"an image in fp16 has {decibels:.1f} dB to that in float32, although each component is right by itself",
            f"at least {MIN_PSNR_DB:g} dB",
            "keep more in float32: --force_fp32_ops auto and the operators or modules that you suspect",
        )
    return decibels


def _report(
    settings: ProbeSettings,
    device: Device,
    found: Mapping[str, Search],
    scales: Mapping[str, MeasuredScale],
    decibels: list[float],
    seconds: float,
) -> dict[str, Any]:
    """Return the report's section on the search, with None for infinite numbers, which JSON cannot represent."""
    return {
        "drawing": asdict(settings),
        "provider": device.provider,
        "emulated": device.provider == "cpu",
        "psnr_db": finite(decibels),
        "seconds": round(seconds, 2),
        "components": {name: finite(asdict(each)) for name, each in found.items()},
        "norm_scales": {name: finite(asdict(each)) for name, each in scales.items()},
    }
