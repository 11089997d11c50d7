"""What an optimization did: counts, what was left and why, and what should have been."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sdonnx.expected import expected_counts
from sdonnx.families import ComponentSpec, Role
from sdonnx.folder import REPORT
from sdonnx.fusions import DISABLING, StageOutcome
from sdonnx.graph.edit import MICROSOFT
from sdonnx.graph.modules import module_path
from sdonnx.upgrade import FORMAT

__all__ = ["ComponentReport", "OptimizeReport", "operators_of", "report_of"]

# Operators that a stage should have left none of, on the provider that it is for.
_FUSED_AWAY = {"cuda": ("Attention", "GroupNormalization", "Softmax", "Conv"), "cpu": ("Attention",)}

# For each kind (`expected.KINDS`): how exporters write it, and what it is when fused.
_BEFORE = {
    "attention": ("Attention", "Softmax"),
    "geglu": ("Gelu", "Erf"),
    "fast_gelu": ("Gelu", "Tanh"),
    "group_norm": ("GroupNormalization", "InstanceNormalization"),
    "layer_norm": ("LayerNormalization",),
    "rms_norm": ("RMSNormalization", "ReduceMean"),
    "convolution": ("Conv",),
}
_AFTER = {
    "cuda": {
        "attention": ("MultiHeadAttention",),
        "geglu": ("BiasSplitGelu",),
        "fast_gelu": ("FastGelu",),
        "group_norm": ("GroupNorm", "SkipGroupNorm"),
        "layer_norm": ("LayerNormalization", "SkipLayerNormalization"),
        "rms_norm": ("RMSNormalization", "SkipSimplifiedLayerNormalization"),
    },
    "cpu": {
        "attention": ("MultiHeadAttention",),
        "fast_gelu": ("FastGelu",),
        "layer_norm": ("LayerNormalization", "SkipLayerNormalization"),
        "rms_norm": ("RMSNormalization", "SkipSimplifiedLayerNormalization"),
    },
}

# The kinds of layers that give a stage something to do.
_STAGE_KINDS = {
    "attention": ("attention",),
    "geglu": ("geglu",),
    "group_norm_silu": ("group_norm",),
    "skip_group_norm": ("group_norm",),
    "skip_layer_norm": ("layer_norm", "rms_norm"),
    "bias_add": ("geglu",),
}

# What must do something in a graph of that role.
_STAGES = {
    Role.TEXT_ENCODER: ("attention", "skip_layer_norm"),
    Role.TEXT_ENCODER_2: ("attention", "skip_layer_norm"),
    Role.DENOISER: (
        "attention", "geglu", "channels_last", "group_norm_silu", "skip_group_norm", "skip_layer_norm", "bias_add",
    ),
    Role.IMAGE_ENCODER: ("attention", "channels_last", "group_norm_silu", "skip_group_norm"),
    Role.IMAGE_DECODER: ("attention", "channels_last", "group_norm_silu", "skip_group_norm"),
    Role.SAFETY_CHECKER: ("attention", "channels_last", "skip_layer_norm"),
    Role.IMAGE_PROMPT_ENCODER: ("attention", "channels_last", "skip_layer_norm"),
    Role.IMAGE_PROMPT_ADAPTER: (),
}  # fmt: skip


_ALL_STAGES = frozenset(stage for stages in _STAGES.values() for stage in stages)


@dataclass(frozen=True)
class ComponentReport:
    """What was done to one component.

    Attributes:
        name: the component.
        operators_before: how often each operator stood in the graph.
        operators_after: how often each stands there now.
        expected: for each kind of which the architecture has a known number: before, after, expected.
        stages: for each stage its rules' counts, and the refusals by rule and reason with their modules.
        left: operators that should have been fused, and how many are left.
        left_at: for each of these, the modules of the nodes, or their names where nothing tells.
        warnings: what was assumed, and what should have been done and was not, a line each.
        precision: the type that the component computes in.
        float32: for each override, how many nodes it keeps out of that type.
        inputs: name -> type and shape.
        outputs: name -> type and shape.
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
        disabled: the fusions that were left out on request.
        components: by name.
        options: what else was asked for, to make the folder again (`sdonnx.upgrade`).
        format: of the folder.
        automatic: what `--force_fp32_ops auto` found, why, and what proves it (`sdonnx.automatic`); None without it.
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

    def write(self, folder: Path) -> None:
        """Write the report into a pipeline folder."""
        (folder / REPORT).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def operators_of(model: ir.Model) -> dict[str, int]:
    """Return how often each operator stands in the graph; one of a foreign domain is written domain::operator."""
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
) -> ComponentReport:
    """Return the report on one component.

    Args:
        spec: the component.
        config: its configuration.
        model: its graph, fused.
        before: its operators before (`operators_of`).
        outcomes: what the stages did.
        provider: "cuda" or "cpu".
        disabled: the fusions that were left out on request.
        precision: the type that it computes in.
        kept: for each override of the precision, how many nodes it matched.
        notes: what was assumed or changed before anything was fused, a line each; they head the warnings.
    """
    after = operators_of(model)
    counts = _expected(spec, config, before, after, outcomes, provider)
    left = {name: after[name] for name in _fused_away(spec, provider) if name in after}
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
    )


