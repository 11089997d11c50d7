"""Optimize a folder of ONNX components for one provider."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

import sdonnx
from sdonnx.component import CONFIG, open_component
from sdonnx.compose import compose, shared_weights
from sdonnx.errors import FolderError, OptionError, ProviderError, refusing
from sdonnx.families import ComponentSpec, Family, Role, family_of
from sdonnx.folder import (
    MODEL_INDEX,
    ONNX_MODEL,
    ONNX_WEIGHTS,
    REPORT,
    SHARED_WEIGHTS,
    PipelineFolder,
    atomic_folder,
    hash_file,
)
from sdonnx.fusions import ATTENTION_LAYOUTS, DISABLING, PROVIDERS, fuse
from sdonnx.graph.passes import tidy
from sdonnx.inspection import Inspector
from sdonnx.interface import adapt_interface
from sdonnx.precision import ConvertPrecision, PrecisionPolicy, parse_overrides
from sdonnx.report import ComponentReport, OptimizeReport, report_of
from sdonnx.stream import scale_stream

__all__ = [
    "ComponentReport",
    "Exported",
    "OptimizeReport",
    "OptimizeRequest",
    "Progress",
    "fusion_reports",
    "is_upcast",
    "open_exported",
    "optimize_folder",
    "optimize_request",
    "write_optimized",
]

_IMAGE_ROLES = (Role.IMAGE_ENCODER, Role.IMAGE_DECODER)

_PACKAGES = ("onnx", "onnx_ir", "onnxscript", "numpy")

_GRAPH = ("a component that an exporter wrote", "export it again")

Progress = Callable[[str, int, int], None]
"""Told (what happens now, tensors written, tensors in all) while a component is optimized."""


def optimize_folder(
    source: Path,
    out: Path,
    *,
    provider: str = "cuda",
    float16: bool = False,
    force_fp32_ops: Sequence[str] = (),
    bfloat16: bool = False,
    attention_layout: str = "unpacked",
    disabled: Collection[str] = (),
    inspect: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> OptimizeReport:
    """Optimize the ONNX pipeline in `source` for a provider and write it to `out`.

    Args:
        source: a folder of ONNX components, as `export_pipeline` and optimum write it.
        out: the folder to write.
        provider: "cuda" or "cpu".
        float16: convert to fp16.
        force_fp32_ops: what stays in float32, as `unet:MultiHeadAttention` or `unet:mid_block.*`.
        bfloat16: what stays out of fp16 computes in bfloat16 in place of float32, where kernels exist.
        attention_layout: one of ATTENTION_LAYOUTS; see `sdonnx.fusions.stages`.
        disabled: fusions to leave out, of `sdonnx.fusions.DISABLING`.
        inspect: also write what ONNX Runtime itself makes of each graph, as `inspect.onnx` beside it.
        overwrite: replace `out` if a pipeline is there.
        progress: told what happens.

    Raises:
        SdonnxError: an option or the folder cannot be used, or the output cannot be written.
    """
    request = OptimizeRequest(
        provider, float16, tuple(force_fp32_ops), bfloat16, attention_layout, tuple(sorted(disabled)), inspect
    )
    return optimize_request(source, out, request, overwrite, progress)


@dataclass(frozen=True)
class OptimizeRequest:
    """What `optimize_folder` is asked for; its arguments say what each means.

    Attributes:
        provider: see there, as all that follows up to `inspect`.
        float16: likewise.
        force_fp32_ops: likewise.
        bfloat16: likewise.
        attention_layout: likewise.
        disabled: likewise.
        inspect: likewise.
        scaled: scale streams in float32 as it is done for fp16.
    """

    provider: str = "cuda"
    float16: bool = False
    force_fp32_ops: tuple[str, ...] = ()
    bfloat16: bool = False
    attention_layout: str = "unpacked"
    disabled: tuple[str, ...] = ()
    inspect: bool = False
    scaled: bool = False

    @property
    def fallback(self) -> ir.DataType:
        """What computes that stays out of fp16."""
        return ir.DataType.BFLOAT16 if self.bfloat16 else ir.DataType.FLOAT


def optimize_request(
    source: Path, out: Path, request: OptimizeRequest, overwrite: bool = False, progress: Progress | None = None
) -> OptimizeReport:
    """Optimize as `optimize_folder` does, what is asked for in one object."""
    exported = open_exported(source, request)
    with atomic_folder(out, overwrite, [source]) as partial:
        report = write_optimized(exported, partial, request, progress)
        report.write(partial)
    return report


@dataclass(frozen=True)
class Exported:
    """An exported pipeline that was looked at.

    Attributes:
        folder: where it is.
        family: its family.
        overrides: what stays out of fp16, of each component.
    """

    folder: PipelineFolder
    family: Family
    overrides: dict[str, tuple[str, ...]]


def open_exported(source: Path, request: OptimizeRequest) -> Exported:
    """Look at everything that can be wrong with a request and its input, before anything is written.

    Raises:
        SdonnxError: an option or the folder cannot be used.
    """
    if request.provider not in PROVIDERS:
        raise ProviderError(
            f"the provider {request.provider!r} is unknown", f"one of {', '.join(PROVIDERS)}", "pass one"
        )
    if request.attention_layout not in ATTENTION_LAYOUTS:
        layouts = ", ".join(ATTENTION_LAYOUTS)
        found = f"the attention layout {request.attention_layout!r} is unknown"
        raise OptionError(found, f"one of {layouts}", "pass one")
    if request.provider == "cpu" and request.float16:
        raise OptionError("float16 for the CPU", "float32, which the CPU's kernels have", "leave out --float16")
    if request.force_fp32_ops and not request.float16:
        raise OptionError("--force_fp32_ops without --float16", "both", "add --float16")
    if request.bfloat16 and not request.float16:
        raise OptionError("--bfloat16 without --float16", "both: it is for what stays out of fp16", "add --float16")
    for name in request.disabled:
        if name not in DISABLING:
            raise OptionError(f"the fusion {name!r} is unknown", f"one of {', '.join(DISABLING)}", "name one of these")
    folder = PipelineFolder.open(source)
    if (source / REPORT).exists():
        raise FolderError(f"{source} is optimized already", "an exported pipeline", "give the exported folder")
    family = family_of(folder)
    overrides = parse_overrides(request.force_fp32_ops, [spec.name for spec in family.components])
    for name, file in family.extras:
        folder.config(name, file)
    for spec in family.components:
        with refusing(folder.path / spec.name, *_GRAPH):
            open_component(folder, family, spec)
    return Exported(folder, family, overrides)


def write_optimized(
    exported: Exported, out: Path, request: OptimizeRequest, progress: Progress | None = None
) -> OptimizeReport:
    """Write an optimized pipeline into the empty folder `out`, all but its report, and return that.

    Raises:
        SdonnxError: an option or the folder cannot be used.
    """
    folder, family = exported.folder, exported.family
    inspector = Inspector(request.provider) if request.inspect else None
    reports = {}
    for spec in family.components:
        policy = PrecisionPolicy(float32=exported.overrides[spec.name], fallback=request.fallback)
        with refusing(folder.path / spec.name, *_GRAPH):
            reports[spec.name] = _optimize_component(
                folder, family, spec, out / spec.name, request, policy if request.float16 else None, progress
            )
        if inspector is not None:
            inspector.inspect(out / spec.name / ONNX_MODEL)
    for name, _ in family.extras:
        shutil.copytree(folder.component(name), out / name)
    shutil.copyfile(folder.path / MODEL_INDEX, out / MODEL_INDEX)
    return OptimizeReport(
        sdonnx.__version__,
        {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _PACKAGES},
        family.name,
        request.provider,
        "float16" if request.float16 else "float32",
        request.attention_layout,
        list(request.disabled),
        reports,
        {"force_fp32_ops": list(request.force_fp32_ops), "bfloat16": request.bfloat16},
    )


def fusion_reports(folder: PipelineFolder, provider: str) -> dict[str, ComponentReport]:
    """Return what fusing each component of an exported pipeline for a provider does; nothing is written.

    Raises:
        SdonnxError: the provider or the folder cannot be used.
    """
    if provider not in PROVIDERS:
        raise ProviderError(f"the provider {provider!r} is unknown", f"one of {', '.join(PROVIDERS)}", "pass one")
    reports = {}
    family = family_of(folder)
    for spec in family.components:
        with refusing(folder.path / spec.name, *_GRAPH):
            opened = open_component(folder, family, spec)
            adapt_interface(opened.model, spec, opened.config)
            outcomes = fuse(opened.model, provider)
            reports[spec.name] = report_of(
                spec, opened.config, opened.model, opened.operators, outcomes, provider, notes=opened.notes
            )
    return reports


def is_upcast(family: Family, spec: ComponentSpec, config: Mapping[str, Any]) -> bool:
    """Tell whether a component stays in float32 because its configuration says so.

    diffusers' AutoencoderKL: its activations go beyond what float16 holds, and images would be black.
    """
    return family.upcasts and spec.role in _IMAGE_ROLES and bool(config.get("force_upcast"))


def _optimize_component(
    folder: PipelineFolder,
    family: Family,
    spec: ComponentSpec,
    out: Path,
    request: OptimizeRequest,
    policy: PrecisionPolicy | None,
    progress: Progress | None,
) -> ComponentReport:
    if progress:
        progress(f"{spec.name}: fusing", 0, 0)
    opened = open_component(folder, family, spec)
    path, model, config = opened.path, opened.model, opened.config
    provider = request.provider
    adapt_interface(model, spec, config)
    outcomes = fuse(model, provider, request.attention_layout, request.disabled)
    kept: dict[str, int] = {}
    # A graph that came in fp16 is converted too: contracts want some inputs in float32.
    came_narrow = any(value.dtype == ir.DataType.FLOAT16 for value in model.graph.initializers.values())
    if came_narrow and provider == "cpu":
        raise OptionError(f"{path} is float16", "float32, which the CPU's kernels have", "export with --dtype float32")
    narrow = policy is not None or came_narrow
    upcast = narrow and is_upcast(family, spec, config)
    scaled = spec.stream_scale is not None and (request.scaled or (narrow and not upcast))
    if scaled and (reason := scale_stream(model, spec.stream_scale or 1.0)) is not None:
        raise FolderError(
            f"{path} would go beyond the range of float16 ({reason})",
            "a graph in float32, as python -m sdonnx.export writes it, with its norms fused",
            "export in float32, and leave out --disable_skip_layer_norm, or leave out --float16",
        )
    if upcast or (request.scaled and came_narrow):
        if came_narrow:
            ConvertPrecision(PrecisionPolicy(ir.DataType.FLOAT), spec)(model)
        kept = {"force_upcast of config.json": len(model.graph)} if upcast else {}
    elif narrow:
        conversion = ConvertPrecision(policy or PrecisionPolicy(), spec)
        conversion(model)
        kept = conversion.kept
    tidy(model)
    out.mkdir()

    def told(tensor: ir.TensorProtocol, info: Any) -> None:
        if progress:
            progress(f"{spec.name}: writing", info.index + 1, info.total)

    ir.save(model, out / path.name, external_data=ONNX_WEIGHTS, callback=told)
    if opened.written:
        shutil.copyfile(path.parent / CONFIG, out / CONFIG)
    else:
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_composed(spec, out, path.name, config)
    precision = "float16" if narrow and not upcast and not request.scaled else "float32"
    return report_of(
        spec, config, model, opened.operators, outcomes, provider, request.disabled, precision, kept, opened.notes
    )


def _write_composed(spec: ComponentSpec, component: Path, name: str, config: dict[str, Any]) -> None:
    """Write the graphs that the run-time replays beside the component whose weights they read."""
    made = compose(spec.role, ir.load(component / name), config)
    for file, model in made.items():
        tidy(model)
        ir.save(model, component / file)
    if shared := shared_weights(made.values()):
        graphs = {file: hash_file(component / file)[1] for file in made}
        index = {"__metadata__": graphs} | shared
        (component / SHARED_WEIGHTS).write_text(json.dumps(index) + "\n", encoding="utf-8")
