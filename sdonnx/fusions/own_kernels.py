"""Replace nodes by our own operators, where their contracts accept them and they are worth it: the last stage.

It works on a served graph in its final precision. A graph with our own operators needs `libsdonnx_kernels.so`, so it is
a second form of the graph, next to the one without them. Sizes at which ONNX Runtime's kernel is as fast stay with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import onnx_ir as ir

from sdonnx.fusions.fuse_bias_split_gelu import GegluToBiasSplitGelu
from sdonnx.fusions.own_image_kernels import channels_last_conv, concat_channels, upsample_nearest
from sdonnx.fusions.own_nodes import has_one_reader, put_own
from sdonnx.fusions.own_products import bias_add, fast_gelu, gemm, mat_mul, sum_with_bias
from sdonnx.fusions.own_sampler import use_sampler_kernels
from sdonnx.fusions.own_scaled_products import (
    rows_of_source,
    rows_of_sum,
    scaled_self_attention,
    scaled_skip_layer_norm,
)
from sdonnx.fusions.repeated_rows import copied_value, row_of_table
from sdonnx.fusions.stack_projections import self_attention
from sdonnx.fusions.stack_scales import stack_scales
from sdonnx.graph.edit import (
    MICROSOFT,
    Dim,
    dims,
    input_of,
    insert,
    insert_multi,
    known_dims,
    known_size,
    optional_input,
    replace,
    required,
    static_dim,
)
from sdonnx.graph.match import (
    NOT_A_CANDIDATE,
    REWRITTEN,
    MatchFailure,
    PassOutcome,
    Refused,
    WalkResult,
    apply_rules,
    is_matrix,
    match_failure,
    producer_of,
    same_dims,
    same_shape,
)
from sdonnx.graph.passes import tidy
from sdonnx.graph.shapes.expressions import expression_of
from sdonnx.operators.kernel_case import SDONNX_DOMAIN
from sdonnx.operators.multi_head_attention import KEY_COUNTS
from sdonnx.operators.sdonnx_domain.attention import check_attention
from sdonnx.operators.sdonnx_domain.elementwise import check_bias_split_gelu
from sdonnx.operators.sdonnx_domain.norms import (
    check_group_norm,
    check_layer_norm,
    check_skip_layer_norm,
    check_table_row,
)

__all__ = ["KERNELS", "MAX_TOKENS", "MIN_TOKENS", "OWN_KERNELS", "default_sizes", "use_own_kernels"]

KERNELS = ("none", "auto")
"""Whether to write the form of the graphs with our own operators."""

OWN_KERNELS = "own_kernels"
"""The name of the stage in the report."""

MIN_TOKENS = {72: 1024}
"""The shortest sequence, in tokens, at which self-attention is replaced, by head size.

On an H200, for two images and 16 heads of 72, this kernel takes 411 us at 4096 tokens, 110 at 2048 and 31 at 1024, and
ONNX Runtime's 446, 111 and 33 (docs/results/attention-h200.json).
"""

MAX_TOKENS = 64
"""The longest sequence at which self-attention is replaced for every head size (docs/decisions/0146)."""


class GegluToOwnBiasSplitGelu(GegluToBiasSplitGelu):
    """a, b = Split(x + bias); a * Gelu(b) -> sdonnx::BiasSplitGelu(x, bias), at widths that ONNX Runtime lacks."""

    def check_kernel(self, x: ir.Value, bias: ir.Value) -> str | None:
        if len(dims(x) or ()) != 3:
            return "x is not known to have three axes"
        return check_bias_split_gelu(x, bias)

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> Any:
        return op.BiasSplitGelu(x, bias, _domain=SDONNX_DOMAIN)


@dataclass(frozen=True)
class _DefaultImage:
    """The values of symbols in shapes, for the image that a pipeline generates by default.

    Attributes:
        latent_size: height and width of the latents; None if unknown.
        patch_size: height and width of a transformer's patches, in latents; 1 for other networks.
        axes: the names of the axes of the graph's inputs.
    """

    latent_size: int | None
    patch_size: int
    axes: frozenset[str]

    def size_of(self, sizes: Sequence[Dim]) -> int | None:
        """Return the product of sizes, None where they are not known or there are none."""
        values = []
        for dim in sizes:
            expression = expression_of(dim)
            if expression is None or (expression.free_symbols and self.latent_size is None):
                return None
            values.append(
                int(expression.subs({symbol: self._value(str(symbol)) for symbol in expression.free_symbols}))
            )
        return math.prod(values) if values else None

    def _value(self, symbol: str) -> int:
        """Return the latents' size for an axis of an input, the patches' for what shape inference named."""
        latent_size = required(self.latent_size)
        return latent_size if symbol in self.axes else latent_size // self.patch_size


def default_sizes(config: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return the size of the latents that a denoiser generates by default, None if unknown, and its patch size."""
    size, patch = (config.get(name) for name in ("sample_size", "patch_size"))
    return size if isinstance(size, int) else None, patch if isinstance(patch, int) and patch > 0 else 1


