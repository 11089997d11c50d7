"""The float32 folder that a search or a calibration runs, and the device that runs it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from sdonnx.errors import ProviderError
from sdonnx.optimize.exported_pipeline import ExportedPipeline
from sdonnx.optimize.optimize_request import OptimizeRequest, ProgressCallback
from sdonnx.optimize.optimizer import write_optimized
from sdonnx.precision.policy import Precision
from sdonnx.precision_search.fp16_emulation import write_emulated
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.runtime.device.device import Device, device_for

__all__ = ["probe_device", "runnable", "wide_request", "write_wide"]


def probe_device(provider: str = "cuda") -> Device:
    """Return the GPU, or the CPU if there is no GPU or the folder is for the CPU."""
    try:
        return device_for(provider)
    except ProviderError:
        return device_for("cpu")


def runnable(folder: Path, out: Path, components: Collection[str], device: Device, provider: str = "cuda") -> Path:
    """Return a folder that a device runs: the folder itself, or its equivalent in `out`.

    Args:
        folder: an optimized folder.
        out: where to write the equivalent.
        components: names of the components.
        device: the device.
        provider: the execution provider that the folder is for.
    """
    return folder if device.provider == provider else write_emulated(folder, out, components)


def write_wide(
    pipeline: ExportedPipeline, out: Path, request: OptimizeRequest, progress: ProgressCallback | None = None
) -> None:
    """Write the pipeline in float32 into the empty folder `out`, with the values that the request would compute."""
    write_optimized(pipeline, out, wide_request(request), progress).write(out)


def wide_request(request: OptimizeRequest, quantization: QuantizationConfig | None = None) -> OptimizeRequest:
    """Return a request for the same values in float32, with a quantization or without any."""
    return replace(
        request,
        precision=Precision(),
        inspect=False,
        scale_residual=request.precision.is_reduced,
        quantization=quantization,
        export_qdq=False,
        scales=None if quantization is None else request.scales,
    )
