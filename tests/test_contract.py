"""The contract table on the CPU: every case of tests/gpu is a valid graph and its body is torch's, limits refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gpu.test_contracts import (
    REFUSED,
    attention_feeds,
    attention_graph,
    block_in_bfloat16,
    feeds_of,
    lowered_results,
)
from graphs import assert_same_function, copied, graph, lowered, normal, operators, relative_error, run

from sdonnx.doctor.corner import LENGTHS, MASK, Array, Corner, rounded
from sdonnx.fusions import fuse
from sdonnx.graph.contract import (
    CONTRACTS,
    LARGEST_GROUP,
    SPLIT_GELU_WIDTHS,
    causal_refusal,
    contract_of,
    dtype_refusal,
    fast_gelu_refusal,
    group_norm_refusal,
    split_gelu_refusal,
)
from sdonnx.graph.corner_graphs import model_of
from sdonnx.graph.corners import CORNERS, dtypes_of

TOLERANCE = 2e-5
FLOATS = [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE]

Tensors = Sequence[torch.Tensor | None]
Results = list[torch.Tensor]


def group_norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, attributes: Mapping[str, Any]) -> torch.Tensor:
    planes = F.group_norm(x.permute(0, 3, 1, 2), attributes["groups"], gamma, beta, attributes["epsilon"])
    return (F.silu(planes) if attributes["activation"] else planes).permute(0, 2, 3, 1)


def torch_group_norm(inputs: Any, attributes: Mapping[str, Any]) -> Results:
    return [group_norm(*inputs, attributes)]


def torch_skip_group_norm(inputs: Any, attributes: Mapping[str, Any]) -> Results:
    x, gamma, beta, skip, *bias = inputs
    total = x + (skip[:, None, None] if skip.ndim == 2 else skip) + sum(bias)
    return [group_norm(total, gamma, beta, attributes), total]


def torch_bias_split_gelu(inputs: Any, _: Mapping[str, Any]) -> Results:
    value, gate = sum(inputs).chunk(2, -1)
    return [value * F.gelu(gate)]


def torch_bias_add(inputs: Any, _: Mapping[str, Any]) -> Results:
    return [sum(inputs)]


def torch_nhwc_conv(inputs: Any, attributes: Mapping[str, Any]) -> Results:
    x, weight, *bias = inputs
    arguments = {"stride": attributes["strides"], "padding": attributes["pads"][:2]}
    arguments |= {"dilation": attributes["dilations"], "groups": attributes["group"]}
    image = F.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), *bias, **arguments)
    return [image.permute(0, 2, 3, 1)]


def torch_skip_layer_normalization(inputs: Any, attributes: Mapping[str, Any]) -> Results:
    x, skip, gamma, beta, bias = inputs
    total = x + skip + (0 if bias is None else bias)
    return [F.layer_norm(total, gamma.shape, gamma, beta, attributes["epsilon"]), total]


def torch_skip_simplified_layer_normalization(inputs: Any, attributes: Mapping[str, Any]) -> Results:
    x, skip, gamma, bias = inputs
    total = x + skip + (0 if bias is None else bias)
    return [F.rms_norm(total, gamma.shape, gamma, attributes["epsilon"]), total]


def torch_fast_gelu(inputs: Any, _: Mapping[str, Any]) -> Results:
    x, bias = inputs
    return [F.gelu(x if bias is None else x + bias, approximate="tanh")]


def torch_fused_mat_mul(inputs: Any, attributes: Mapping[str, Any]) -> Results:
    a, b = inputs
    return [attributes["alpha"] * (a @ b)]


def torch_multi_head_attention(inputs: Any, attributes: Mapping[str, Any]) -> Results:
    """Packed layouts hold, for each head, its rows of q, k and v one after the other."""
    first, *others = inputs[:3]
    heads = attributes["num_heads"]
    mask = inputs[MASK] if len(inputs) > MASK else None
    lengths = inputs[LENGTHS] if len(inputs) > LENGTHS else None
    if first.ndim == 5:
        q, k, v = first.unbind(3)
    elif others[0].ndim == 5:
        q, (k, v) = first.unflatten(-1, (heads, -1)), others[0].unbind(3)
    else:
        q, k, v = (x.unflatten(-1, (heads, -1)) for x in (first, *others))
    if lengths is not None:
        mask = (torch.arange(k.shape[1]) < lengths[:, None])[:, None, None]
    if attributes.get("unidirectional"):
        allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
        mask = (0 if mask is None else mask) + torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attributes.get("scale"))
    return [result.transpose(1, 2).flatten(2)]


TORCH: dict[str, Callable[[Any, Mapping[str, Any]], Results]] = {
    "GroupNorm": torch_group_norm,
    "SkipGroupNorm": torch_skip_group_norm,
    "BiasSplitGelu": torch_bias_split_gelu,
    "BiasAdd": torch_bias_add,
    "NhwcConv": torch_nhwc_conv,
    "SkipLayerNormalization": torch_skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": torch_skip_simplified_layer_normalization,
    "FastGelu": torch_fast_gelu,
    "FusedMatMul": torch_fused_mat_mul,
    "MultiHeadAttention": torch_multi_head_attention,
}


# --- the cases that run on a GPU --------------------------------------------------------------------------------------


def test_every_contract_has_cases() -> None:
    assert {case.op_type for case in CORNERS} == CONTRACTS.keys() == TORCH.keys()
    assert len({str(case) for case in CORNERS}) == len(CORNERS)
    assert {case.shapes[1][0] for case in CORNERS if case.op_type == "BiasSplitGelu" and case.shapes[1]} == (
        SPLIT_GELU_WIDTHS
    )


@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_body_is_torchs(case: Corner) -> None:
    arrays = case.draw()
    found = lowered_results(case, arrays)
    tensors = [None if array is None else torch.from_numpy(array) for array in arrays]
    expected = TORCH[case.op_type](tensors, case.attributes)[: len(found)]
    assert len(found) == (2 if case.outputs > 1 else 1)
    for values, reference in zip(found, expected, strict=True):
        assert relative_error(values, reference.numpy()) < TOLERANCE


@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_case_is_accepted_and_a_valid_graph_in_every_type(case: Corner) -> None:
    """As it is, and with the body in place of the operator."""
    arrays = case.draw()
    for dtype in dtypes_of(case):
        inputs = rounded(arrays, dtype, sorted(CONTRACTS[case.op_type].float32_inputs))
        model = model_of(case, dtype, inputs)
        assert refusal_of(next(node for node in model.graph if contract_of(node))) is None
        lowered(model)


def refusal_of(node: ir.Node) -> str | None:
    """Return what the contract says of a node."""
    x = node.inputs[0]
    assert x is not None
    assert x.shape is not None
    if node.op_type in ("GroupNorm", "SkipGroupNorm"):
        channels = x.shape[3]
        assert isinstance(channels, int)
        return group_norm_refusal(x, channels, node.attributes.get_int("groups"))
    if node.op_type == "BiasSplitGelu":
        return split_gelu_refusal(x)
    if node.op_type == "FastGelu":
        return fast_gelu_refusal(x)
    if node.op_type == "MultiHeadAttention" and node.attributes.get_int("unidirectional", 0) and len(node.inputs) > 1:
        keys = node.inputs[1]
        assert keys is not None
        return causal_refusal(x, keys)
    return dtype_refusal(node.op_type, x)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_contract_refuses_what_the_kernel_refuses(case: Corner) -> None:
    model = model_of(case, "float16", case.draw())
    assert refusal_of(next(iter(model.graph)))


# --- limits -----------------------------------------------------------------------------------------------------------


def value(*shape: int | str | None, dtype: ir.DataType | None = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape), type=None if dtype is None else ir.TensorType(dtype))


@pytest.mark.parametrize(
    ("x", "channels", "groups", "reason"),
    [
        (ir.Value(name="x"), 64, 32, "the input has no known dimensions, the kernel takes 4"),
        (value("B", "S", 64), 64, 32, "the input has 3 dimensions, the kernel takes 4"),
        (value("B", 64, "D", "H", "W"), 64, 32, "the input has 5 dimensions, the kernel takes 4"),
        (value("B", "C", "H", "W"), None, 32, "the number of channels is not known"),
        (value("B", 96, "H", "W"), 96, 32, "96 channels in 32 groups: the kernel takes an even number of channels a"),
        (value("B", 48, "H", "W"), 48, 32, "48 channels in 32 groups: the kernel takes an even number of channels a"),
        (value("B", 32, "H", "W"), 32, 32, "32 channels in 32 groups: the kernel takes an even number of channels a"),
        (value("B", 514, "H", "W"), 514, 1, "514 channels in 1 groups: the kernel takes at most 512 channels a group"),
        (value("B", 64, "H", "W", dtype=ir.DataType.BFLOAT16), 64, 32, "is BFLOAT16, the kernel takes FLOAT, FLOAT16"),
        (value("B", 64, "H", "W", dtype=ir.DataType.DOUBLE), 64, 32, "is DOUBLE, the kernel takes FLOAT, FLOAT16"),
    ],
)
def test_group_norm_refuses(x: ir.Value, channels: int | None, groups: int, reason: str) -> None:
    assert reason in (group_norm_refusal(x, channels, groups) or "")


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (ir.Value(name="x"), "the input does not have 3 dimensions"),
        (value("B", 2560), "the input does not have 3 dimensions"),
        (value("B", "H", "W", 2560), "the input does not have 3 dimensions"),
        (value("B", "S", "D"), "the width None has no kernel, which exist for 2560, 5120, 6144, 10240, 12288"),
        *((value("B", "S", width), f"the width {width} has no kernel") for width in (2, 1280, 2559, 2561, 7680, 24576)),
        (value("B", "S", 2560, dtype=ir.DataType.BFLOAT16), "is BFLOAT16, the kernel takes FLOAT, FLOAT16"),
    ],
)
def test_bias_split_gelu_refuses(x: ir.Value, reason: str) -> None:
    assert reason in (split_gelu_refusal(x) or "")


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (value("B", 3, 64), value("B", 6, 64)),
        (value("B", 6, 64), value("B", 3, 64)),
        (value("B", "S", 64), value("B", "L", 64)),
        (value("B", "S", 64), value("B", 77, 64)),
        (value("B", None, 64), value("B", None, 64)),
        (value("B", 6, 64), ir.Value(name="x")),
    ],
)
def test_causal_attention_refuses(queries: ir.Value, keys: ir.Value) -> None:
    assert "numbers of queries and keys that are not known to be equal" in (causal_refusal(queries, keys) or "")


@pytest.mark.parametrize("size", [77, "S"])
def test_causal_attention_over_as_many_keys_as_queries_is_accepted(size: int | str) -> None:
    assert causal_refusal(value("B", size, 64), value("B", size, 64)) is None


@pytest.mark.parametrize("op_type", CONTRACTS)
def test_types_without_a_kernel_are_refused(op_type: str) -> None:
    dtypes = CONTRACTS[op_type].dtypes
    assert {ir.DataType.FLOAT, ir.DataType.FLOAT16} <= dtypes <= set(FLOATS)
    for dtype in FLOATS:
        refusal = dtype_refusal(op_type, value("B", dtype=dtype))
        assert (refusal is None) == (dtype in dtypes)
        assert refusal is None or refusal.startswith(f"the input is {dtype}, the kernel takes ")
    assert CONTRACTS[op_type].bfloat16 == (ir.DataType.BFLOAT16 in dtypes)
    # What is not known yet is no reason.
    assert dtype_refusal(op_type, value("B", dtype=None)) is None


@pytest.mark.parametrize("op_type", CONTRACTS)
def test_the_cpu_has_the_kernels_that_the_contracts_name(op_type: str) -> None:
    """As ONNX Runtime itself tells."""
    case = next(case for case in CORNERS if case.op_type == op_type)
    arrays = case.draw()
    model = model_of(case, "float32", arrays)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    content = ir.to_proto(model).SerializeToString()
    if not CONTRACTS[op_type].cpu:
        with pytest.raises(Exception, match=f"NOT_IMPLEMENTED.*{op_type}"):
            onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        return
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    found = session.run(None, feeds_of(model, arrays))
    for values, reference in zip(found, lowered_results(case, arrays), strict=True):
        assert relative_error(values, reference) < TOLERANCE


def test_an_operator_of_another_domain_has_no_contract() -> None:
    x = value("B", "S", 2560)
    assert contract_of(ir.node("BiasAdd", [x, x, x])) is None
    assert contract_of(ir.node("BiasAdd", [x, x, x], domain="elsewhere")) is None


# --- through the optimizer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "groups"), [(2 * LARGEST_GROUP, 2), (2 * LARGEST_GROUP + 4, 2), (6, 2)])
def test_a_group_too_large_or_odd_is_left_as_it_is(channels: int, groups: int) -> None:
    model = graph(
        f"float[B,{channels},H,W] x",
        f"float[B,{channels},H,W] y",
        f"c = Conv<kernel_shape=[1,1], group={channels}>(x, w) y = GroupNormalization<num_groups={groups}>(c, g, b)",
        known=f"float[B,{channels},H,W] y",
        w=normal(channels, 1, 1, 1),
        g=normal(channels, seed=1),
        b=normal(channels, seed=2),
    )
    fused = copied(model)
    outcomes = fuse(fused, "cuda")
    accepted = channels == 2 * LARGEST_GROUP
    assert operators(fused, "GroupNorm") == {"GroupNorm": int(accepted)}
    refusals = [refusal.reason for outcome in outcomes for refusal in outcome.refusals]
    assert any(f"{channels} channels in {groups} groups" in reason for reason in refusals) != accepted
    assert_same_function(fused, model, 1e-4, sizes={"B": 2, "H": 3, "W": 5})


@pytest.mark.parametrize("disabled", [(), ("attention",)], ids=["fused", "unfused"])
def test_attention_of_head_size_160_is_fused_or_spelled_out(disabled: tuple[str, ...]) -> None:
    """The kernel of ONNX's own operator, which lies there, is left nothing; tests/gpu runs the result."""
    model = attention_graph(160, 8, "float32")
    fused = copied(model)
    fuse(fused, "cuda", disabled=disabled)
    expected = {"Attention": 0, "MultiHeadAttention": 0 if disabled else 1, "Softmax": 1 if disabled else 0}
    assert operators(fused, *expected) == expected
    feeds = attention_feeds(160, 8, 6, 5)
    assert relative_error(run(fused, feeds)["y"], attended(feeds, 8)) < TOLERANCE
    onnx.checker.check_model(ir.to_proto(attention_graph(160, 8, "float16")), full_check=True)


def test_the_block_that_falls_back_to_bfloat16_is_valid_and_has_it() -> None:
    """tests/gpu runs it."""
    _, narrow = block_in_bfloat16()
    lowered(narrow)
    types = {(node.op_type, node.outputs[0].dtype.name) for node in narrow.graph if node.outputs[0].dtype}
    expected = {"MatMul": "BFLOAT16", "MultiHeadAttention": "BFLOAT16", "SkipLayerNormalization": "BFLOAT16"}
    expected |= {"GroupNorm": "FLOAT", "Tanh": "FLOAT16", "Add": "FLOAT16"}
    assert expected.items() <= types
    assert [value.dtype for value in (*narrow.graph.inputs, *narrow.graph.outputs)] == [ir.DataType.FLOAT16] * 2


def attended(feeds: Mapping[str, Array], heads: int) -> Array:
    q, k, v = (torch.from_numpy(feeds[x]).unflatten(-1, (heads, -1)).transpose(1, 2) for x in ("q", "k", "v"))
    result: Array = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).numpy()
    return np.ascontiguousarray(result)