def use_own_kernels(model: ir.Model, latent_size: int | None = None, patch_size: int = 1) -> PassOutcome:
    """Replace nodes of a graph by our own operators, in place.

    Args:
        model: the graph.
        latent_size: height and width of the latents that the pipeline generates by default; None if unknown. It only
            decides whether a replacement is worth it.
        patch_size: height and width of a transformer's patches, in latents; 1 for other networks.
    """
    image = _DefaultImage(latent_size, patch_size, _axes(model))
    fired: Counter[str] = Counter()
    failures: list[MatchFailure] = []
    count, refused = apply_rules(model, [GegluToOwnBiasSplitGelu], commute=True)
    fired[GegluToOwnBiasSplitGelu.__name__] = count
    failures += refused
    made, refused = use_sampler_kernels(model)
    fired.update(made)
    failures += refused
    for swaps in _STAGES:
        made, refused = _apply(swaps, model, image)
        fired.update(made)
        failures += refused
        if any(fired.values()):
            model.graph.opset_imports[SDONNX_DOMAIN] = 1
            tidy(model)
    if (count := stack_scales(model)) > 0:
        fired[stack_scales.__name__] = count
        tidy(model)
    made, refused = _apply(_SUM_SWAPS, model, image)
    if made:
        fired.update(made)
        tidy(model)
    failures += refused
    return PassOutcome({name: number for name, number in fired.items() if number}, tuple(dict.fromkeys(failures)))


def _apply(swaps: _Swaps, model: ir.Model, image: _DefaultImage) -> tuple[Counter[str], list[MatchFailure]]:
    """Replace nodes of a graph; return the number of replacements by name, and what was refused."""
    fired: Counter[str] = Counter()
    failures: list[MatchFailure] = []
    for node in list(model.graph):
        swap = swaps.get((node.domain, node.op_type))
        if swap is None or not any(output.uses() or output.is_graph_output() for output in node.outputs):
            continue
        result = swap.rewrite(node, image)
        name = f"{node.op_type}ToOwn{swap.target}"
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


def _layer_norm(node: ir.Node, _: _DefaultImage) -> WalkResult:
    x, gamma, beta = input_of(node, 0), input_of(node, 1), optional_input(node, 2)
    rank = len(dims(x) or ())
    if node.attributes.get_int("axis", -1) not in (-1, rank - 1):
        return Refused("the norm is not over the last axis only")
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return Refused("the mean or the deviation is read")
    if (reason := check_layer_norm(x, gamma, beta)) is not None:
        return Refused(reason)
    attributes = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
    put_own(node, node.outputs[0], "LayerNorm", [x, gamma, *([] if beta is None else [beta])], attributes)
    return REWRITTEN


def _skip_layer_norm(node: ir.Node, _: _DefaultImage) -> WalkResult:
    """SkipLayerNormalization(x @ (w * gate), skip) -> SkipLayerNorm(x @ w, skip, gate), which multiplies no weight.

    Without a gate, ONNX Runtime's kernel is as fast, unless the skip was copied for it.
    """
    value, skip = input_of(node, 0), input_of(node, 1)
    found = _gated_product(value)
    if found is None:
        value, skip = skip, value
        found = _gated_product(value)
    if found is None:
        return _norm_of_copies(node)
    product, weight, gate = found
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:3]):
        return Refused("the mean or the deviation is read")
    if not same_shape(value, skip):
        return Refused("the skip is not known to have the shape of the product")
    gamma, beta, bias = input_of(node, 2), optional_input(node, 3), optional_input(node, 4)
    if (reason := check_skip_layer_norm(value, gamma, beta, bias, gate)) is not None:
        return Refused(reason)
    plain = insert(product, "MatMul", [input_of(product, 0), weight], shape=value.shape, dtype=value.dtype)
    _put_skip_layer_norm(node, [plain, skip, gamma, beta, bias, gate])
    return REWRITTEN


def _norm_of_copies(node: ir.Node) -> WalkResult:
    """SkipLayerNormalization(x, copies of skip) -> SkipLayerNorm(x, skip)."""
    for value, copies in ((input_of(node, 0), input_of(node, 1)), (input_of(node, 1), input_of(node, 0))):
        skip = copied_value(copies)
        if skip is None or len(dims(skip) or ()) != 3 or known_dims(skip)[1:] != (dims(value) or ())[1:]:
            continue
        if any(output.uses() or output.is_graph_output() for output in node.outputs[1:3]):
            return Refused("the mean or the deviation is read")
        gamma, beta, bias = input_of(node, 2), optional_input(node, 3), optional_input(node, 4)
        if (reason := check_skip_layer_norm(value, gamma, beta, bias, None)) is not None:
            return Refused(reason)
        _put_skip_layer_norm(node, [value, skip, gamma, beta, bias])
        return REWRITTEN
    return NOT_A_CANDIDATE


