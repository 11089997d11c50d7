"""The report of an optimization: operator counts, unfused operators with reasons, and expected counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sdonnx.folder.folder_version import FORMAT
from sdonnx.folder.pipeline_folder import REPORT
from sdonnx.fusions.derived_tables import (
    disabled_fusions,
    expected_stages,
    fused_operators,
    idle_stages,
    leaves_none,
)
from sdonnx.fusions.fusion_table import FUSIONS, StageOutcome
from sdonnx.graph.edit import MICROSOFT
from sdonnx.graph.modules import module_path
from sdonnx.models.layer_counts import expected_counts
from sdonnx.models.spec import ComponentSpec
from sdonnx.operators.contrib_elementwise import NO_KERNEL
from sdonnx.precision.group_norm_scaling import NormScaling
from sdonnx.quantization.quantize_weights import QuantizedWeight

__all__ = ["ComponentReport", "OptimizeReport", "operators_of", "report_of"]


@dataclass(frozen=True)
class ComponentReport:
    """The report on one component.

    Attributes:
        name: the component.
        operators_before: the number of each operator in the exported graph.
        operators_after: the number of each operator in the optimized graph.
        expected: for each kind of layer, if the architecture determines its number: before, after, expected.
        stages: for each stage, how often its rules fired, and the failures by rule and reason with their modules.
        left: the number of operators left that should have been fused.
        left_at: for each of these, the modules of the nodes, or their names where the module is unknown.
        warnings: assumptions, and missing fusions, one line each.
        precision: the type that the component computes in.
        float32: for each override, the number of nodes that it excludes from that type.
        inputs: name -> type and shape.
        outputs: name -> type and shape.
        norm_scale: factor of the values that group norms read, 1 for none.
        scaled_norms: the number of group norms that read scaled values.
        quantized: for each quantization type, its modules, and the bytes of their weights before and after.
    """

    name: str
    operators_before: dict[str, int]
    operators_after: dict[str, int]
    expected: dict[str, dict[str, int]]
    stages: list[dict[str, Any]]
    left: dict[str, int]
    left_at: dict[str, list[str]]
    warnings: list[str]
    precision: str
    float32: dict[str, int]
    inputs: dict[str, str]
    outputs: dict[str, str]
    norm_scale: float = 1.0
    scaled_norms: int = 0
    quantized: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizeReport:
    """The contents of `sdonnx.json` in an optimized folder.

    Attributes:
        sdonnx: this project's version.
        versions: the versions of the packages that were used.
        family: the pipeline's family.
        provider: the provider that the folder is for.
        precision: "float32" or "float16".
        attention_layout: the input layout of MultiHeadAttention.
        disabled: names of flags; their fusions were disabled.
        components: the reports on components by name.
        options: the other options, needed to optimize the folder again (`sdonnx.folder.folder_version`).
        format: the format of the folder.
        automatic: the result of `--force_fp32_ops auto`, with reasons and measurements (`sdonnx.precision_search`);
            None without it.
        quantization_search: the result of `--quantize auto`: the bounds, the sets of modules that were tried and their
            measurements; None without it.
    """

    sdonnx: str
    versions: dict[str, str]
    family: str
    provider: str
    precision: str
    attention_layout: str
    disabled: list[str]
    components: dict[str, ComponentReport]
    options: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT
    automatic: dict[str, Any] | None = None
    quantization_search: dict[str, Any] | None = None

    def write(self, folder: Path) -> None:
        """Write the report into a pipeline folder."""
        (folder / REPORT).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def operators_of(model: ir.Model) -> dict[str, int]:
    """Return the number of each operator; operators of unknown domains are written domain::operator."""
    known = ("", "ai.onnx", MICROSOFT)
    names = (node.op_type if node.domain in known else f"{node.domain}::{node.op_type}" for node in model.graph)
    return dict(sorted(Counter(names).items()))


def report_of(
    spec: ComponentSpec,
    config: Mapping[str, Any],
    model: ir.Model,
    before: dict[str, int],
    outcomes: Sequence[StageOutcome],
    provider: str,
    disabled: Collection[str] = (),
    precision: str = "float32",
    kept: Mapping[str, int] | None = None,
    notes: Sequence[str] = (),
    scaling: NormScaling | None = None,
    quantized: Sequence[QuantizedWeight] = (),
) -> ComponentReport:
    """Return the report on one component.

    Args:
        spec: the component.
        config: its configuration.
        model: its fused graph.
        before: its operators before fusing (`operators_of`).
        outcomes: the outcomes of the stages.
        provider: "cuda" or "cpu".
        disabled: names of flags; their fusions were disabled.
        precision: the type that it computes in.
        kept: for each override of the precision, the number of nodes that it matched.
        notes: assumptions and changes before fusing, one line each; they precede the warnings.
        scaling: the result of scaling the inputs of its group norms; None if it was not tried.
        quantized: the weights that were quantized.
    """
    scaling = scaling or NormScaling()
    after = operators_of(model)
    counts = _expected(spec, config, before, after, outcomes, provider)
    left = {name: after[name] for name in leaves_none(provider, spec.role) if name in after}
    return ComponentReport(
        spec.name,
        before,
        after,
        counts,
        [_stage(outcome) for outcome in outcomes],
        left,
        {name: [_place(node) for node in model.graph if node.op_type == name] for name in left},
        [*notes, *_warnings(spec, model, config, counts, left, outcomes, provider, disabled)],
        precision,
        dict(kept or {}),
        {str(value.name): _signature(value) for value in model.graph.inputs},
        {str(value.name): _signature(value) for value in model.graph.outputs},
        scaling.scale,
        scaling.norms,
        _quantized(quantized),
    )


def _quantized(weights: Sequence[QuantizedWeight]) -> dict[str, dict[str, Any]]:
    """Return the modules and the bytes of quantized weights by type."""
    types = dict.fromkeys(each.type.name for each in weights)
    groups = {name: [each for each in weights if each.type.name == name] for name in types}
    return {
        name: {
            "modules": [each.module for each in group],
            "bytes": [sum(each.bytes_before for each in group), sum(each.bytes_after for each in group)],
        }
        for name, group in groups.items()
    }


def _expected(
    spec: ComponentSpec,
    config: Mapping[str, Any],
    before: dict[str, int],
    after: dict[str, int],
    outcomes: Sequence[StageOutcome],
    provider: str,
) -> dict[str, dict[str, int]]:
    counts = expected_counts(spec, config) or {}
    fired = {outcome.stage: outcome.fired for outcome in outcomes}
    numbers = {}
    for kind, operators in fused_operators(provider).items():
        if not counts.get(kind.name):
            continue
        if kind.counted_by is not None:
            stage, rule = kind.counted_by
            fused = fired.get(stage, {}).get(rule, 0)
        else:
            fused = sum(after.get(name, 0) for name in operators)
        exported = sum(before.get(name, 0) for name in kind.exported_as)
        numbers[kind.name] = {"before": exported, "after": fused, "expected": counts[kind.name]}
    return numbers


def _warnings(
    spec: ComponentSpec,
    model: ir.Model,
    config: Mapping[str, Any],
    counts: Mapping[str, Mapping[str, int]],
    left: Mapping[str, int],
    outcomes: Sequence[StageOutcome],
    provider: str,
    disabled: Collection[str],
) -> Iterator[str]:
    narrow = {outcome.stage for outcome in outcomes if _has_no_kernels(outcome)}
    without = [*disabled_fusions(disabled), *(fusion for fusion in FUSIONS if fusion.stage_name in narrow)]
    # Layers that only these fusions would fuse.
    unfused = {fusion.fuses for fusion in without if fusion.fuses is not None}
    silent_kinds = {kind.name for kind in unfused}
    silent_operators = {operator for kind in unfused for operator in kind.exported_as}
    for kind, numbers in counts.items():
        if numbers["after"] < numbers["expected"] and kind not in silent_kinds:
            yield f"{numbers['after']} of {numbers['expected']} fused: {kind}"
    for operator, count in left.items():
        if operator not in silent_operators:
            yield f"{count} {operator} not fused"
    wanted = expected_stages(provider, spec.role, without)
    architecture = expected_counts(spec, config)
    if architecture is not None:
        wanted -= idle_stages(architecture)
    for outcome in outcomes:
        if outcome.stage in wanted and not any(outcome.fired.values()):
            yield f"the stage {outcome.stage} found nothing to fuse"
    foreign = sorted({node.domain for node in model.graph} - {"", "ai.onnx", MICROSOFT})
    for domain in foreign:
        yield f"operators of the domain {domain} are unknown and were left unchanged"
    nested = Counter(node.op_type for node in model.graph if any(map(_holds_graph, node.attributes.values())))
    for operator, count in sorted(nested.items()):
        yield f"the subgraphs of {count} {operator} were left unchanged"


def _has_no_kernels(outcome: StageOutcome) -> bool:
    """Return whether all candidates of a stage have widths for which there is no kernel, as in narrow samples."""
    return bool(outcome.failures) and all(NO_KERNEL in failure.reason for failure in outcome.failures)


def _place(node: ir.Node) -> str:
    return module_path(node) or node.name or node.op_type


def _holds_graph(attribute: ir.Attr) -> bool:
    return attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _signature(value: ir.Value) -> str:
    kind = value.dtype.name.lower() if value.dtype is not None else "?"
    return f"{kind}{'' if value.shape is None else value.shape}"


def _stage(outcome: StageOutcome) -> dict[str, Any]:
    refused: dict[tuple[str, str], list[str]] = {}
    for failure in outcome.failures:
        refused.setdefault((failure.rule, failure.reason), []).append(failure.module or failure.node)
    return {
        "stage": outcome.stage,
        "fired": outcome.fired,
        "refused": [
            {"rule": rule, "reason": reason, "count": len(places), "at": places}
            for (rule, reason), places in refused.items()
        ],
    }
