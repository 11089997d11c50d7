"""Passes over one component, from the opened graph to the files in the optimized folder.

`PASSES` lists all of them in order, each with the condition under which it runs.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sdonnx.compose import ControlPlan, compose_component, shared_weights
from sdonnx.errors import FolderError, OptionError, refusing
from sdonnx.folder.pipeline_folder import (
    ONNX_MODEL,
    ONNX_WEIGHTS,
    SHARED_WEIGHTS,
    hash_file,
    own_kernel_graph,
    read_json,
)
from sdonnx.fusions.fusion_table import StageOutcome, fuse
from sdonnx.fusions.sdonnx_domain.attention_rules import order_weights
from sdonnx.fusions.sdonnx_domain.use_kernels import KERNEL_STAGE, default_sizes, use_kernels
from sdonnx.graph.loading.load import load_model
from sdonnx.graph.match import MatchFailure
from sdonnx.graph.passes import tidy
from sdonnx.models import abi
from sdonnx.models.spec import ComponentSpec, Role
from sdonnx.optimize.exported_pipeline import CONFIG, EXPECTED_GRAPH, OpenedComponent
from sdonnx.optimize.extra_graphs import Inspector, write_exchange_graph
from sdonnx.optimize.find_weights import write_weight_table
from sdonnx.optimize.graph_interface import adapt_interface, require_open_sizes
from sdonnx.optimize.optimize_request import OptimizeRequest, ProgressCallback
from sdonnx.optimize.report import ComponentReport, report_of
from sdonnx.precision.convert import ConvertPrecision
from sdonnx.precision.group_norm_scaling import NormScaling, scale_group_norms
from sdonnx.precision.policy import PrecisionPolicy
from sdonnx.precision.residual_scaling import scale_residual_stream
from sdonnx.quantization.quantization_config import QuantizationPolicy
from sdonnx.quantization.quantize_weights import QuantizedWeight, QuantizeWeights, require_not_quantized, restore_late

__all__ = ["FUSION_PASSES", "GRAPH_PASSES", "PASSES", "ComponentJob", "ComponentPass", "apply_passes", "run_passes"]

_LOGGER = logging.getLogger(__name__)

# Files of the graphs that the report counts: variants for short prompts and with residuals have the same nodes.
_REPORTED = frozenset(spec.file for spec in abi.GRAPHS.values()) - {abi.CONTROLLED_STEP.file}


@dataclass
class ComponentJob:
    """One component on its way through the passes.

    Attributes:
        spec: the component.
        opened: its graph, which the passes change in place, and its configuration.
        request: options of the optimization.
        out: folder to write the component to; None if no pass writes.
        requested: precision that the request asks for.
        inspector: writes ONNX Runtime's own version of the graph; None if it was not requested.
        progress: callback for progress, or None.
        norm_scaling: result of scaling the inputs of group norms; None if it was not tried.
        force_upcast: whether the configuration keeps the component out of a float16 that it would otherwise have.
        outcomes: result of each fusion stage.
        dtype: type that the component computes in.
        conversion: policy of a conversion that is needed to reach `dtype`, or None.
        kept_float32: for each reason to stay out of `dtype`, the number of nodes.
        served: files of the served graphs.
        quantization: types of the component's modules.
        quantized: the weights that were quantized.
        controls: how ControlNets or T2I-Adapters change the served graphs; None if they do not.
        unfused: a copy of the graph before it was fused, for `--export_qdq`; None without it.
    """

    spec: ComponentSpec
    opened: OpenedComponent
    request: OptimizeRequest
    out: Path | None = None
    requested: PrecisionPolicy = field(default_factory=lambda: PrecisionPolicy(ir.DataType.FLOAT))
    inspector: Inspector | None = None
    progress: ProgressCallback | None = None
    norm_scaling: NormScaling | None = None
    force_upcast: bool = False
    outcomes: Sequence[StageOutcome] = ()
    dtype: ir.DataType = ir.DataType.FLOAT
    conversion: PrecisionPolicy | None = None
    kept_float32: dict[str, int] = field(default_factory=dict)
    served: tuple[str, ...] = ()
    quantization: QuantizationPolicy = field(default_factory=QuantizationPolicy)
    quantized: Sequence[QuantizedWeight] = ()
    controls: ControlPlan | None = None
    unfused: ir.Model | None = None

    @property
    def model(self) -> ir.Model:
        """The graph."""
        return self.opened.model

    @property
    def is_stored_reduced(self) -> bool:
        """Whether the graph was exported in float16."""
        return any(value.dtype == ir.DataType.FLOAT16 for value in self.model.graph.initializers.values())

    @property
    def exceeds_float16(self) -> bool:
        """Whether the component would be float16, and the configuration says that its activations exceed the range."""
        is_reduced = self.is_stored_reduced or self.requested.dtype == ir.DataType.FLOAT16
        return is_reduced and self.spec.exceeds_float16(self.opened.config)

    @property
    def norm_scale(self) -> float:
        """The factor of the inputs of group norms, requested or by default; 1 for none."""
        if self.request.scale_residual:
            return 1.0  # the ranges are measured in order to choose the factor
        if self.requested.norm_scale is not None:
            return self.requested.norm_scale
        return self.spec.norm_scale or 1.0 if self.exceeds_float16 else 1.0

    @property
    def scales(self) -> Mapping[str, float]:
        """The largest magnitude of the activations that each module reads, if it was calibrated."""
        return (self.request.scales or {}).get(self.spec.name, {})

    @property
    def folder(self) -> Path:
        """The folder to write to."""
        if self.out is None:
            raise ValueError("a pass writes a component that has no folder to write to")
        return self.out

    def show_progress(self, phase: str, written: int = 0, total: int = 0) -> None:
        """Call the progress callback, if there is one."""
        if self.progress is not None:
            self.progress(f"{self.spec.name}: {phase}", written, total)


def _always(job: ComponentJob) -> bool:
    return True


@dataclass(frozen=True)
class ComponentPass:
    """One step of optimizing a component.

    Attributes:
        name: short name.
        run: changes the job's graph, decides something for later passes, or writes files.
        applies: condition under which the pass runs; it is evaluated after the passes before it.
    """

    name: str
    run: Callable[[ComponentJob], None]
    applies: Callable[[ComponentJob], bool] = _always


def run_passes(passes: Sequence[ComponentPass], job: ComponentJob) -> ComponentReport:
    """Run the passes that apply, in order, and return the report on the component.

    Raises:
        SdonnxError: the component cannot be optimized as requested, or cannot be written.
    """
    with refusing(job.opened.path.parent, *EXPECTED_GRAPH):
        apply_passes(passes, job)
        return report_of(
            job.spec,
            job.opened.config,
            job.model,
            job.opened.operators,
            job.outcomes,
            job.request.provider,
            job.request.disabled,
            "float32" if job.dtype == ir.DataType.FLOAT else "float16",
            job.kept_float32,
            (*job.opened.notes, *_norm_notes(job)),
            job.norm_scaling,
            job.quantized,
        )


def apply_passes(passes: Sequence[ComponentPass], job: ComponentJob) -> None:
    """Run the passes that apply, in order, without a report; errors of a broken graph are not converted."""
    for each in passes:
        if each.applies(job):
            start = time.perf_counter()
            each.run(job)
            _LOGGER.debug("%s: %s took %.1f s", job.spec.name, each.name, time.perf_counter() - start)


def _norm_notes(job: ComponentJob) -> tuple[str, ...]:
    """Return a line on values that exceed float16's range and could not be scaled."""
    if job.norm_scaling is None or job.norm_scaling.reason is None:
        return ()
    return (f"it stays in float32: what its group norms read cannot be scaled, since {job.norm_scaling.reason}",)


