"""Replace nodes by our own operators, where their contracts accept them and they are worth it: the last stage.

It works on a served graph in its final precision. A graph with our own operators needs `libsdonnx_kernels.so`, so it is
a second form of the graph, next to the one without them. Sizes at which ONNX Runtime's kernel is as fast stay with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import onnx_ir as ir

from sdonnx.fusions.sdonnx_domain.attention_rules import attention, self_attention
from sdonnx.fusions.sdonnx_domain.convolution_rules import channels_last_conv
from sdonnx.fusions.sdonnx_domain.elementwise_rules import (
    GegluToOwnBiasSplitGelu,
    bias_split_gelu,
    concat_channels,
    upsample_nearest,
)
from sdonnx.fusions.sdonnx_domain.matmul_8bit_rules import (
    rows_of_source,
    rows_of_sum,
    scaled_matmul,
    scaled_self_attention,
    scaled_skip_layer_norm,
)
from sdonnx.fusions.sdonnx_domain.matmul_rules import bias_add, fast_gelu, gemm, mat_mul, sum_with_bias
from sdonnx.fusions.sdonnx_domain.norm_rules import group_norm, layer_norm, skip_layer_norm
from sdonnx.fusions.sdonnx_domain.replacement import DefaultImage, Replacement, is_read
from sdonnx.fusions.sdonnx_domain.sampler_rules import use_sampler_kernels
from sdonnx.fusions.sdonnx_domain.stack_scales import stack_scales
from sdonnx.graph.edit import MICROSOFT, dims
from sdonnx.graph.match import REWRITTEN, MatchFailure, PassOutcome, Refused, apply_rules, match_failure
from sdonnx.graph.passes import tidy
from sdonnx.operators.kernel_case import OUR_DOMAIN

__all__ = ["KERNELS", "KERNEL_STAGE", "RULES", "default_sizes", "use_kernels"]

KERNELS = ("none", "auto")
"""Whether to write the form of the graphs with our own operators."""

KERNEL_STAGE = "own_kernels"
"""The name of the stage in the report."""

RULES: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "Attention": (attention,),
    "BiasSplitGelu": (GegluToOwnBiasSplitGelu, bias_split_gelu),
    "ChannelsLastConv": (channels_last_conv,),
    "ConcatChannels": (concat_channels,),
    "GroupNorm": (group_norm,),
    "LayerNorm": (layer_norm,),
    "LayerNormRows": (rows_of_source,),
    "MatMul": (fast_gelu, bias_add, sum_with_bias, gemm, mat_mul),
    "QuantizeRows": (scaled_matmul, scaled_self_attention),
    "SamplerInput": (use_sampler_kernels,),
    "SamplerStep": (use_sampler_kernels,),
    "ScaledMatMul": (scaled_matmul, scaled_skip_layer_norm, scaled_self_attention),
    "SelfAttention": (self_attention,),
    "SkipLayerNorm": (skip_layer_norm,),
    "SplitGeluRows": (rows_of_source,),
    "StackedMatMul": (self_attention,),
    "SumRows": (rows_of_sum,),
    "UpsampleNearest": (upsample_nearest,),
}
"""The rules that write each of our own operators."""

_Replacements = Mapping[tuple[str, str], Replacement]
"""Replacements by the domain and type of the node."""

_STAGES: tuple[_Replacements, ...] = (
    # Before the others, which take matmuls one by one.
    {(MICROSOFT, "MultiHeadAttention"): Replacement("SelfAttention", self_attention)},
    # Matmuls of factors that are rounded to 8 bits, before the others, which take all matmuls.
    {
        (MICROSOFT, "SkipLayerNormalization"): Replacement("ScaledMatMul", scaled_skip_layer_norm),
        (MICROSOFT, "FastGelu"): Replacement("ScaledMatMul", partial(fast_gelu, scaled=True)),
        (MICROSOFT, "BiasAdd"): Replacement("ScaledMatMul", partial(bias_add, scaled=True)),
        ("", "Add"): Replacement("ScaledMatMul", partial(sum_with_bias, scaled=True)),
        ("", "Gemm"): Replacement("ScaledMatMul", partial(gemm, scaled=True)),
    },
    {("", "MatMul"): Replacement("ScaledMatMul", partial(mat_mul, scaled=True))},
    {
        ("", "LayerNormalization"): Replacement("LayerNorm", layer_norm),
        (MICROSOFT, "SkipLayerNormalization"): Replacement("SkipLayerNorm", skip_layer_norm),
        (MICROSOFT, "BiasSplitGelu"): Replacement("BiasSplitGelu", bias_split_gelu),
        (MICROSOFT, "GroupNorm"): Replacement("GroupNorm", group_norm),
        (MICROSOFT, "SkipGroupNorm"): Replacement("GroupNorm", group_norm),
        (MICROSOFT, "MultiHeadAttention"): Replacement("Attention", attention),
        (MICROSOFT, "FastGelu"): Replacement("MatMul", fast_gelu),
        (MICROSOFT, "BiasAdd"): Replacement("MatMul", bias_add),
        ("", "Add"): Replacement("MatMul", sum_with_bias),
        ("", "Gemm"): Replacement("MatMul", gemm),
        ("", "Concat"): Replacement("ConcatChannels", concat_channels),
        ("", "Resize"): Replacement("UpsampleNearest", upsample_nearest),
    },
    # After the others, which take matmuls into sums and biases out of convolutions.
    {
        ("", "MatMul"): Replacement("MatMul", mat_mul),
        (MICROSOFT, "NhwcConv"): Replacement("ChannelsLastConv", channels_last_conv),
    },
    # The rounding of what our own norms and gates compute, after these have replaced the others.
    {(OUR_DOMAIN, "QuantizeRows"): Replacement("Rows", rows_of_source)},
)
"""Each goes through the whole graph before the next one begins."""

_SUMS: _Replacements = {
    (OUR_DOMAIN, "QuantizeRows"): Replacement("SumRows", rows_of_sum),
    (OUR_DOMAIN, "LayerNormRows"): Replacement("SumRows", rows_of_sum),
}
"""The rounding of sums of a matmul and a residual. It moves scales of matmuls, so that it follows `stack_scales`."""


def default_sizes(config: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return the size of the latents that a denoiser generates by default, None if unknown, and its patch size."""
    size, patch = (config.get(name) for name in ("sample_size", "patch_size"))
    return size if isinstance(size, int) else None, patch if isinstance(patch, int) and patch > 0 else 1


