"""Optimizes a folder to fp16 with what must stay out of it found by trial, and proves that it draws."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from sdonnx.automatic import AUTO
from sdonnx.automatic.emulation import write_emulated
from sdonnx.automatic.recording import Drawing, Recording, draw
from sdonnx.automatic.search import Search, search
from sdonnx.automatic.trial import Component
from sdonnx.claim import PARTIAL, beside
from sdonnx.errors import OptionError, PrecisionError, ProviderError
from sdonnx.folder import PipelineFolder, atomic_folder, finite
from sdonnx.optimize import (
    Exported,
    OptimizeReport,
    OptimizeRequest,
    Progress,
    is_upcast,
    open_exported,
    write_optimized,
)
from sdonnx.parity import psnr
from sdonnx.runtime.device import Device, device_for

__all__ = ["LEAST_PSNR_DB", "optimize_automatically"]

LEAST_PSNR_DB = 35.0
"""Of each image to the one drawn in float32; `python -m sdonnx verify` asks for as much."""


def optimize_automatically(
    source: Path,
    out: Path,
    request: OptimizeRequest,
    drawing: Drawing | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    told: Callable[[str], None] = lambda text: None,
) -> OptimizeReport:
    """Optimize the ONNX pipeline in `source` to fp16, keep out of it what must be, and write it to `out`.

    Args:
        source: a folder of ONNX components.
        out: the folder to write.
        request: what is asked for; `AUTO` among `force_fp32_ops` may be left out, and the others are kept anyway.
        drawing: what is drawn to find it.
        overwrite: replace `out` if a pipeline is there.
        progress: told of each component that is written.
        told: told what happens else.

    Returns:
        The report, of which `automatic` says what was found.

    Raises:
        PrecisionError: the pipeline draws NaN in float32, or no set of operators makes fp16 draw what float32 does.
        SdonnxError: an option or the folder cannot be used, or the output cannot be written.
    """
    drawing = drawing or Drawing()
    out = out.resolve() if out.name in ("", "..") else out
    if not request.float16:
        raise OptionError(f"--force_fp32_ops {AUTO} without --float16", "both", "add --float16")
    given = tuple(each for each in request.force_fp32_ops if each != AUTO)
    request = replace(request, force_fp32_ops=given)
    exported = open_exported(source, request)
    names = [spec.name for spec in exported.family.components]
    device = _device()
    start = time.perf_counter()
    with atomic_folder(out, overwrite, [source]) as partial:
        # Beside the output and under its lock, so that the next run removes what a killed one leaves.
        work = beside(partial.parent / out.name, PARTIAL)
        try:
            wide = work / "wide"
            wide.mkdir()
            measured = replace(request, float16=False, force_fp32_ops=(), bfloat16=False, inspect=False, scaled=True)
            write_optimized(exported, wide, measured, progress).write(wide)
            told("drawing in float32")
            recorded = draw(_runnable(wide, work / "drawn", names, device), device.provider, drawing)
            if not all(np.isfinite(image).all() for image in recorded.images):
                raise PrecisionError(
                    "images hold NaN or infinity in float32 too",
                    "a pipeline that draws in float32",
                    f"leave out --force_fp32_ops {AUTO}",
                )
            found = _searched(exported, wide, recorded, device, request, told)
            shutil.rmtree(wide)
            kept = dict(exported.overrides)
            for name, searched in found.items():
                kept[name] = (*kept[name], *(each.pattern for each in searched.kept))
            listed = tuple(f"{name}:{pattern}" for name, patterns in kept.items() for pattern in patterns)
            final = replace(request, force_fp32_ops=listed)
            report = write_optimized(replace(exported, overrides=kept), partial, final, progress)
            report.write(partial)
            told("drawing in fp16")
            proof = draw(_runnable(partial, work / "proof", names, device), device.provider, drawing, record=False)
            decibels = [_require_same(*each) for each in zip(proof.images, recorded.images, strict=True)]
            report = replace(report, automatic=_report(drawing, device, found, decibels, time.perf_counter() - start))
            report.write(partial)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return report


def _device() -> Device:
    """Return the GPU that the folder is for, or the CPU where there is none."""
    try:
        return device_for("cuda")
    except ProviderError:
        return device_for("cpu")


def _runnable(folder: Path, out: Path, names: list[str], device: Device) -> Path:
    return folder if device.provider == "cuda" else write_emulated(folder, out, names)


def _searched(
    exported: Exported,
    wide: Path,
    recorded: Recording,
    device: Device,
    request: OptimizeRequest,
    told: Callable[[str], None],
) -> dict[str, Search]:
    """Search each component that computes in fp16 and was called."""
    found = {}
    opened = PipelineFolder.open(wide)
    for spec in exported.family.components:
        feeds = recorded.feeds.get(spec.name, [])
        if is_upcast(exported.family, spec, opened.config(spec.name)) or not feeds:
            continue
        told(f"{spec.name}: what goes beyond fp16")
        component = Component(wide / spec.name, spec, feeds, device, request.fallback)
        found[spec.name] = search(component, exported.overrides[spec.name])
    return found


def _require_same(image: Any, reference: Any) -> float:
    """Return the PSNR in dB of an image to that in float32."""
    decibels = psnr(np.clip(image, 0, 1), np.clip(reference, 0, 1))
    if decibels < LEAST_PSNR_DB:
        raise PrecisionError(
            f"an image in fp16 is {decibels:.1f} dB from that in float32, although each component is right by itself",
            f"{LEAST_PSNR_DB:g} dB at least",
            "keep more in float32: --force_fp32_ops auto and what you suspect",
        )
    return decibels


def _report(
    drawing: Drawing, device: Device, found: dict[str, Search], decibels: list[float], seconds: float
) -> dict[str, Any]:
    """Return what the report says of it; no number in it is infinite, which JSON does not know."""
    return {
        "drawing": asdict(drawing),
        "provider": device.provider,
        "emulated": device.provider == "cpu",
        "psnr_db": finite(decibels),
        "seconds": round(seconds, 2),
        "components": {name: finite(asdict(each)) for name, each in found.items()},
    }