def _adapt_interface(job: ComponentJob) -> None:
    job.show_progress("fusing")
    adapt_interface(job.model, job.spec, job.opened.config)


def _fuse(job: ComponentJob) -> None:
    request = job.request
    job.outcomes = fuse(job.model, request.provider, request.attention_layout, request.disabled)
    require_open_sizes(job.opened.path, job.model, job.spec, job.opened.config)


def _choose_precision(job: ComponentJob) -> None:
    """Choose the type of the component and whether a conversion is needed.

    A graph that was exported in float16 is converted as well, since kernels read some inputs in float32.
    """
    stored = job.is_stored_reduced
    if stored and job.request.provider == "cpu":
        found = f"{job.opened.path} is float16"
        raise OptionError(found, "float32, which the CPU's kernels have", "export with --dtype float32")
    requested = job.requested.dtype == ir.DataType.FLOAT16
    scaled = job.norm_scaling is not None and job.norm_scaling.reason is None
    job.force_upcast = job.exceeds_float16 and not scaled
    if (stored or requested) and not job.force_upcast and not job.request.scale_residual:
        job.dtype = ir.DataType.FLOAT16
        job.conversion = job.requested if requested else PrecisionPolicy()
    elif stored:
        job.conversion = PrecisionPolicy(ir.DataType.FLOAT)


