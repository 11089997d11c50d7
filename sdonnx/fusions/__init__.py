"""The ordered table of stages: what is fused, for which provider, in which order.

A stage is a list of rules or one pass. The order matters: a norm takes its additions before BiasAdd
may, and a convolution gets back only the biases that nothing else took.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import onnx_ir as ir

from sdonnx.fusions.activations import (
    ErfToGelu,
    ExponentialToSigmoid,
    GeluToFastGelu,
    QuotientToSilu,
    SizesToEqualSplit,
    SlicesToSplit,
    SwishToSilu,
    TanhToGelu,
)
from sdonnx.fusions.attention import (
    AttentionToMultiHeadAttention,
    ProjectionsToPackedKeyValue,
    ProjectionsToPackedQueryKeyValue,
)
from sdonnx.fusions.attention_biases import drop_attention_biases
from sdonnx.fusions.canonicalize import (
    BiasAfterReshape,
    ChannelsLastToFlatChannels,
    FlatChannelsToChannelsLast,
    FlatGroupNormToGroupNorm,
)
from sdonnx.fusions.geglu import GegluToBiasSplitGelu
from sdonnx.fusions.group_norm import GroupNormToSkipGroupNorm, SiluIntoGroupNorm
from sdonnx.fusions.layout import ChannelsLast
from sdonnx.fusions.masks import CausalMaskToAttribute
from sdonnx.fusions.modulation import BiasBeforeGate, GateIntoWeight, ModulationIntoLayerNorm, RowPastProduct
from sdonnx.fusions.noops import MergeReshapes, MergeTransposes, MergeUnsqueezes, NoOp, PadIntoConv, TransposeOfFolded
from sdonnx.fusions.norms import InstanceNormToGroupNorm, LayerNormWithShift, MeansToLayerNorm, SquaresToRmsNorm
from sdonnx.fusions.padding import count_keys
from sdonnx.fusions.projections import GroupProjections
from sdonnx.fusions.residual import (
    BiasIntoNhwcConv,
    LayerNormToSkipLayerNorm,
    ResidualIntoGemm,
    ResidualToBiasAdd,
    RmsNormToSkipRmsNorm,
)
from sdonnx.fusions.rows import compute_rows_together
from sdonnx.fusions.softmax import EinsumToMatMul, SoftmaxToAttention
from sdonnx.fusions.splits import narrow_splits
from sdonnx.fusions.unfused import AttentionToMatMul
from sdonnx.graph.match import Idiom, Refusal, Rule, apply_idioms, apply_rules
from sdonnx.graph.passes import SimplifyReshapes, infer_shapes, tidy
from sdonnx.graph.prepare import prepare
from sdonnx.graph.size_computations import ComputeSizesFromInputs

__all__ = ["ATTENTION_LAYOUTS", "DISABLING", "PROVIDERS", "Stage", "StageOutcome", "fuse", "stages"]

PROVIDERS = ("cuda", "cpu")
ATTENTION_LAYOUTS = ("unpacked", "packed_kv", "packed_qkv")


@dataclass(frozen=True)
class StageOutcome:
    """What a stage did.

    Attributes:
        stage: its name.
        fired: how often each rule fired.
        refusals: the candidates that were left, and why.
    """

    stage: str
    fired: dict[str, int]
    refusals: tuple[Refusal, ...]


_Run = Callable[[ir.Model], tuple[dict[str, int], list[Refusal]]]


@dataclass(frozen=True)
class Stage:
    """A step of the fusion.

    Attributes:
        name: what the user calls it.
        rules: the rules that it tries at every node.
        commute: also try the operands of commutative operators the other way round.
        idioms: what it looks for by walking, again and again until none is left.
        run: a pass in place of rules; it returns how often it fired, and the refusals.
        only_cuda: its operators have no CPU kernel.
    """

    name: str
    rules: tuple[type[Rule], ...] = ()
    commute: bool = False
    idioms: tuple[type[Idiom], ...] = ()
    run: _Run | None = None
    only_cuda: bool = field(default=True)


_NO_OPS: tuple[type[Idiom], ...] = (
    NoOp,
    MergeTransposes,
    MergeUnsqueezes,
    MergeReshapes,
    TransposeOfFolded,
    PadIntoConv,
)

# Any exporter's idiom -> the standard operator in its plainest form, whatever the provider.
_CANONICALIZE = (
    Stage("no_ops", idioms=_NO_OPS, only_cuda=False),
    Stage(
        "activations",
        rules=(SwishToSilu,),
        idioms=(ExponentialToSigmoid, QuotientToSilu, ErfToGelu, TanhToGelu, SlicesToSplit, SizesToEqualSplit),
        only_cuda=False,
    ),
    Stage(
        "norms",
        idioms=(MeansToLayerNorm, LayerNormWithShift, InstanceNormToGroupNorm, SquaresToRmsNorm),
        only_cuda=False,
    ),
    Stage("softmax_attention", idioms=(EinsumToMatMul, SoftmaxToAttention, *_NO_OPS), only_cuda=False),
    Stage("masks", (CausalMaskToAttribute,), only_cuda=False),
)

_LAYOUT_KERNELS = ("Conv", "GroupNormalization")

# What can be left out: the stages, or the operators of the layout stage, that each name stands for.
DISABLING: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "group_norm": ("GroupNormalization",),
    "skip_group_norm": ("skip_group_norm",),
    "skip_layer_norm": ("skip_layer_norm",),
    "bias_splitgelu": ("geglu",),
    "bias_add": ("bias_add",),
    "fast_gelu": ("fast_gelu",),
    "modulation": ("modulation",),
    "gates": ("gates",),
    "residual_gemm": ("rows_past_products", "residual_gemm"),
    "key_lengths": ("padding",),
    "attention_biases": ("attention_biases",),
    "nhwc_conv": ("Conv",),
    "packed_qkv": ("ProjectionsToPackedQueryKeyValue",),
    "packed_kv": ("ProjectionsToPackedKeyValue",),
}


def _channels_last(model: ir.Model, kernels: frozenset[str]) -> tuple[dict[str, int], list[Refusal]]:
    layout = ChannelsLast(kernels)
    layout(model)
    return layout.fired, layout.refusals


def _never_refusing(run: Callable[[ir.Model], dict[str, int]]) -> _Run:
    return lambda model: (run(model), [])


def _group_projections(model: ir.Model) -> tuple[dict[str, int], list[Refusal]]:
    grouping = GroupProjections()
    grouping(model)
    return {"GroupProjections": grouping.fired}, []


_PACKINGS: dict[str, tuple[type[Rule], ...]] = {
    "unpacked": (),
    "packed_kv": (ProjectionsToPackedKeyValue,),
    "packed_qkv": (ProjectionsToPackedQueryKeyValue, ProjectionsToPackedKeyValue),
}


def stages(provider: str, attention_layout: str = "unpacked", disabled: Collection[str] = ()) -> tuple[Stage, ...]:
    """Return the stages for a provider, in order.

    Args:
        provider: "cuda" or "cpu".
        attention_layout: how MultiHeadAttention reads its input, one of ATTENTION_LAYOUTS. On sm_90
            and newer the unpacked layout is read in place while packed ones cost an unpack kernel.
        disabled: what is left out, of DISABLING.
    """
    left_out = {name for what in disabled for name in DISABLING[what]}
    layout = partial(_channels_last, kernels=frozenset(_LAYOUT_KERNELS) - left_out)
    table = (
        *_CANONICALIZE,
        Stage("attention", (AttentionToMultiHeadAttention,), only_cuda=False),
        Stage("attention_left", idioms=(AttentionToMatMul,)),
        Stage("padding", run=count_keys),
        Stage("attention_biases", run=_never_refusing(drop_attention_biases), only_cuda=False),
        *(Stage(rule.__name__, (rule,)) for rule in _PACKINGS[attention_layout]),
        Stage("projections", run=_group_projections),
        Stage("modulation", idioms=(ModulationIntoLayerNorm, BiasBeforeGate), only_cuda=False),
        Stage("gates", idioms=(GateIntoWeight,)),
        Stage("geglu", (GegluToBiasSplitGelu,), commute=True),
        Stage("rows_past_products", idioms=(RowPastProduct,)),
        Stage(
            "flat_images",
            (FlatGroupNormToGroupNorm, FlatChannelsToChannelsLast, ChannelsLastToFlatChannels),
        ),
        Stage("channels_last", run=layout),
        Stage("bias_after_reshape", (BiasAfterReshape,), commute=True),
        Stage("group_norm_silu", (SiluIntoGroupNorm,), commute=True),
        Stage("skip_group_norm", (GroupNormToSkipGroupNorm,)),
        Stage("skip_layer_norm", (LayerNormToSkipLayerNorm, RmsNormToSkipRmsNorm), only_cuda=False),
        Stage("fast_gelu", idioms=(GeluToFastGelu,), only_cuda=False),
        Stage("bias_add", (ResidualToBiasAdd,)),
        Stage("residual_gemm", idioms=(ResidualIntoGemm,)),
        Stage("rows", run=_never_refusing(compute_rows_together)),
        Stage("wide_splits", run=_never_refusing(narrow_splits)),
        Stage("conv_bias", (BiasIntoNhwcConv,), commute=True),
    )
    return tuple(stage for stage in table if (provider == "cuda" or not stage.only_cuda) and stage.name not in left_out)


def fuse(
    model: ir.Model, provider: str, attention_layout: str = "unpacked", disabled: Collection[str] = ()
) -> list[StageOutcome]:
    """Fuse the graph in place for a provider and return what each stage did.

    The graph computes the same function after every stage.

    Args:
        model: the graph.
        provider: "cuda" or "cpu".
        attention_layout: one of ATTENTION_LAYOUTS; see `stages`.
        disabled: what is left out, of DISABLING.
    """
    model.graph.opset_imports["com.microsoft"] = 1
    declared = [value.shape for value in (*model.graph.inputs, *model.graph.outputs)]
    prepare(model)
    outcomes = []
    for stage in stages(provider, attention_layout, disabled):
        outcome = _run(stage, model)
        tidy(model)
        if stage in _CANONICALIZE:
            infer_shapes(model, outputs=True)
            SimplifyReshapes()(model)
        if stage is _CANONICALIZE[-1]:
            # A mask whose sizes are read from the split heads would keep the heads from being split by a kernel.
            ComputeSizesFromInputs()(model)
            tidy(model)
        outcomes.append(outcome)
    infer_shapes(model, outputs=True)
    SimplifyReshapes()(model)
    ComputeSizesFromInputs()(model)
    tidy(model)
    infer_shapes(model)
    for value, shape in zip((*model.graph.inputs, *model.graph.outputs), declared, strict=True):
        value.shape = shape if shape is not None else value.shape
    return outcomes


def _run(stage: Stage, model: ir.Model) -> StageOutcome:
    if stage.run is not None:
        fired, refusals = stage.run(model)
        return StageOutcome(stage.name, fired, tuple(refusals))
    fired, refusals = {}, []
    for rule in stage.rules:
        fired[rule.__name__], refused = apply_rules(model, [rule], stage.commute)
        refusals += refused
    while stage.idioms:
        counts, refused = apply_idioms(model, stage.idioms)
        for name, count in counts.items():
            fired[name] = fired.get(name, 0) + count
        if not any(counts.values()):
            refusals += refused  # what earlier rounds refused may have been rewritten since
            break
        tidy(model)
    return StageOutcome(stage.name, fired, tuple(refusals))
