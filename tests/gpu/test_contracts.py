"""The contract table against the real kernels: each corner, in fp16 and fp32.

The reference is the operator's body (compared with torch elsewhere), run in float32 on the CPU on
the inputs that the kernel got.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest

from sdonnx.graph.contract import CONTRACTS, SPLIT_GELU_WIDTHS
from sdonnx.graph.edit import MICROSOFT
from sdonnx.graph.lowering import LowerContribOperators
from sdonnx.parity import relative_error
from sdonnx.runtime.session import device_for

Array = npt.NDArray[Any]

# A sum of products of fp16 values in float32, rounded once to fp16: 2^-11, and some for the order of sums.
TOLERANCE = {"float16": 2e-3, "float32": 2e-5}


def model_of(
    op_type: str, inputs: Sequence[Array | None], attributes: dict[str, Any], outputs: int, weights: Sequence[int]
) -> ir.Model:
    """Return a graph of one contrib operator; the inputs at `weights` become initializers."""
    values: list[ir.Value | None] = []
    for index, array in enumerate(inputs):
        if array is None:
            values.append(None)
            continue
        value = ir.Value(
            name=f"x{index}", type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape)
        )
        if index in weights:
            value.const_value = ir.Tensor(array, name=f"x{index}")
        values.append(value)
    node = ir.node(op_type, values, attributes, domain=MICROSOFT, num_outputs=outputs)
    first = next(array for array in inputs if array is not None)
    for index, output in enumerate(node.outputs):
        output.name, output.type = f"y{index}", ir.TensorType(ir.DataType.from_numpy(first.dtype))
    # SkipLayerNormalization's outputs 1 and 2, mean and deviation, are not asked for.
    if op_type == "SkipLayerNormalization":
        for output in node.outputs[1:3]:
            output.name, output.type = "", None
    graph = ir.Graph(
        [value for index, value in enumerate(values) if value is not None and index not in weights],
        [output for output in node.outputs if output.name],
        nodes=[node],
        initializers=[value for index, value in enumerate(values) if value is not None and index in weights],
        opset_imports={"": 23, MICROSOFT: 1},
        name="one",
    )
    return ir.Model(graph, ir_version=10)


def outputs_of(model: ir.Model, feeds: dict[str, Array], provider: str, folder: Path) -> list[Array]:
    path = folder / f"{provider}.onnx"
    ir.save(model, path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    settings: dict[str, str] = {"use_tf32": "0"} if provider == "cuda" else {}
    names = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
    device_for(provider)
    session = onnxruntime.InferenceSession(path, options, providers=[(names[provider], settings)])
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})


def check(
    folder: Path,
    note: Any,
    case: str,
    op_type: str,
    inputs: Sequence[Array | None],
    attributes: dict[str, Any] | None = None,
    outputs: int = 1,
    weights: Sequence[int] = (),
) -> None:
    """Run the kernel in both types and compare it with the body."""
    always_wide = CONTRACTS[op_type].float32_inputs
    for dtype, tolerance in TOLERANCE.items():
        narrow = [
            array if array is None or index in always_wide else array.astype(dtype)
            for index, array in enumerate(inputs)
        ]
        model = model_of(op_type, narrow, attributes or {}, outputs, weights)
        ours = outputs_of(model, {f"x{i}": a for i, a in enumerate(narrow) if a is not None}, "cuda", folder)
        wide = [None if array is None else array.astype(np.float32) for array in narrow]
        body = model_of(op_type, wide, attributes or {}, outputs, weights)
        LowerContribOperators()(body)
        reference = outputs_of(body, {f"x{i}": a for i, a in enumerate(wide) if a is not None}, "cpu", folder)
        errors = [relative_error(a, b) for a, b in zip(ours, reference, strict=True)]
        note("contracts", {"operator": op_type, "case": case, "dtype": dtype, "relative_error": max(errors)})
        assert max(errors) < tolerance, (case, dtype, errors)


@pytest.fixture
def draw() -> Any:
    generator = np.random.default_rng(0)
    return lambda *shape: generator.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("channels", [128, 256, 320, 512, 640, 960, 1280, 1920, 2560])
@pytest.mark.parametrize("activation", [0, 1])
def test_group_norm(channels: int, activation: int, draw: Any, tmp_path: Path, note: Any) -> None:
    attributes = {"groups": 32, "epsilon": 1e-5, "activation": activation, "channels_last": 1}
    inputs = [draw(2, 9, 13, channels), draw(channels), draw(channels)]
    check(tmp_path, note, f"C={channels} activation={activation}", "GroupNorm", inputs, attributes)


@pytest.mark.parametrize("channels", [320, 1280, 1920])
@pytest.mark.parametrize("form", ["image", "row", "matrix"])
@pytest.mark.parametrize("biased", [False, True])
def test_skip_group_norm(channels: int, form: str, biased: bool, draw: Any, tmp_path: Path, note: Any) -> None:
    attributes = {"groups": 32, "epsilon": 1e-5, "activation": 1, "channels_last": 1}
    skip = {"image": (2, 9, 13, channels), "row": (2, 1, 1, channels), "matrix": (2, channels)}[form]
    inputs = [draw(2, 9, 13, channels), draw(channels), draw(channels), draw(*skip)]
    if biased:
        inputs.append(draw(channels))
    case = f"C={channels} skip={form} bias={biased}"
    check(tmp_path, note, case, "SkipGroupNorm", inputs, attributes, outputs=2)


def test_group_norm_refuses_what_the_contract_refuses(draw: Any, tmp_path: Path) -> None:
    """96 channels in 32 groups: an odd number of channels a group."""
    attributes = {"groups": 32, "epsilon": 1e-5, "activation": 0, "channels_last": 1}
    inputs = [draw(1, 8, 8, 96).astype(np.float16), draw(96), draw(96)]
    model = model_of("GroupNorm", inputs, attributes, 1, ())
    with pytest.raises(Exception, match="GroupNorm"):
        outputs_of(model, {f"x{i}": a for i, a in enumerate(inputs)}, "cuda", tmp_path)


@pytest.mark.parametrize("width", sorted(SPLIT_GELU_WIDTHS))
def test_bias_split_gelu(width: int, draw: Any, tmp_path: Path, note: Any) -> None:
    check(tmp_path, note, f"width={width}", "BiasSplitGelu", [draw(2, 77, width), draw(width)])


def test_bias_split_gelu_refuses_what_the_contract_refuses(draw: Any, tmp_path: Path) -> None:
    inputs = [draw(1, 8, 2048).astype(np.float16), draw(2048).astype(np.float16)]
    model = model_of("BiasSplitGelu", inputs, {}, 1, ())
    with pytest.raises(Exception, match="BiasSplitGelu"):
        outputs_of(model, {f"x{i}": a for i, a in enumerate(inputs)}, "cuda", tmp_path)


@pytest.mark.parametrize("channels", [128, 320, 512, 640, 1280])
def test_bias_add(channels: int, draw: Any, tmp_path: Path, note: Any) -> None:
    inputs = [draw(2, 117, channels), draw(channels), draw(2, 117, channels)]
    check(tmp_path, note, f"C={channels}", "BiasAdd", inputs)


@pytest.mark.parametrize("width", [64, 320, 640, 768, 1024, 1280])
@pytest.mark.parametrize("biased", [False, True])
def test_skip_layer_normalization(width: int, biased: bool, draw: Any, tmp_path: Path, note: Any) -> None:
    inputs = [draw(2, 77, width), draw(2, 77, width), draw(width), draw(width)]
    if biased:
        inputs.append(draw(width))
    case = f"D={width} bias={biased}"
    check(tmp_path, note, case, "SkipLayerNormalization", inputs, {"epsilon": 1e-5}, outputs=4)


@pytest.mark.parametrize(
    ("channels", "out", "kernel", "stride", "pad"),
    [
        (4, 320, 3, 1, 1),
        (320, 4, 3, 1, 1),
        (320, 320, 3, 2, 1),
        (640, 640, 3, 1, 1),
        (8, 8, 1, 1, 0),
        (128, 128, 3, 2, 0),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_nhwc_conv(
    channels: int, out: int, kernel: int, stride: int, pad: int, biased: bool, draw: Any, tmp_path: Path, note: Any
) -> None:
    attributes = {
        "kernel_shape": [kernel] * 2,
        "strides": [stride] * 2,
        "pads": [pad] * 4,
        "dilations": [1, 1],
        "group": 1,
    }
    weight = draw(out, kernel, kernel, channels) / np.sqrt(channels * kernel**2)
    inputs = [draw(2, 10, 14, channels), weight.astype(np.float32), *([draw(out)] if biased else [])]
    case = f"C={channels} M={out} kernel={kernel} stride={stride} pad={pad} bias={biased}"
    check(tmp_path, note, case, "NhwcConv", inputs, attributes, weights=(1, 2))


@pytest.mark.parametrize("head_size", [40, 64, 80, 160, 512])
@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (1024, 77), (77, 77)])
def test_multi_head_attention(head_size: int, queries: int, keys: int, draw: Any, tmp_path: Path, note: Any) -> None:
    """Head size 160 is where another kernel of ONNX Runtime, flash attention, is silently wrong on sm_90."""
    heads = 1 if head_size == 512 else 8
    width = heads * head_size
    inputs = [draw(2, queries, width), draw(2, keys, width), draw(2, keys, width)]
    case = f"H={head_size} S={queries} L={keys}"
    check(tmp_path, note, case, "MultiHeadAttention", inputs, {"num_heads": heads})


@pytest.mark.parametrize("form", ["causal", "scale", "bias", "packed_qkv", "packed_kv"])
def test_multi_head_attention_forms(form: str, draw: Any, tmp_path: Path, note: Any) -> None:
    heads, head_size, length = 8, 64, 80
    attributes: dict[str, Any] = {"num_heads": heads}
    inputs: list[Array | None] = [draw(2, length, heads * head_size) for _ in range(3)]
    if form == "causal":
        attributes["unidirectional"] = 1
    elif form == "scale":
        attributes["scale"] = 0.05
    elif form == "bias":
        inputs += [None, None, draw(1, 1, length, length)]
    elif form == "packed_qkv":
        inputs = [draw(2, length, heads, 3, head_size)]
    else:
        inputs = [draw(2, length, heads * head_size), draw(2, 77, heads, 2, head_size)]
    check(tmp_path, note, form, "MultiHeadAttention", inputs, attributes)