def _scale_group_norms(job: ComponentJob) -> None:
    """Scale the values that group norms read, so that they fit into float16.

    Raises:
        OptionError: a requested factor cannot be applied.
    """
    job.norm_scaling = scale_group_norms(job.model, job.norm_scale)
    reason = job.norm_scaling.reason
    if reason is None:
        return
    if job.requested.norm_scale is not None:
        raise OptionError(
            f"--norm_scale of {job.spec.name}, which cannot be scaled, since {reason}",
            "a component whose group norms read values that only they and linear operators read",
        )
    _LOGGER.warning("%s stays in float32: %s", job.spec.name, reason)


def _needs_scaling(job: ComponentJob) -> bool:
    is_reduced = job.dtype == ir.DataType.FLOAT16 or job.request.scale_residual
    return job.spec.stream_scale is not None and is_reduced


def _scale_residual_stream(job: ComponentJob) -> None:
    reason = scale_residual_stream(job.model, job.spec.stream_scale or 1.0)
    if reason is not None:
        raise FolderError(
            f"{job.opened.path} would exceed the range of float16 ({reason})",
            "a graph in float32, as sdonnx export writes it, with its norms fused",
            "export in float32, and leave out --disable_skip_layer_norm, or leave out --float16",
        )


def _convert_precision(job: ComponentJob) -> None:
    conversion = ConvertPrecision(job.conversion or PrecisionPolicy(), job.spec)
    conversion(job.model)
    if job.dtype != ir.DataType.FLOAT:
        job.kept_float32 = conversion.kept


def _count_upcast(job: ComponentJob) -> None:
    job.kept_float32 = {"force_upcast of config.json": len(job.model.graph)}


def _tidy(job: ComponentJob) -> None:
    tidy(job.model)


def _quantize(job: ComponentJob) -> None:
    quantization = QuantizeWeights(job.quantization, job.spec.name, job.scales)
    quantization(job.model)
    job.quantized = quantization.quantized


def _copy_unfused(job: ComponentJob) -> None:
    job.unfused = job.model.clone()


def _exports_qdq(job: ComponentJob) -> bool:
    return job.request.export_qdq and job.quantization.is_active


def _write_exchange_graph(job: ComponentJob) -> None:
    """Write the component for other run-times; values that were scaled to fit into float16 stay in float32 there."""
    if job.unfused is None:
        raise ValueError("the graph was not copied before it was fused")
    is_scaled = job.norm_scale != 1 or _needs_scaling(job)
    precision = PrecisionPolicy(ir.DataType.FLOAT) if is_scaled and job.is_stored_reduced else job.conversion
    precision = None if is_scaled and not job.is_stored_reduced else precision
    write_exchange_graph(job.unfused, job.folder, job.spec, job.quantization, precision, job.scales)
    job.unfused = None


def _require_not_quantized(job: ComponentJob) -> None:
    require_not_quantized(job.model, job.opened.path)


def _order_weights(job: ComponentJob) -> None:
    order_weights(job.model)


def _write_graph(job: ComponentJob) -> None:
    def show_tensor(tensor: ir.TensorProtocol, info: Any) -> None:
        job.show_progress("writing", info.index + 1, info.total)

    job.folder.mkdir()
    restore_late(job.model)
    ir.save(job.model, job.folder / ONNX_MODEL, external_data=ONNX_WEIGHTS, callback=show_tensor)


def _write_configuration(job: ComponentJob) -> None:
    if job.opened.written:
        shutil.copyfile(job.opened.path.parent / CONFIG, job.folder / CONFIG)
    else:
        (job.folder / CONFIG).write_text(json.dumps(job.opened.config, indent=2) + "\n", encoding="utf-8")