def use_kernels(model: ir.Model, latent_size: int | None = None, patch_size: int = 1) -> PassOutcome:
    """Replace nodes of a graph by our own operators, in place.

    Args:
        model: the graph.
        latent_size: height and width of the latents that the pipeline generates by default; None if unknown. It only
            decides whether a replacement is worth it.
        patch_size: height and width of a transformer's patches, in latents; 1 for other networks.
    """
    image = DefaultImage(latent_size, patch_size, _axes(model))
    fired: Counter[str] = Counter()
    failures: list[MatchFailure] = []
    count, refused = apply_rules(model, [GegluToOwnBiasSplitGelu], commute=True)
    fired[GegluToOwnBiasSplitGelu.__name__] = count
    failures += refused
    made, refused = use_sampler_kernels(model)
    fired.update(made)
    failures += refused
    for stage in _STAGES:
        made, refused = _apply(stage, model, image)
        fired.update(made)
        failures += refused
        if any(fired.values()):
            model.graph.opset_imports[OUR_DOMAIN] = 1
            tidy(model)
    if (count := stack_scales(model)) > 0:
        fired[stack_scales.__name__] = count
        tidy(model)
    made, refused = _apply(_SUMS, model, image)
    if made:
        fired.update(made)
        tidy(model)
    failures += refused
    return PassOutcome({name: number for name, number in fired.items() if number}, tuple(dict.fromkeys(failures)))


def _apply(
    replacements: _Replacements, model: ir.Model, image: DefaultImage
) -> tuple[Counter[str], list[MatchFailure]]:
    """Replace nodes of a graph; return the number of replacements by name, and what was refused."""
    fired: Counter[str] = Counter()
    failures: list[MatchFailure] = []
    for node in list(model.graph):
        replacement = replacements.get((node.domain, node.op_type))
        if replacement is None or not is_read(node.outputs):
            continue
        result = replacement.rewrite(node, image)
        name = f"{node.op_type}ToOwn{replacement.target}"
        if result is REWRITTEN:
            fired[name] += 1
        elif isinstance(result, Refused):
            failures.append(match_failure(name, node, result.reason))
    return fired, failures


def _axes(model: ir.Model) -> frozenset[str]:
    """Return the names of the axes of the graph's inputs."""
    return frozenset(
        dim.value
        for value in model.graph.inputs
        for dim in dims(value) or ()
        if not isinstance(dim, int) and dim.value is not None
    )
