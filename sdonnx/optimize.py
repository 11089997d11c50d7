"""Optimize a folder of ONNX components for one provider."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

import sdonnx
from sdonnx.compose import DECODE_MODEL, STEP_MODEL, compose_decode, compose_step
from sdonnx.errors import FolderError, OptionError, ProviderError, SdonnxError
from sdonnx.families import ComponentSpec, Role, family_of
from sdonnx.folder import MODEL_INDEX, ONNX_WEIGHTS, REPORT, PipelineFolder, atomic_folder
from sdonnx.fusions import ATTENTION_LAYOUTS, PROVIDERS, StageOutcome, fuse
from sdonnx.graph.load import load_model
from sdonnx.graph.passes import tidy
from sdonnx.precision import ConvertPrecision, PrecisionPolicy, parse_overrides

__all__ = ["ComponentReport", "OptimizeReport", "optimize_folder"]

_PACKAGES = ("onnx", "onnx_ir", "onnxscript", "numpy")

# Operators that a stage should have left none of, on the provider that it is for.
_FUSED_AWAY = {"cuda": ("Attention", "GroupNormalization", "Softmax", "Conv"), "cpu": ("Attention",)}

Progress = Callable[[str, int, int], None]
"""Told (what happens now, tensors written, tensors in all) while a component is optimized."""


@dataclass(frozen=True)
class ComponentReport:
    """What was done to one component.

    Attributes:
        name: the component.
        operators_before: how often each operator stood in the graph.
        operators_after: how often each stands there now.
        stages: for each stage its rules' counts, and the refusals by rule and reason with their modules.
        left: operators that should have been fused, and how many are left.
        precision: the type that the component computes in.
        float32: for each override, how many nodes it keeps in float32.
        inputs: name -> type and shape.
        outputs: name -> type and shape.
    """

    name: str
    operators_before: dict[str, int]
    operators_after: dict[str, int]
    stages: list[dict[str, Any]]
    left: dict[str, int]
    precision: str
    float32: dict[str, int]
    inputs: dict[str, str]
    outputs: dict[str, str]


@dataclass(frozen=True)
class OptimizeReport:
    """What `sdonnx.json` in the optimized folder says.

    Attributes:
        sdonnx: this project's version.
        versions: those of the packages that took part.
        family: the pipeline's family.
        provider: the provider that the folder is for.
        precision: "float32" or "float16".
        attention_layout: how MultiHeadAttention reads its input.
        components: by name.
    """

    sdonnx: str
    versions: dict[str, str]
    family: str
    provider: str
    precision: str
    attention_layout: str
    components: dict[str, ComponentReport]

    def write(self, folder: Path) -> None:
        """Write the report into a pipeline folder."""
        (folder / REPORT).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def optimize_folder(
    source: Path,
    out: Path,
    *,
    provider: str = "cuda",
    float16: bool = False,
    force_fp32_ops: Sequence[str] = (),
    attention_layout: str = "unpacked",
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
        attention_layout: one of ATTENTION_LAYOUTS; see `sdonnx.fusions.stages`.
        overwrite: replace `out` if a pipeline is there.
        progress: told what happens.

    Raises:
        SdonnxError: an option or the folder cannot be used, or the output cannot be written.
    """
    if provider not in PROVIDERS:
        raise ProviderError(f"the provider {provider!r} is unknown", f"one of {', '.join(PROVIDERS)}", "pass one")
    if attention_layout not in ATTENTION_LAYOUTS:
        layouts = ", ".join(ATTENTION_LAYOUTS)
        raise OptionError(f"the attention layout {attention_layout!r} is unknown", f"one of {layouts}", "pass one")
    if provider == "cpu" and float16:
        raise OptionError("float16 for the CPU", "float32, which the CPU's kernels have", "leave out --float16")
    if force_fp32_ops and not float16:
        raise OptionError("--force_fp32_ops without --float16", "both", "add --float16")
    folder = PipelineFolder.open(source)
    if (source / REPORT).exists():
        raise FolderError(f"{source} is optimized already", "an exported pipeline", "give the exported folder")
    family = family_of(folder)
    overrides = parse_overrides(force_fp32_ops, [spec.name for spec in family.components])
    # Everything that can be wrong with the input is looked at before anything is written.
    for name, file in family.extras:
        folder.config(name, file)
    for spec in family.components:
        path = folder.onnx_model(spec.name)
        _require_signature(path, load_model(path), spec, folder.config(spec.name))
    reports = {}
    with atomic_folder(out, overwrite, [source]) as partial:
        for spec in family.components:
            policy = PrecisionPolicy(float32=overrides[spec.name]) if float16 else None
            reports[spec.name] = _optimize_component(
                folder, spec, partial / spec.name, provider, attention_layout, policy, progress
            )
        for name, _ in family.extras:
            shutil.copytree(folder.component(name), partial / name)
        shutil.copyfile(source / MODEL_INDEX, partial / MODEL_INDEX)
        report = OptimizeReport(
            sdonnx.__version__,
            {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _PACKAGES},
            family.name,
            provider,
            "float16" if float16 else "float32",
            attention_layout,
            reports,
        )
        report.write(partial)
    return report


