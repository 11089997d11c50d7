"""Kernels against their reference bodies with other sizes and values than the contracts' kernel cases.

Also the standard operators in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from support.graphs import graph
from support.operator_tests import compare_kernel

from sdonnx.metrics import relative_error
from sdonnx.operators.kernel_case import Array, KernelCase
from sdonnx.operators.operator_table import dtypes_of
from sdonnx.precision.convert import BFLOAT16_OPERATORS
from sdonnx.runtime.device.device import device_for

_NO_ATTRIBUTES: Mapping[str, Any] = {}
SILU = {"epsilon": 1e-6, "activation": 1, "channels_last": 1}


def check(
    note: Any,
    name: str,
    op_type: str,
    inputs: Sequence[Array | None],
    attributes: Mapping[str, Any] = _NO_ATTRIBUTES,
    outputs: int = 1,
    weights: Sequence[int] = (),
) -> None:
    """Compare a kernel with the reference body on the values `inputs`, in every data type of its contract."""
    shapes = tuple(None if array is None else array.shape for array in inputs)
    case = KernelCase(op_type, name, shapes, attributes, outputs, tuple(weights))
    for dtype in dtypes_of(case):
        compare_kernel(case, inputs, dtype, note)


@pytest.fixture
def normal() -> Any:
    generator = np.random.default_rng(1)
    return lambda *shape: np.asarray(generator.standard_normal(shape), np.float32)


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (128, 32), (8, 4), (2560, 32), (320, 16), (960, 32)])
@pytest.mark.parametrize("image", [(1, 1, 1), (3, 1, 7), (1, 5, 1), (2, 33, 31), (1, 64, 64)])
def test_group_norm(channels: int, groups: int, image: tuple[int, ...], normal: Any, note: Any) -> None:
    inputs = [normal(*image, channels), normal(channels), normal(channels)]
    case = f"C={channels} G={groups} image={image}"
    check(note, case, "GroupNorm", inputs, SILU | {"groups": groups})


@pytest.mark.parametrize("image", [(1, 1, 1), (3, 1, 7), (2, 33, 31)])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("outputs", [1, 2])
def test_skip_group_norm(image: tuple[int, ...], rows: bool, outputs: int, normal: Any, note: Any) -> None:
    skip = normal(image[0], 1, 1, 640) if rows else normal(*image, 640)
    inputs = [normal(*image, 640), normal(640), normal(640), skip]
    case = f"image={image} rows={rows} outputs={outputs}"
    check(note, case, "SkipGroupNorm", inputs, SILU | {"groups": 32, "activation": 0}, outputs=outputs)


@pytest.mark.parametrize("width", [2560, 12288])
@pytest.mark.parametrize("rows", [(1, 1), (3, 7), (1, 4096)])
def test_bias_split_gelu(width: int, rows: tuple[int, int], normal: Any, note: Any) -> None:
    check(note, f"width={width} rows={rows}", "BiasSplitGelu", [normal(*rows, width), normal(width)])


@pytest.mark.parametrize("channels", [8, 63, 321, 1024, 2560])
@pytest.mark.parametrize("rows", [(1, 1), (3, 7)])
def test_bias_add(channels: int, rows: tuple[int, int], normal: Any, note: Any) -> None:
    inputs = [normal(*rows, channels), normal(channels), normal(*rows, channels)]
    check(note, f"C={channels} rows={rows}", "BiasAdd", inputs)


@pytest.mark.parametrize("width", [8, 63, 65, 384, 1001, 2048, 5120, 12288])
@pytest.mark.parametrize("rows", [(1, 1), (3, 7)])
def test_skip_layer_normalization(width: int, rows: tuple[int, int], normal: Any, note: Any) -> None:
    inputs = [normal(*rows, width), normal(*rows, width), normal(width), normal(width), normal(width)]
    case = f"D={width} rows={rows}"
    check(note, case, "SkipLayerNormalization", inputs, {"epsilon": 1e-5}, outputs=4)


CONVOLUTIONS = {
    "5x5": ((5, 5), [1, 1], [1, 1], 1),
    "dilated": ((3, 3), [1, 1], [2, 2], 1),
    "grouped": ((3, 3), [1, 1], [1, 1], 4),
    "depthwise": ((3, 3), [1, 1], [1, 1], 32),
    "oblong": ((1, 3), [1, 1], [1, 1], 1),
    "1x1 strided": ((1, 1), [2, 2], [1, 1], 1),
    "stride of 3": ((3, 3), [3, 3], [1, 1], 1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("image", [(1, 7, 7), (3, 8, 13)])
def test_nhwc_conv(name: str, image: tuple[int, ...], normal: Any, note: Any) -> None:
    kernel, strides, dilations, group = CONVOLUTIONS[name]
    attributes = {
        "kernel_shape": list(kernel),
        "strides": strides,
        "pads": [kernel[0] // 2, kernel[1] // 2] * 2,
        "dilations": dilations,
        "group": group,
    }
    weight = normal(64, *kernel, 32 // group) / np.sqrt(32 // group * kernel[0] * kernel[1])
    inputs = [normal(*image, 32), weight.astype(np.float32), normal(64)]
    check(note, f"{name} image={image}", "NhwcConv", inputs, attributes, weights=(1, 2))


@pytest.mark.parametrize("head_size", [8, 40, 64, 72, 80, 128, 160, 256])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 1, 1), (3, 1, 77), (1, 7, 5), (2, 65, 300), (1, 4096, 77)])
def test_multi_head_attention(head_size: int, batch: int, queries: int, keys: int, normal: Any, note: Any) -> None:
    width = 2 * head_size
    inputs = [normal(batch, queries, width), normal(batch, keys, width), normal(batch, keys, width)]
    case = f"H={head_size} B={batch} S={queries} L={keys}"
    check(note, case, "MultiHeadAttention", inputs, {"num_heads": 2, "scale": 0.3})


@pytest.mark.parametrize("spread", [(1, 1), (3, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize(("queries", "keys"), [(77, 77), (64, 80), (5, 7)])
@pytest.mark.parametrize("head_size", [40, 64, 160])
def test_multi_head_attention_with_a_mask(
    head_size: int, queries: int, keys: int, spread: tuple[int, int], normal: Any, note: Any
) -> None:
    width = 4 * head_size
    inputs = [normal(3, queries, width), normal(3, keys, width), normal(3, keys, width), None, None]
    inputs.append(np.where(normal(*spread, queries, keys) > 1.2, np.float32(-10000), normal(*spread, queries, keys)))
    case = f"H={head_size} S={queries} L={keys} mask={spread}"
    check(note, case, "MultiHeadAttention", inputs, {"num_heads": 4})


@pytest.mark.parametrize("head_size", [40, 64, 160])
@pytest.mark.parametrize("length", [1, 7, 77, 1024])
def test_causal_multi_head_attention(head_size: int, length: int, normal: Any, note: Any) -> None:
    inputs = [normal(2, length, 4 * head_size) for _ in range(3)]
    attributes = {"num_heads": 4, "unidirectional": 1}
    check(note, f"causal H={head_size} S={length}", "MultiHeadAttention", inputs, attributes)


# In bfloat16: x and w in float32, cast on the way in and out; the numbers are whole, so that no rounding counts.
BFLOAT16 = {
    "Add": "y = Add(x, x)", "Cast": "y = Identity(x)", "Concat": "y = Concat<axis=1>(x, x)", "Div": "y = Div(x, two)",
    "Expand": "y = Expand(x, s)", "Gather": "y = Gather(x, i)", "Gemm": "y = Gemm(x, w)", "Identity": "y = Identity(x)",
    "LayerNormalization": "y = LayerNormalization(x, g, b)", "MatMul": "y = MatMul(x, w)", "Mul": "y = Mul(x, two)",
    "Reshape": "y = Reshape(x, r)", "Sigmoid": "y = Sigmoid(x)", "Slice": "y = Slice(x, i, j)",
    "Softmax": "y = Softmax(x)", "Split": "y, z = Split<axis=1, num_outputs=2>(x)", "Sub": "y = Sub(x, two)",
    "Transpose": "y = Transpose(x)", "Unsqueeze": "y = Unsqueeze(x, i)",
}  # fmt: skip


def test_every_standard_operator_for_bfloat16_is_tested() -> None:
    assert BFLOAT16.keys() == BFLOAT16_OPERATORS


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_has_kernels(name: str, note: Any) -> None:
    """test_contracts.py runs the contrib operators in bfloat16."""
    body = BFLOAT16[name]
    whole = np.random.default_rng(0).integers(-3, 4, (16, 16)).astype(np.float32)
    weights = {
        "two_": np.array(2, np.float32), "w_": np.eye(16, dtype=np.float32)[::-1].copy(),
        "g_": np.ones(16, np.float32), "b_": np.zeros(16, np.float32),
    }  # fmt: skip
    integers = {"s": [3, 16, 16], "i": [0], "j": [8], "r": [4, 64]}
    casts = " ".join(f"{key[:-1]} = Cast<to=16>({key})" for key in weights)
    text = f"x = Cast<to=16>(x_) {casts} {body} out = Cast<to=1>(y)"
    rank = 3 if name in {"Expand", "Unsqueeze"} else 2
    shape = ",".join("ABC"[:rank])
    arrays = weights | {key: np.array(value, np.int64) for key, value in integers.items()}
    used = {key: array for key, array in arrays.items() if key in weights or f" {key})" in body or f" {key}," in body}
    model = graph("float[16,16] x_", f"float[{shape}] out", text, **used)
    proto = ir.to_proto(model)
    wide = onnx.ModelProto.FromString(proto.SerializeToString())
    for node in wide.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to":
                attribute.i = 1
    del wide.graph.value_info[:]
    results = []
    for candidate, provider in ((proto, "CUDAExecutionProvider"), (wide, "CUDAExecutionProvider")):
        device_for("cuda")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        session = onnxruntime.InferenceSession(candidate.SerializeToString(), options, providers=[provider])
        results.append(session.run(["out"], {"x_": whole})[0])
    error = relative_error(*results)
    note("bfloat16", {"operator": name, "relative_error": error})
    assert error < 2**-7  # bfloat16 holds 8 bits