def _write_served_graphs(job: ComponentJob) -> None:
    """Write the graphs that the run-time replays; they read the weights of the component's graph."""
    composed = compose_component(job.spec.role, ir.load(job.folder / ONNX_MODEL), job.opened.config, job.controls)
    job.served = tuple(composed)
    for file, model in composed.items():
        tidy(model)
        restore_late(model)
        ir.save(model, job.folder / file)
    if shared := shared_weights(composed.values()):
        hashes = {file: hash_file(job.folder / file)[1] for file in composed}
        index = {"__metadata__": hashes} | shared
        (job.folder / SHARED_WEIGHTS).write_text(json.dumps(index) + "\n", encoding="utf-8")


def _write_own_kernel_graphs(job: ComponentJob) -> None:
    """Write each served graph a second time, with our own operators; both forms read the same weights."""
    sizes = default_sizes(job.opened.config) if job.spec.role is Role.DENOISER else (None, 1)
    if job.spec.role is Role.CONTROLNET and job.controls is not None:
        sizes = (job.controls.latent_size, 1)
    index = job.folder / SHARED_WEIGHTS
    shared = read_json(index) if index.is_file() else None
    fired: Counter[str] = Counter()
    failures: list[MatchFailure] = []
    for file in job.served:
        model = ir.load(job.folder / file)
        outcome = use_kernels(model, *sizes)
        if any(outcome.fired.values()):
            own = job.folder / own_kernel_graph(file)
            restore_late(model)
            ir.save(model, own)
            if shared is not None:
                shared["__metadata__"][own.name] = hash_file(own)[1]
        if file in _REPORTED:
            fired.update(outcome.fired)
            failures += outcome.failures
    if shared is not None:
        index.write_text(json.dumps(shared) + "\n", encoding="utf-8")
    job.outcomes = [*job.outcomes, StageOutcome(KERNEL_STAGE, dict(fired), tuple(dict.fromkeys(failures)))]


def _has_own_kernels(job: ComponentJob) -> bool:
    return job.request.kernels == "auto" and job.request.suits_own_kernels


def _write_weight_table(job: ComponentJob) -> None:
    """Write where the graphs keep each weight; the exported graph is read again, since rules have changed it."""
    graphs = dict.fromkeys((*job.served, ONNX_MODEL))
    files = [file for each in graphs for file in (each, own_kernel_graph(each)) if (job.folder / file).is_file()]
    write_weight_table(job.folder, files, load_model(job.opened.path, draws=True))


def _inspect(job: ComponentJob) -> None:
    if job.inspector is not None:
        job.inspector.inspect(job.folder / ONNX_MODEL)


FUSION_PASSES = (
    ComponentPass("require not quantized", _require_not_quantized, applies=lambda job: job.quantization.is_active),
    ComponentPass("adapt interface", _adapt_interface),
    ComponentPass("copy unfused", _copy_unfused, applies=_exports_qdq),
    ComponentPass("fuse", _fuse),
)
"""Passes that fuse a graph in memory and write nothing."""

GRAPH_PASSES = (
    *FUSION_PASSES,
    ComponentPass("scale group norms", _scale_group_norms, applies=lambda job: job.norm_scale != 1),
    ComponentPass("choose precision", _choose_precision),
    ComponentPass("scale residual stream", _scale_residual_stream, applies=_needs_scaling),
    ComponentPass("convert precision", _convert_precision, applies=lambda job: job.conversion is not None),
    ComponentPass("count upcast", _count_upcast, applies=lambda job: job.force_upcast),
    ComponentPass("tidy", _tidy),
    ComponentPass("quantize", _quantize, applies=lambda job: job.quantization.is_active),
    ComponentPass("order weights", _order_weights),
)
"""Passes that optimize a graph in memory and write nothing."""

PASSES = (
    *GRAPH_PASSES,
    ComponentPass("write graph", _write_graph),
    ComponentPass("write configuration", _write_configuration),
    ComponentPass("write served graphs", _write_served_graphs),
    ComponentPass("write own kernel graphs", _write_own_kernel_graphs, applies=_has_own_kernels),
    ComponentPass("write weight table", _write_weight_table, applies=lambda job: job.spec.takes_lora),
    ComponentPass("write exchange graph", _write_exchange_graph, applies=_exports_qdq),
    ComponentPass("inspect", _inspect, applies=lambda job: job.inspector is not None),
)
"""Passes that optimize a component and write it."""
