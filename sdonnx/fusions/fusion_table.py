"""The table of fusions, in order, and the function that applies them.

Each fusion is one `Fusion` record of FUSIONS. Neighbouring fusions of one stage run together. The order matters: a norm
takes its additions before BiasAdd may, and a convolution gets back only the biases that nothing else took.

Flags, reports and documentation are derived from the records: see `sdonnx.fusions.derived_tables`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from sdonnx.fusions.batch_rows import compute_rows_together
from sdonnx.fusions.channels_last import convert_to_channels_last
from sdonnx.fusions.drop_attention_biases import drop_attention_biases
from sdonnx.fusions.fold_modulation import BiasBeforeGate, GateIntoWeight, ModulationIntoLayerNorm
from sdonnx.fusions.fuse_attention import CausalMaskToAttribute, EinsumToMatMul, SoftmaxToAttention
from sdonnx.fusions.fuse_bias_add import BiasAfterReshape, GegluToBiasSplitGelu, ResidualToBiasAdd
from sdonnx.fusions.fuse_gelu import ErfToGelu, GeluToFastGelu, SigmoidToQuickGelu, TanhToGelu
from sdonnx.fusions.fuse_gemm import ResidualIntoGemm, RowPastProduct
from sdonnx.fusions.fuse_group_norm import (
    FlatGroupNormToGroupNorm,
    InstanceNormToGroupNorm,
    SiluIntoGroupNorm,
    group_normalization_to_group_norm,
)
from sdonnx.fusions.fuse_layer_norm import LayerNormWithShift, MeansToLayerNorm, SquaresToRmsNorm
from sdonnx.fusions.fuse_multi_head_attention import (
    AttentionToMultiHeadAttention,
    ProjectionsToPackedKeyValue,
    ProjectionsToPackedQueryKeyValue,
    count_keys,
)
from sdonnx.fusions.fuse_nhwc_conv import BiasIntoNhwcConv, conv_to_nhwc_conv
from sdonnx.fusions.fuse_silu import ExponentialToSigmoid, QuotientToSilu, SwishToSilu
from sdonnx.fusions.fuse_skip_group_norm import GroupNormToSkipGroupNorm
from sdonnx.fusions.fuse_skip_layer_norm import LayerNormToSkipLayerNorm, RmsNormToSkipRmsNorm
from sdonnx.fusions.fuse_split import SizesToEqualSplit, SlicesToSplit, narrow_splits
from sdonnx.fusions.fusion import ATTENTION_LAYOUTS, PROVIDERS, Flag, Fusion, LayerKind
from sdonnx.fusions.group_projections import group_projections
from sdonnx.fusions.remove_no_ops import (
    MergeReshapes,
    MergeTransposes,
    MergeUnsqueezes,
    NoOp,
    PadIntoConv,
    TransposeOfFolded,
)
from sdonnx.fusions.transpose_flat_images import ChannelsLastToFlatChannels, FlatChannelsToChannelsLast
from sdonnx.fusions.unfuse_attention import AttentionToMatMul
from sdonnx.graph.match import MatchFailure, PassOutcome, Rule, WalkRule, apply_rules, apply_walk_rules
from sdonnx.graph.passes import SimplifyReshapes, infer_shapes, tidy
from sdonnx.graph.prepare import prepare
from sdonnx.graph.shapes.recompute import ComputeSizesFromInputs
from sdonnx.models.spec import Role

__all__ = [
    "ATTENTION_LAYOUTS",
    "FUSIONS",
    "LAYER_KINDS",
    "PROVIDERS",
    "Stage",
    "StageOutcome",
    "canonicalize",
    "fuse",
    "stages",
]

_ATTENTION = LayerKind("attention", exported_as=("Attention", "Softmax"))
_GEGLU = LayerKind("geglu", exported_as=("Gelu", "Erf"))
_FAST_GELU = LayerKind("fast_gelu", exported_as=("Gelu", "Tanh"))
_GROUP_NORM = LayerKind("group_norm", exported_as=("GroupNormalization", "InstanceNormalization"))
_LAYER_NORM = LayerKind("layer_norm", exported_as=("LayerNormalization",), standard=("LayerNormalization",))
_RMS_NORM = LayerKind("rms_norm", exported_as=("RMSNormalization", "ReduceMean"), standard=("RMSNormalization",))
# A 1x1 convolution becomes a MatMul, so that operators cannot be counted.
_CONVOLUTION = LayerKind("convolution", exported_as=("Conv",), counted_by=("channels_last", "Conv"))

LAYER_KINDS = (_ATTENTION, _GEGLU, _FAST_GELU, _GROUP_NORM, _LAYER_NORM, _RMS_NORM, _CONVOLUTION)
"""The kinds of layers that reports count, in their order."""

_TEXT_ENCODERS = frozenset({Role.TEXT_ENCODER, Role.TEXT_ENCODER_2})
_VISION_ENCODERS = frozenset({Role.SAFETY_CHECKER, Role.IMAGE_PROMPT_ENCODER})
_DENOISER = frozenset({Role.DENOISER, Role.CONTROLNET})
_WITH_GROUP_NORMS = _DENOISER | {Role.IMAGE_ENCODER, Role.IMAGE_DECODER}

# Flags of more than one fusion.
_NO_SKIP_LAYER_NORM = Flag("skip_layer_norm", "do not fuse SkipLayerNormalization, nor its variant for RMS norms")
_NO_RESIDUAL_GEMM = Flag("residual_gemm", "add the residual of a matmul by BiasAdd instead of Gemm")

_NO_OPS = (NoOp, MergeTransposes, MergeUnsqueezes, MergeReshapes, TransposeOfFolded, PadIntoConv)

FUSIONS: tuple[Fusion, ...] = (
    # Idioms of exporters -> standard operators in their plainest form, for every provider.
    Fusion("no_ops", walk_rules=_NO_OPS, canonicalizes=True, cpu=True),
    Fusion(
        "activations",
        rules=(SwishToSilu,),
        walk_rules=(ExponentialToSigmoid, QuotientToSilu, ErfToGelu, TanhToGelu, SlicesToSplit, SizesToEqualSplit),
        canonicalizes=True,
        cpu=True,
    ),
    Fusion(
        "norms",
        walk_rules=(MeansToLayerNorm, LayerNormWithShift, InstanceNormToGroupNorm, SquaresToRmsNorm),
        canonicalizes=True,
        cpu=True,
    ),
    Fusion(
        "softmax_attention",
        walk_rules=(EinsumToMatMul, SoftmaxToAttention, *_NO_OPS),
        canonicalizes=True,
        cpu=True,
    ),
    Fusion("masks", rules=(CausalMaskToAttribute,), canonicalizes=True, cpu=True),
    # Standard operators -> contrib operators.
    Fusion(
        "attention",
        rules=(AttentionToMultiHeadAttention,),
        flag=Flag("attention", "do not fuse MultiHeadAttention"),
        emits=("MultiHeadAttention",),
        cpu=True,
        fuses=_ATTENTION,
        leaves_none=("Attention",),
        expected_in=_TEXT_ENCODERS | _WITH_GROUP_NORMS | _VISION_ENCODERS,
    ),
    Fusion("attention_left", walk_rules=(AttentionToMatMul,), leaves_none=("Softmax",)),
    Fusion(
        "padding",
        run=count_keys,
        flag=Flag("key_lengths", "mask padding by a bias on all scores instead of the number of keys"),
    ),
    Fusion(
        "attention_biases",
        run=drop_attention_biases,
        flag=Flag("attention_biases", "leave the biases of keys and values at their projections"),
        cpu=True,
    ),
    Fusion(
        "ProjectionsToPackedQueryKeyValue",
        rules=(ProjectionsToPackedQueryKeyValue,),
        flag=Flag("packed_qkv", "with packed_qkv: pack only the keys and values of self-attention"),
        emits=("MultiHeadAttention",),
        attention_layouts=("packed_qkv",),
    ),
    Fusion(
        "ProjectionsToPackedKeyValue",
        rules=(ProjectionsToPackedKeyValue,),
        flag=Flag("packed_kv", "with packed_kv or packed_qkv: do not pack the keys and values of cross-attention"),
        emits=("MultiHeadAttention",),
        attention_layouts=("packed_kv", "packed_qkv"),
    ),
    Fusion("projections", run=group_projections),
    Fusion(
        "modulation",
        walk_rules=(ModulationIntoLayerNorm, BiasBeforeGate),
        flag=Flag("modulation", "leave scales and shifts after their norms (adaptive layer norm)"),
        cpu=True,
    ),
    Fusion(
        "gates",
        walk_rules=(GateIntoWeight,),
        flag=Flag("gates", "multiply activations by gates instead of weights (adaptive layer norm)"),
    ),
    Fusion(
        "geglu",
        rules=(GegluToBiasSplitGelu,),
        commute=True,
        flag=Flag("bias_splitgelu", "do not fuse BiasSplitGelu"),
        emits=("BiasSplitGelu",),
        fuses=_GEGLU,
        leaves_none=("Gelu",),
        leaves_none_in=_DENOISER,  # OpenCLIP's text encoder has a Gelu outside of a GEGLU
        expected_in=_DENOISER,
    ),
    Fusion("rows_past_products", walk_rules=(RowPastProduct,), flag=_NO_RESIDUAL_GEMM),
    Fusion("flat_images", rules=(FlatGroupNormToGroupNorm, FlatChannelsToChannelsLast, ChannelsLastToFlatChannels)),
    Fusion(
        "group_norm",
        converts=("GroupNormalization", group_normalization_to_group_norm),
        stage="channels_last",
        flag=Flag("group_norm", "do not fuse GroupNorm (nor SkipGroupNorm)"),
        emits=("GroupNorm",),
        fuses=_GROUP_NORM,
        leaves_none=("GroupNormalization",),
        expected_in=_WITH_GROUP_NORMS,
    ),
    Fusion(
        "nhwc_conv",
        converts=("Conv", conv_to_nhwc_conv),
        stage="channels_last",
        flag=Flag("nhwc_conv", "do not convert convolutions to NhwcConv"),
        emits=("NhwcConv",),
        fuses=_CONVOLUTION,
        leaves_none=("Conv",),
        expected_in=_WITH_GROUP_NORMS | _VISION_ENCODERS,
    ),
    Fusion("bias_after_reshape", rules=(BiasAfterReshape,), commute=True),
    Fusion(
        "group_norm_silu",
        rules=(SiluIntoGroupNorm,),
        commute=True,
        emits=("GroupNorm",),
        extends=_GROUP_NORM,
        depends_on=("group_norm", "nhwc_conv"),
        expected_in=_WITH_GROUP_NORMS,
    ),
    Fusion(
        "skip_group_norm",
        rules=(GroupNormToSkipGroupNorm,),
        flag=Flag("skip_group_norm", "do not fuse SkipGroupNorm"),
        emits=("SkipGroupNorm",),
        extends=_GROUP_NORM,
        depends_on=("group_norm", "nhwc_conv"),
        expected_in=_WITH_GROUP_NORMS,
    ),
    Fusion(
        "skip_layer_norm",
        rules=(LayerNormToSkipLayerNorm,),
        flag=_NO_SKIP_LAYER_NORM,
        emits=("SkipLayerNormalization",),
        cpu=True,
        extends=_LAYER_NORM,
        expected_in=_TEXT_ENCODERS | _DENOISER | _VISION_ENCODERS,
    ),
    Fusion(
        "skip_rms_norm",
        rules=(RmsNormToSkipRmsNorm,),
        stage="skip_layer_norm",
        flag=_NO_SKIP_LAYER_NORM,
        emits=("SkipSimplifiedLayerNormalization",),
        cpu=True,
        extends=_RMS_NORM,
        expected_in=_TEXT_ENCODERS | _DENOISER | _VISION_ENCODERS,
    ),
    Fusion(
        "fast_gelu",
        walk_rules=(GeluToFastGelu,),
        flag=Flag("fast_gelu", "do not fuse FastGelu"),
        emits=("FastGelu",),
        cpu=True,
        fuses=_FAST_GELU,
    ),
    Fusion(
        "quick_gelu",
        walk_rules=(SigmoidToQuickGelu,),
        flag=Flag("quick_gelu", "do not fuse QuickGelu"),
        emits=("QuickGelu",),
        cpu=True,
    ),
    Fusion(
        "bias_add",
        rules=(ResidualToBiasAdd,),
        flag=Flag("bias_add", "do not fuse BiasAdd"),
        emits=("BiasAdd",),
        occurs_with=(_GEGLU,),  # the residual of a feed-forward layer
        depends_on=("group_norm", "nhwc_conv", "modulation"),
        expected_in=_DENOISER,
    ),
    Fusion("residual_gemm", walk_rules=(ResidualIntoGemm,), flag=_NO_RESIDUAL_GEMM),
    Fusion("rows", run=compute_rows_together),
    Fusion("wide_splits", run=narrow_splits),
    Fusion("conv_bias", rules=(BiasIntoNhwcConv,), commute=True, emits=("NhwcConv",)),
)
"""Every fusion, in order."""


@dataclass(frozen=True)
class StageOutcome:
    """The result of a stage.

    Attributes:
        stage: its name.
        fired: how often each rule fired.
        failures: the candidates that were not rewritten, and why.
    """

    stage: str
    fired: dict[str, int]
    failures: tuple[MatchFailure, ...]


@dataclass(frozen=True)
class Stage:
    """Neighbouring fusions that run together under one name.

    Attributes:
        name: its name.
        fusions: the fusions.
    """

    name: str
    fusions: tuple[Fusion, ...]

    @property
    def canonicalizes(self) -> bool:
        """Whether it rewrites idioms of exporters to standard operators."""
        return any(fusion.canonicalizes for fusion in self.fusions)

    def run(self, model: ir.Model) -> StageOutcome:
        """Apply the stage to the graph in place."""
        fired: dict[str, int] = {}
        failures: list[MatchFailure] = []
        for run in self._passes():
            outcome = run(model)
            fired |= outcome.fired
            failures += outcome.failures
        return StageOutcome(self.name, fired, tuple(failures))

    def _passes(self) -> list[Callable[[ir.Model], PassOutcome]]:
        """Return the rules and passes of the fusions, each as one pass."""
        passes: list[Callable[[ir.Model], PassOutcome]] = []
        for fusion in self.fusions:
            passes += [partial(_apply_rule, rule=rule, commute=fusion.commute) for rule in fusion.rules]
            if fusion.walk_rules:
                passes.append(partial(_apply_until_done, rules=fusion.walk_rules))
            if fusion.run is not None:
                passes.append(fusion.run)
        if converters := dict(fusion.converts for fusion in self.fusions if fusion.converts is not None):
            passes.append(partial(convert_to_channels_last, converters=converters))
        return passes


def _apply_rule(model: ir.Model, rule: type[Rule], commute: bool) -> PassOutcome:
    fired, failures = apply_rules(model, [rule], commute)
    return PassOutcome({rule.__name__: fired}, tuple(failures))


def _apply_until_done(model: ir.Model, rules: Sequence[type[WalkRule]]) -> PassOutcome:
    """Apply walk rules until none fires; only the failures of the last round count."""
    fired: dict[str, int] = {}
    while True:
        counts, failures = apply_walk_rules(model, rules)
        for name, count in counts.items():
            fired[name] = fired.get(name, 0) + count
        if not any(counts.values()):
            return PassOutcome(fired, tuple(failures))
        tidy(model)


def stages(provider: str, attention_layout: str = "unpacked", disabled: Collection[str] = ()) -> tuple[Stage, ...]:
    """Return the stages for a provider, in order.

    Args:
        provider: "cuda" or "cpu".
        attention_layout: the input layout of MultiHeadAttention, one of ATTENTION_LAYOUTS. On sm_90 and newer the
            unpacked layout is read in place while packed ones cost an unpack kernel.
        disabled: names of flags (`Flag.name`); their fusions are left out.
    """
    enabled = [
        fusion
        for fusion in FUSIONS
        if fusion.runs_for(provider)
        and attention_layout in fusion.attention_layouts
        and (fusion.flag is None or fusion.flag.name not in disabled)
    ]
    groups = itertools.groupby(enabled, key=lambda fusion: fusion.stage_name)
    return tuple(Stage(name, tuple(fusions)) for name, fusions in groups)


def canonicalize(model: ir.Model) -> None:
    """Rewrite the graph in place to standard operators only, in their plainest form, as other run-times read it.

    Norms and activations are one operator each; attention is MatMul and Softmax. The graph computes the same function.
    """
    declared = [value.shape for value in (*model.graph.inputs, *model.graph.outputs)]
    prepare(model)
    for stage in stages("cuda"):
        if stage.canonicalizes or stage.name == "attention_left":
            stage.run(model)
            tidy(model)
            infer_shapes(model, outputs=True)
            SimplifyReshapes()(model)
    ComputeSizesFromInputs()(model)
    tidy(model)
    infer_shapes(model)
    for value, shape in zip((*model.graph.inputs, *model.graph.outputs), declared, strict=True):
        value.shape = shape if shape is not None else value.shape


def fuse(
    model: ir.Model, provider: str, attention_layout: str = "unpacked", disabled: Collection[str] = ()
) -> list[StageOutcome]:
    """Fuse the graph in place for a provider and return the outcome of each stage.

    The graph computes the same function after every stage.

    Args:
        model: the graph.
        provider: "cuda" or "cpu".
        attention_layout: one of ATTENTION_LAYOUTS; see `stages`.
        disabled: names of flags; their fusions are left out, see `stages`.
    """
    declared = [value.shape for value in (*model.graph.inputs, *model.graph.outputs)]
    prepare(model)
    model.graph.opset_imports["com.microsoft"] = 1  # the conversion to another opset drops it
    outcomes = []
    table = stages(provider, attention_layout, disabled)
    last_canonicalizing = [stage for stage in table if stage.canonicalizes][-1]
    for stage in table:
        outcomes.append(stage.run(model))
        changed = any(outcomes[-1].fired.values())
        if changed:
            tidy(model)
        if changed and stage.canonicalizes:
            infer_shapes(model, outputs=True)
            SimplifyReshapes()(model)
        if stage is last_canonicalizing:
            # A mask that reads its sizes from the split heads would prevent the fusion of attention.
            ComputeSizesFromInputs()(model)
            tidy(model)
    infer_shapes(model, outputs=True)
    SimplifyReshapes()(model)
    ComputeSizesFromInputs()(model)
    tidy(model)
    infer_shapes(model)
    for value, shape in zip((*model.graph.inputs, *model.graph.outputs), declared, strict=True):
        value.shape = shape if shape is not None else value.shape
    return outcomes