def _put_skip_layer_norm(node: ir.Node, inputs: Sequence[ir.Value | None]) -> None:
    shape = None if inputs[0] is None else inputs[0].shape
    attributes = {"epsilon": node.attributes.get_float("epsilon", 1e-12)}
    outputs = insert_multi(node, "SkipLayerNorm", inputs, attributes, 2, domain=SDONNX_DOMAIN, shapes=[shape, shape])
    replace(node.outputs[0], outputs[0])
    if len(node.outputs) > 3:
        replace(node.outputs[3], outputs[1])


def _gated_product(value: ir.Value) -> tuple[ir.Node, ir.Value, ir.Value] | None:
    """Return the product x @ (w * gate) with its weight w (K,C) and its gate (C,), None for other values."""
    product = producer_of(value, "MatMul")
    scaling = None if product is None else producer_of(product.inputs[1], "Mul")
    if product is None or scaling is None or not has_one_reader(value):
        return None
    for weight, gate in (tuple(scaling.inputs), tuple(reversed(scaling.inputs))):
        if weight is None or gate is None or not is_matrix(weight):
            continue
        if len(dims(gate) or ()) == 1 and static_dim(gate, 0) == static_dim(weight, 1) is not None:
            return product, weight, gate
    return None


def _bias_split_gelu(node: ir.Node, _: _DefaultImage) -> WalkResult:
    x, bias = input_of(node, 0), input_of(node, 1)
    if (reason := check_bias_split_gelu(x, bias)) is not None:
        return Refused(reason)
    put_own(node, node.outputs[0], "BiasSplitGelu", [x, bias], {})
    return REWRITTEN


def _group_norm(node: ir.Node, _: _DefaultImage) -> WalkResult:
    x, gamma = input_of(node, 0), input_of(node, 1)
    groups = node.attributes.get_int("groups")
    if (reason := check_group_norm(x, gamma, groups)) is not None:
        return Refused(reason)
    attributes = {
        "groups": groups,
        "epsilon": node.attributes.get_float("epsilon", 1e-5),
        "activation": node.attributes.get_int("activation", 0),
    }
    inputs = [optional_input(node, index) for index in range(5)]
    row = row_of_table(inputs[3])
    if row is not None and check_table_row(row.table, row.index, row.offset, known_size(gamma, 0)) is None:
        inputs[3], attributes["offset"] = row.table, row.offset
        inputs.append(row.index)
    outputs = insert_multi(
        node,
        "GroupNorm",
        inputs if inputs[-1] is not None else list(node.inputs),
        attributes,
        len(node.outputs),
        domain=SDONNX_DOMAIN,
        shapes=[output.shape for output in node.outputs],
    )
    for old, new in zip(node.outputs, outputs, strict=True):
        replace(old, new)
    return REWRITTEN


def _other_attention(node: ir.Node) -> str | None:
    """Return why a MultiHeadAttention is not one of queries, keys, values and counts only, None if it is."""
    if any(optional_input(node, index) is None for index in range(3)):
        return "packed layouts stay with ONNX Runtime"
    is_causal = node.attributes.get_int("unidirectional", 0) != 0
    if is_causal or any(each is not None for index, each in enumerate(node.inputs[3:], 3) if index != KEY_COUNTS):
        return "a bias, a mask or a cache stays with ONNX Runtime"
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return "keys, values or scores are read"
    return None


def _self_attention(node: ir.Node, _: _DefaultImage) -> WalkResult:
    """MultiHeadAttention(x @ q, x @ k, x @ v) -> SelfAttention(x @ qkv), but for heads of 72."""
    if optional_input(node, KEY_COUNTS) is not None or _other_attention(node) is not None:
        return NOT_A_CANDIDATE
    heads, scale = node.attributes.get_int("num_heads"), node.attributes.get_float("scale", 0.0)
    width = static_dim(input_of(node, 0), 2)
    if width is None or width // heads in MIN_TOKENS:
        return NOT_A_CANDIDATE
    result = scaled_self_attention(node, heads, scale)
    return self_attention(node, heads, scale) if result is NOT_A_CANDIDATE else result


