"""Times of products of 8-bit factors on a GPU, and ONNX Runtime's own operators for weights in 8 bits.

The cases of our operators are in tests/gpu/test_kernels_gpu.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support.graphs import graph, normal
from support.operator_tests import model_bytes, quiet_options

from sdonnx.doctor.kernel_library import usable_library
from sdonnx.metrics import relative_error
from sdonnx.operators.kernel_case import SDONNX_DOMAIN, Array
from sdonnx.operators.sdonnx_domain.eight_bits import EightBits
from sdonnx.quantization.quantization_config import QuantizationPolicy
from sdonnx.quantization.quantization_types import TYPES
from sdonnx.quantization.quantize_weights import QuantizeWeights, restore_late
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph, SessionSettings

# Rows, K and N of products of a call with guidance: SDXL at 1024x1024 and PixArt-alpha at 1024x1024.
SHAPES = (
    (8192, 640, 640), (2048, 1280, 1280), (8192, 640, 5120), (8192, 2560, 640), (2048, 1280, 10240), (2048, 5120, 1280),
    (8192, 1152, 1152), (8192, 1152, 4608), (8192, 4608, 1152),
)  # fmt: skip
COPIES = 16  # products in a graph, each by a weight of its own: together larger than the L2 cache


@pytest.fixture(scope="module")
def library() -> Path:
    found, reason = usable_library(device_for("cuda").capability())
    if found is None:
        pytest.skip(reason)
    return found.path


def cuda_session(model: ir.Model) -> onnxruntime.InferenceSession:
    device_for("cuda")
    options = quiet_options()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return onnxruntime.InferenceSession(
        model_bytes(model), options, providers=["CUDAExecutionProvider"],
        disabled_optimizers=["QDQSelectorActionTransformer"],
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["float16", "e4m3", "e4m3, static", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_times(shape: tuple[int, int, int], kind: str, library: Path, note: Any, tmp_path: Path) -> None:
    """Microseconds of a product, alone and with the quantization of its rows, next to ONNX Runtime's in fp16."""
    times = {}
    for quantizes in (False, True) if kind != "float16" else (False,):
        path = tmp_path / "times.onnx"
        ir.save(_chain(shape, kind, quantizes), path)
        times["with rows" if quantizes else "alone"] = _microseconds(path, shape, library) / COPIES
    note("times of products", {"shape": list(shape), "kind": kind, **times})


def _chain(shape: tuple[int, int, int], kind: str, quantizes: bool) -> ir.Model:
    """Return a graph of products x @ w of one x and several weights."""
    rows, inner, outer = shape
    draw = np.random.default_rng(0)
    x = ir.Value(name="x", shape=ir.Shape([rows, inner]), type=ir.TensorType(ir.DataType.FLOAT16))
    nodes: list[ir.Node] = []
    initializers: list[ir.Value] = []

    def weight(name: str, array: Array) -> ir.Value:
        value = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype))
        )
        value.const_value = ir.Tensor(array, name=name)
        initializers.append(value)
        return value

    def rows_of() -> list[ir.Value]:
        attributes = {"format": int(EightBits.INT8 if kind == "int8" else EightBits.E4M3)}
        inputs = [x, weight(f"scale{len(nodes)}", np.array(0.01, np.float16))] if "static" in kind else [x]
        nodes.append(ir.node("QuantizeRows", inputs, attributes, domain=SDONNX_DOMAIN, num_outputs=2))
        return list(nodes[-1].outputs)

    outputs = []
    quantized = None
    for index in range(COPIES):
        if kind == "float16":
            wide = draw.standard_normal((inner, outer), np.float32).astype(np.float16)
            nodes.append(ir.node("MatMul", [x, weight(f"w{index}", wide)]))
        else:
            quantized = rows_of() if quantizes or quantized is None else quantized
            number_format = int(EightBits.INT8 if kind == "int8" else EightBits.E4M3)
            bits = draw.integers(0, 0x58, (outer, inner), np.uint8) | (
                draw.integers(0, 2, (outer, inner), np.uint8) << 7
            )
            scales = np.full(outer, 0.01, np.float32)
            nodes.append(
                ir.node(
                    "ScaledMatMul",
                    [*quantized, weight(f"w{index}", bits), weight(f"s{index}", scales)],
                    {"x_format": number_format, "w_format": number_format},
                    domain=SDONNX_DOMAIN,
                )
            )
        output = nodes[-1].outputs[0]
        output.name, output.type, output.shape = (
            f"y{index}",
            ir.TensorType(ir.DataType.FLOAT16),
            ir.Shape([rows, outer]),
        )
        outputs.append(output)
    imports = {"": 23, SDONNX_DOMAIN: 1}
    made = ir.Graph([x], outputs, nodes=nodes, initializers=initializers, opset_imports=imports, name="times")
    return ir.Model(made, ir_version=10)


def _microseconds(path: Path, shape: tuple[int, int, int], library: Path) -> float:
    """Return the time of a graph as a captured CUDA graph, in us."""
    device = device_for("cuda")
    graph_ = Graph(path, device, capture=True, settings=SessionSettings(library=library))
    given = {"x": device.upload(normal(*shape[:2]).astype(np.float16))}
    made = {name: device.empty((shape[0], shape[2]), np.float16) for name in graph_.outputs}
    device.enter()
    run = graph_.bind({**given, **made})
    run.capture()
    for _ in range(3):
        run()
    best = float("inf")
    for _ in range(5):
        start = device.mark()
        for _ in range(10):
            run()
        end = device.mark()
        device.synchronize()
        best = min(best, device.milliseconds(start, end) / 10)
    return best * 1e3


@pytest.mark.parametrize("name", ["int8_weightonly", "fp8_e4m3_weightonly", "fp8_e5m2_weightonly",
                                  "fp8_e4m3_e4m3_dynamic", "int8_dynamic", "fp8_static"])  # fmt: skip
@pytest.mark.parametrize("kind", ["product", "convolution"])
def test_onnxruntime_has_cuda_kernels_for_quantized_graphs(kind: str, name: str, note: Any) -> None:
    """Nothing falls back to the CPU; the result agrees with the CPU provider's."""
    if kind == "product":
        model = graph(
            "float16[B,S,64] x", "float16[B,S,128] y", "y = MatMul(x, w)", w=normal(64, 128).astype(np.float16)
        )
        feeds = {"x": normal(2, 5, 64).astype(np.float16)}
    else:
        model = graph(
            "float16[B,H,W,64] x", "float16[B,H,W,128] y",
            "y = com.microsoft.NhwcConv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w)",
            w=normal(128, 3, 3, 64).astype(np.float16),
        )  # fmt: skip
        feeds = {"x": normal(2, 6, 7, 64).astype(np.float16)}
    for node in model.graph:
        node.metadata_props["module"] = "layer"
    expected = cuda_session(model).run(None, feeds)[0].astype(np.float32)
    QuantizeWeights(QuantizationPolicy(default=TYPES[name]), "unet", {"layer": 4.0})(model)
    restore_late(model)
    found = cuda_session(model).run(None, feeds)[0].astype(np.float32)
    error = relative_error(found, expected)
    note("quantized graphs", {"kind": kind, "type": name, "relative_error": error})
    quantizes = kind == "product" or TYPES[name].is_weight_only
    assert (1e-3 if quantizes else 0) <= error < 0.15