def _expected(
    spec: ComponentSpec,
    config: Mapping[str, Any],
    before: dict[str, int],
    after: dict[str, int],
    outcomes: Sequence[StageOutcome],
    provider: str,
) -> dict[str, dict[str, int]]:
    counts = expected_counts(spec.role, config) or {}
    fired = {outcome.stage: outcome.fired for outcome in outcomes}
    fused = {kind: sum(after.get(name, 0) for name in names) for kind, names in _AFTER[provider].items()}
    if provider == "cuda":
        fused["convolution"] = fired.get("channels_last", {}).get("Conv", 0)  # some become MatMul
    return {
        kind: {
            "before": sum(before.get(name, 0) for name in _BEFORE[kind]),
            "after": fused[kind],
            "expected": counts[kind],
        }
        for kind in fused
        if counts.get(kind)
    }


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
    silenced = {name for what in disabled for name in DISABLING[what]}
    # The kinds that a disabled stage would have fused, and the operators that it would have fused away.
    for kind, operator, stage in (
        ("attention", "Attention", "attention"),
        ("attention", "Softmax", "attention"),
        ("geglu", "Gelu", "geglu"),
        ("fast_gelu", "Gelu", "fast_gelu"),
        ("group_norm", "GroupNormalization", "GroupNormalization"),
        ("convolution", "Conv", "Conv"),
    ):
        if stage in silenced:
            silenced |= {kind, operator}
    if "modulation" in silenced:
        silenced.add("bias_add")  # of what stands before a gate
    if {"Conv", "GroupNormalization"} & silenced:
        silenced |= {"group_norm_silu", "skip_group_norm", "bias_add", "channels_last"}
    for kind, numbers in counts.items():
        if numbers["after"] < numbers["expected"] and kind not in silenced:
            yield f"{numbers['after']} of {numbers['expected']} fused: {kind}"
    for operator, count in left.items():
        if operator not in silenced:
            yield f"{count} {operator} not fused"
    wanted = set(_STAGES[spec.role]) & ({"attention", "skip_layer_norm"} if provider == "cpu" else _ALL_STAGES)
    expected = expected_counts(spec.role, config)
    absent = {
        stage for stage, kinds in _STAGE_KINDS.items() if expected is not None and not any(map(expected.get, kinds))
    }
    for outcome in outcomes:
        if outcome.stage in wanted - silenced - absent and not any(outcome.fired.values()):
            yield f"the stage {outcome.stage} found nothing to fuse"
    foreign = sorted({node.domain for node in model.graph} - {"", "ai.onnx", MICROSOFT})
    for domain in foreign:
        yield f"operators of the domain {domain} are not known here and were left as they are"
    nested = Counter(node.op_type for node in model.graph if any(map(_holds_graph, node.attributes.values())))
    for operator, count in sorted(nested.items()):
        yield f"the subgraphs of {count} {operator} were left as they are"


def _place(node: ir.Node) -> str:
    return module_path(node) or node.name or node.op_type


def _holds_graph(attribute: ir.Attr) -> bool:
    return attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _fused_away(spec: ComponentSpec, provider: str) -> tuple[str, ...]:
    """Return what should be gone; a Gelu outside a denoiser is no GEGLU's (OpenCLIP's text encoder has some)."""
    gated = provider == "cuda" and spec.role is Role.DENOISER
    return _FUSED_AWAY[provider] + (("Gelu",) if gated else ())


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
