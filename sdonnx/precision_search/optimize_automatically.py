"""Optimize a folder to float16, find the nodes that must stay out of it, and prove that the images are right.

The factor of the inputs of an autoencoder's group norms is chosen by the measured ranges of these values.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.errors import OptionError, PrecisionError
from sdonnx.folder.lock import PARTIAL, hidden_folder
from sdonnx.folder.pipeline_folder import ONNX_MODEL, ONNX_WEIGHTS, PipelineFolder, atomic_folder, finite
from sdonnx.graph.edit import tensor_of
from sdonnx.graph.tensors import lazy, read
from sdonnx.metrics import psnr
from sdonnx.models.spec import ComponentSpec, Config, Family, Role
from sdonnx.optimize.exported_pipeline import open_exported
from sdonnx.optimize.optimize_request import OptimizeRequest, ProgressCallback
from sdonnx.optimize.optimizer import write_optimized
from sdonnx.optimize.report import OptimizeReport
from sdonnx.precision.group_norm_scaling import scalable_values, scale_group_norms
from sdonnx.precision.policy import MIN_NORM_SCALE, PrecisionPolicy
from sdonnx.precision_search.component_trials import Component
from sdonnx.precision_search.record_inputs import Recording, probe_device, run_probe, runnable, write_wide
from sdonnx.precision_search.search import Search, search
from sdonnx.precision_search.search_options import AUTO, ProbeSettings
from sdonnx.runtime.device.device import Device

__all__ = [
    "MIN_PSNR_DB",
    "MeasuredScale",
    "flag_of",
    "measured_scale",
    "optimize_automatically",
    "searched_scale",
    "write_scaled",
]

# Values of other images may be 8 times the largest one that was measured: 65504 / 8.
_MAX_MEASURED = 8188.0

_AUTOENCODERS = frozenset({Role.IMAGE_ENCODER, Role.IMAGE_DECODER})


@dataclass(frozen=True)
class MeasuredScale:
    """Factor of the inputs of a component's group norms.

    Attributes:
        scale: the factor, a power of two; 1 if the values fit as they are.
        value: name of the largest value that would be scaled.
        most: its maximum magnitude.
    """

    scale: float
    value: str
    most: float


def flag_of(name: str, scale: float) -> str:
    """Return a component's factor as `--norm_scale` accepts it: `vae_decoder:1/128`."""
    return f"{name}:{Fraction(scale)}"


def measured_scale(component: Component, kept: Collection[str], largest: float = 1.0) -> MeasuredScale | None:
    """Return the factor with which the values fit into fp16, None if they cannot be scaled.

    Args:
        component: the component without scaling.
        kept: patterns of nodes that stay out of fp16.
        largest: the largest factor to choose; images that were not measured may need it.
    """
    names = scalable_values(component.model())
    ranges = [each for each in component.ranges(tuple(kept)) if each.place.name in names]
    if not ranges:
        return None
    worst = max(ranges, key=lambda each: each.most)
    scale = largest
    while scale > MIN_NORM_SCALE and math.isfinite(worst.most) and worst.most * scale > _MAX_MEASURED:
        scale /= 2
    return MeasuredScale(scale, worst.place.name, worst.most)


def searched_scale(
    component: Component, spec: ComponentSpec, config: Config, policy: PrecisionPolicy
) -> tuple[float, MeasuredScale | None] | None:
    """Return the factor with which a component is searched, and its measurement if the flags do not set the factor.

    Returns:
        None if the component stays in float32.
    """
    exceeds = spec.exceeds_float16(config)
    if policy.norm_scale is not None:
        return None if exceeds and policy.norm_scale == 1 else (policy.norm_scale, None)
    if exceeds and spec.norm_scale is None:
        return None
    if spec.role not in _AUTOENCODERS:
        return (spec.norm_scale or 1.0) if exceeds else 1.0, None
    found = measured_scale(component, policy.float32, (spec.norm_scale or 1.0) if exceeds else 1.0)
    if found is None:
        return None if exceeds else (1.0, None)
    return found.scale, found


def write_scaled(folder: Path, scale: float) -> Path:
    """Write a component's graph in float32 with scaled values into a folder in `folder`, and return that folder."""
    model = ir.load(folder / ONNX_MODEL)
    if (reason := scale_group_norms(model, scale).reason) is not None:
        raise ValueError(f"{folder} cannot be scaled: {reason}")  # the graph was optimized with this factor before
    for value in model.graph.initializers.values():
        tensor = tensor_of(value)
        # onnx_ir does not read a file with hard links, which `write_emulated` makes.
        value.const_value = lazy(partial(read, tensor), tensor.dtype, tuple(tensor.shape.numpy()), value.name)
    out = folder / "scaled"
    out.mkdir()
    ir.save(model, out / ONNX_MODEL, external_data=ONNX_WEIGHTS)
    return out


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