def _require_signature(path: Path, model: ir.Model, spec: ComponentSpec, config: dict[str, Any]) -> None:
    """Raise unless the graph has the component's inputs and outputs; further outputs do no harm."""
    for kind, tensors, values in (
        ("inputs", spec.inputs, model.graph.inputs),
        ("outputs", spec.outputs, model.graph.outputs),
    ):
        found = {str(value.name): value.shape for value in values}
        wanted = {tensor.name: tensor.resolve(config) for tensor in tensors}
        surplus = kind == "inputs" and found.keys() - wanted.keys()
        if surplus or wanted.keys() - found.keys():
            raise FolderError(
                f"the {kind} of {path} are {', '.join(found)}", ", ".join(wanted), f"give the graph of a {spec.name}"
            )
        for name, dims in wanted.items():
            shape = found[name]
            fits = (
                shape is not None
                and len(shape) == len(dims)
                and all(
                    not isinstance(size, int) or not isinstance(dim, int) or size == dim
                    for size, dim in zip(shape, dims, strict=True)
                )
            )
            if not fits:
                raise FolderError(
                    f"{name} of {path} is {shape}",
                    f"[{','.join(map(str, dims))}], as the component's config.json says",
                    "use the graph and the config.json of one component",
                )


def _optimize_component(
    folder: PipelineFolder,
    spec: ComponentSpec,
    out: Path,
    provider: str,
    attention_layout: str,
    policy: PrecisionPolicy | None,
    progress: Progress | None,
) -> ComponentReport:
    if progress:
        progress(f"{spec.name}: fusing", 0, 0)
    path = folder.onnx_model(spec.name)
    config = folder.config(spec.name)
    model = load_model(path)
    before = _operators(model)
    outcomes = fuse(model, provider, attention_layout)
    kept: dict[str, int] = {}
    # A graph that came in fp16 is converted too: contracts want some inputs in float32.
    came_narrow = any(value.dtype == ir.DataType.FLOAT16 for value in model.graph.initializers.values())
    if came_narrow and provider == "cpu":
        raise OptionError(f"{path} is float16", "float32, which the CPU's kernels have", "export with --dtype float32")
    if policy is not None or came_narrow:
        conversion = ConvertPrecision(policy or PrecisionPolicy(), spec)
        conversion(model)
        kept = conversion.kept
    tidy(model)
    out.mkdir()

    def told(tensor: ir.TensorProtocol, info: Any) -> None:
        if progress:
            progress(f"{spec.name}: writing", info.index + 1, info.total)

    try:
        ir.save(model, out / path.name, external_data=ONNX_WEIGHTS, callback=told)
    except ir.serde.SerdeError as error:
        raise _cause(error) from error
    shutil.copyfile(path.parent / "config.json", out / "config.json")
    _write_composed(spec, out, path.name, config)
    after = _operators(model)
    return ComponentReport(
        spec.name,
        before,
        after,
        [_stage(outcome) for outcome in outcomes],
        {name: after[name] for name in _fused_away(spec, provider) if name in after},
        "float32" if policy is None and not came_narrow else "float16",
        kept,
        {str(value.name): _signature(value) for value in model.graph.inputs},
        {str(value.name): _signature(value) for value in model.graph.outputs},
    )


def _fused_away(spec: ComponentSpec, provider: str) -> tuple[str, ...]:
    """Return what should be gone; a Gelu outside a denoiser is no GEGLU's (OpenCLIP's text encoder has some)."""
    gated = provider == "cuda" and spec.role is Role.DENOISER
    return _FUSED_AWAY[provider] + (("Gelu",) if gated else ())


def _cause(error: BaseException) -> BaseException:
    """Return what onnx_ir wrapped while it wrote: a weight that does not fit says so itself."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, SdonnxError):
        inner = inner.__cause__
    return inner or error


def _write_composed(spec: ComponentSpec, component: Path, name: str, config: dict[str, Any]) -> None:
    """Write the step or decode graph beside the component whose weights it reads."""
    if spec.role is Role.DENOISER:
        model = ir.load(component / name)
        compose_step(model, config)
        tidy(model)
        ir.save(model, component / STEP_MODEL)
    elif spec.role is Role.IMAGE_DECODER:
        model = ir.load(component / name)
        compose_decode(model, config)
        tidy(model)
        ir.save(model, component / DECODE_MODEL)


def _operators(model: ir.Model) -> dict[str, int]:
    return dict(sorted(Counter(node.op_type for node in model.graph).items()))


def _signature(value: ir.Value) -> str:
    kind = value.dtype.name.lower() if value.dtype is not None else "?"
    return f"{kind}{'' if value.shape is None else value.shape}"


def _stage(outcome: StageOutcome) -> dict[str, Any]:
    refused: dict[tuple[str, str], list[str]] = {}
    for refusal in outcome.refusals:
        refused.setdefault((refusal.rule, refusal.reason), []).append(refusal.module or refusal.node)
    return {
        "stage": outcome.stage,
        "fired": outcome.fired,
        "refused": [
            {"rule": rule, "reason": reason, "count": len(places), "at": places}
            for (rule, reason), places in refused.items()
        ],
    }