def _attention(node: ir.Node, image: _DefaultImage) -> WalkResult:
    """MultiHeadAttention(q, k, v, counts) to a caption, or of a sequence to itself where it wins -> Attention."""
    if (reason := _other_attention(node)) is not None:
        return Refused(reason)
    query, key, value = (input_of(node, index) for index in range(3))
    heads, scale = node.attributes.get_int("num_heads"), node.attributes.get_float("scale", 0.0)
    counts = optional_input(node, KEY_COUNTS)
    if (reason := check_attention(query, key, value, counts, heads, scale)) is not None:
        return Refused(reason)
    if not isinstance(keys := known_dims(key)[1], int) and keys.value is None:
        return Refused("the number of keys is not known")
    if same_dims(known_dims(query), known_dims(key)):
        tokens = image.size_of(known_dims(query)[1:2])
        if tokens is None:
            return Refused("the number of tokens is not known")
        shortest = MIN_TOKENS.get(required(static_dim(query, 2)) // heads)
        if tokens > MAX_TOKENS and (shortest is None or tokens < shortest):
            return Refused(f"{tokens} tokens: ONNX Runtime's kernel is faster")
    inputs = [copied_value(query) or query, key, value, *([] if counts is None else [counts])]
    put_own(node, node.outputs[0], "Attention", inputs, {"num_heads": heads, "scale": scale})
    return REWRITTEN


class _Swap(NamedTuple):
    """The replacement of a node by one of our own operators.

    Attributes:
        target: the name of the replacement in reports, after the node's name.
        rewrite: replaces a node, or refuses to.
    """

    target: str
    rewrite: Callable[[ir.Node, _DefaultImage], WalkResult]


_Swaps = Mapping[tuple[str, str], _Swap]
"""Replacements by the domain and type of the node."""

_FIRST_SWAPS: _Swaps = {(MICROSOFT, "MultiHeadAttention"): _Swap("SelfAttention", _self_attention)}
"""Before the others, which take products one by one."""

_SWAPS: _Swaps = {
    ("", "LayerNormalization"): _Swap("LayerNorm", _layer_norm),
    (MICROSOFT, "SkipLayerNormalization"): _Swap("SkipLayerNorm", _skip_layer_norm),
    (MICROSOFT, "BiasSplitGelu"): _Swap("BiasSplitGelu", _bias_split_gelu),
    (MICROSOFT, "GroupNorm"): _Swap("GroupNorm", _group_norm),
    (MICROSOFT, "SkipGroupNorm"): _Swap("GroupNorm", _group_norm),
    (MICROSOFT, "MultiHeadAttention"): _Swap("Attention", _attention),
    (MICROSOFT, "FastGelu"): _Swap("MatMul", fast_gelu),
    (MICROSOFT, "BiasAdd"): _Swap("MatMul", bias_add),
    ("", "Add"): _Swap("MatMul", sum_with_bias),
    ("", "Gemm"): _Swap("MatMul", gemm),
    ("", "Concat"): _Swap("ConcatChannels", concat_channels),
    ("", "Resize"): _Swap("UpsampleNearest", upsample_nearest),
}

_SCALED_SWAPS: _Swaps = {
    (MICROSOFT, "SkipLayerNormalization"): _Swap("ScaledMatMul", scaled_skip_layer_norm),
    (MICROSOFT, "FastGelu"): _Swap("ScaledMatMul", partial(fast_gelu, scaled=True)),
    (MICROSOFT, "BiasAdd"): _Swap("ScaledMatMul", partial(bias_add, scaled=True)),
    ("", "Add"): _Swap("ScaledMatMul", partial(sum_with_bias, scaled=True)),
    ("", "Gemm"): _Swap("ScaledMatMul", partial(gemm, scaled=True)),
}

_LAST_SCALED_SWAPS: _Swaps = {("", "MatMul"): _Swap("ScaledMatMul", partial(mat_mul, scaled=True))}
"""Products of factors that are rounded to 8 bits, before the others, which take all products."""

_ROWS_SWAPS: _Swaps = {(SDONNX_DOMAIN, "QuantizeRows"): _Swap("Rows", rows_of_source)}
"""The rounding of what our own norms and gates compute, after these have replaced the others."""

_LAST_SWAPS: _Swaps = {
    ("", "MatMul"): _Swap("MatMul", mat_mul),
    (MICROSOFT, "NhwcConv"): _Swap("ChannelsLastConv", channels_last_conv),
}
"""After the others, which take products into sums and biases out of convolutions."""

_SUM_SWAPS: _Swaps = {
    (SDONNX_DOMAIN, "QuantizeRows"): _Swap("SumRows", rows_of_sum),
    (SDONNX_DOMAIN, "LayerNormRows"): _Swap("SumRows", rows_of_sum),
}
"""The rounding of sums of a product and a residual. It moves scales of products, so that it follows `stack_scales`."""

_STAGES = (_FIRST_SWAPS, _SCALED_SWAPS, _LAST_SCALED_SWAPS, _SWAPS, _LAST_SWAPS, _ROWS_SWAPS)
"""Each goes through the whole graph before the next one begins."""
