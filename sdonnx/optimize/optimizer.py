"""Optimize a folder of ONNX components for an execution provider."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdonnx._version import __version__
from sdonnx.compose import ControlPlan
from sdonnx.errors import refusing
from sdonnx.folder.pipeline_folder import MODEL_INDEX, PipelineFolder, atomic_folder, copy_folder
from sdonnx.fusions.sdonnx_domain.use_kernels import default_sizes
from sdonnx.models.control_networks import control_residuals
from sdonnx.models.registry import family_of
from sdonnx.models.spec import ComponentSpec, Role
from sdonnx.optimize.component_passes import FUSION_PASSES, PASSES, ComponentJob, run_passes
from sdonnx.optimize.exported_pipeline import (
    EXPECTED_GRAPH,
    ExportedPipeline,
    open_component,
    open_exported,
    quantization_policies,
)
from sdonnx.optimize.extra_graphs import Inspector
from sdonnx.optimize.optimize_request import OptimizeRequest, ProgressCallback
from sdonnx.optimize.report import ComponentReport, OptimizeReport
from sdonnx.precision.policy import Precision
from sdonnx.quantization.quantization_config import QuantizationConfig, write_calibration

__all__ = ["fusion_reports", "optimize_folder", "optimize_request", "write_component", "write_optimized"]

_PACKAGES = ("onnx", "onnx_ir", "onnxscript", "numpy")


def optimize_folder(
    source: Path,
    out: Path,
    *,
    provider: str = "cuda",
    float16: bool = False,
    force_fp32_ops: Sequence[str] = (),
    bfloat16: bool = False,
    norm_scale: Sequence[str] = (),
    attention_layout: str = "unpacked",
    disabled: Collection[str] = (),
    inspect: bool = False,
    kernels: str = "auto",
    quantization: QuantizationConfig | None = None,
    export_qdq: bool = False,
    scales: Mapping[str, Mapping[str, float]] | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> OptimizeReport:
    """Optimize the ONNX pipeline in `source` for an execution provider and write it to `out`.

    Args:
        source: a folder of ONNX components, as `export_pipeline` and optimum write it.
        out: the folder to write.
        provider: execution provider to target, "cuda" or "cpu".
        float16: convert to float16.
        force_fp32_ops: nodes that stay out of float16, such as `unet:MultiHeadAttention` or `unet:mid_block.*`.
        bfloat16: compute these nodes in bfloat16 where kernels exist.
        norm_scale: factors of the values that group norms read, such as `vae_decoder:1/128`; 1 for none.
        attention_layout: layout of the inputs of MultiHeadAttention: "unpacked", "packed_kv" or "packed_qkv".
        disabled: names of fusions to leave out.
        inspect: also write each graph as ONNX Runtime's own optimizations leave it.
        kernels: "auto" to also write each graph with the operators of `sdonnx-kernels`, for "cuda" in float16; "none"
            not to.
        quantization: which modules are quantized, and how; None for none.
        export_qdq: also write each quantized component in standard operators, for other run-times.
        scales: largest magnitude of the activations that each module reads, by component and module, for types with
            calibrated scales.
        overwrite: replace the pipeline in `out`, if there is one.
        progress: callback for progress.

    Raises:
        SdonnxError: an option or the folder cannot be used, or the output cannot be written.
    """
    precision = Precision.from_flags(float16, bfloat16, force_fp32_ops, norm_scale)
    disabled_names = tuple(sorted(disabled))
    request = OptimizeRequest(
        provider,
        precision,
        attention_layout,
        disabled_names,
        inspect,
        kernels=kernels,
        quantization=quantization,
        export_qdq=export_qdq,
        scales=scales,
    )
    return optimize_request(source, out, request, overwrite, progress)


def optimize_request(
    source: Path,
    out: Path,
    request: OptimizeRequest,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> OptimizeReport:
    """Optimize a folder as `optimize_folder` does, with the options in one object.

    Everything that can be checked is checked before anything is written.
    """
    pipeline = open_exported(source, request)
    with atomic_folder(out, overwrite, [source]) as partial:
        report = write_optimized(pipeline, partial, request, progress)
        report.write(partial)
    return report


def write_optimized(
    pipeline: ExportedPipeline, out: Path, request: OptimizeRequest, progress: ProgressCallback | None = None
) -> OptimizeReport:
    """Write an optimized pipeline into the empty folder `out`, without its report, and return the report.

    The opened components of `pipeline` are used up, so that the memory of each is freed after it is written.

    Raises:
        SdonnxError: an option or the folder cannot be used.
    """
    folder, family = pipeline.folder, pipeline.family
    inspector = Inspector(request.provider) if request.inspect else None
    reports = {
        spec.name: write_component(pipeline, spec, out / spec.name, request, progress, inspector)
        for spec in family.components
    }
    for name, _ in family.extras:
        copy_folder(folder.component(name), out / name)
    shutil.copyfile(folder.path / MODEL_INDEX, out / MODEL_INDEX)
    if request.scales:
        write_calibration(out, request.scales)
    return OptimizeReport(
        __version__,
        {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _PACKAGES},
        family.name,
        request.provider,
        request.precision.dtype,
        request.attention_layout,
        list(request.disabled),
        reports,
        request.precision.flags()
        | ({"kernels": request.kernels} if request.suits_own_kernels else {})
        | ({} if request.quantization is None else {"quantize": request.quantization.as_json()})
        | ({"export_qdq": True} if request.export_qdq else {}),
        quantization_search=None if request.quantization_search is None else dict(request.quantization_search),
    )


def write_component(
    pipeline: ExportedPipeline,
    spec: ComponentSpec,
    out: Path,
    request: OptimizeRequest,
    progress: ProgressCallback | None = None,
    inspector: Inspector | None = None,
) -> ComponentReport:
    """Write an optimized component into the new folder `out`, and return its report.

    Raises:
        SdonnxError: an option or the component cannot be used.
    """
    policy = request.precision.policies([each.name for each in pipeline.family.components])[spec.name]
    job = ComponentJob(spec, pipeline.take(spec), request, out, policy, inspector, progress)
    job.quantization = quantization_policies(request, pipeline.family)[spec.name]
    job.controls = _controls_of(pipeline, spec, job.opened.config)
    return run_passes(PASSES, job)


def _controls_of(pipeline: ExportedPipeline, spec: ComponentSpec, config: Mapping[str, Any]) -> ControlPlan | None:
    """Return how ControlNets or T2I-Adapters change a component's served graphs."""
    family = pipeline.family
    if spec.role is Role.CONTROLNET:
        unet = pipeline.folder.config(family.with_role(Role.DENOISER).name)
        is_first = spec == family.with_role(Role.CONTROLNET)
        return ControlPlan(adds=not is_first, latent_size=default_sizes(unet)[0])
    residuals = control_residuals(family, config) if spec.role is Role.DENOISER else ()
    return ControlPlan(residuals, to_blocks=family.has(Role.T2I_ADAPTER)) if residuals else None


def fusion_reports(folder: PipelineFolder, provider: str) -> dict[str, ComponentReport]:
    """Return the effect of fusing each component of an exported pipeline; nothing is written.

    Raises:
        SdonnxError: the provider or the folder cannot be used.
    """
    request, family = OptimizeRequest(provider), family_of(folder)
    reports = {}
    for spec in family.components:
        with refusing(folder.path / spec.name, *EXPECTED_GRAPH):
            opened = open_component(folder, family, spec)
        reports[spec.name] = run_passes(FUSION_PASSES, ComponentJob(spec, opened, request))
    return reports
