"""Weights of small graphs become DequantizeLinear of 8-bit values, which ONNX Runtime leaves as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from support.dequantize import dequantize
from support.graphs import Array, copied, feeds_for, graph, normal, operators, run, text_of
from support.pipelines import refused

from sdonnx.compose import shared_weights
from sdonnx.errors import FolderError, OptionError, WeightsError
from sdonnx.folder.stored_numbers import quantize, scales_of
from sdonnx.graph.edit import input_of, tensor_of
from sdonnx.graph.match import is_matrix
from sdonnx.graph.modules import MODULE_KEY
from sdonnx.graph.tensors import read
from sdonnx.metrics import relative_error
from sdonnx.quantization.quantization_config import QuantizationPolicy
from sdonnx.quantization.quantization_types import TYPES, QuantizationType
from sdonnx.quantization.quantize_weights import QuantizedWeight, QuantizeWeights, require_not_quantized, weighted_nodes
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph, SessionSettings

CPU = Device("cpu")
INT8, E4M3, WHOLE = (TYPES[name] for name in ("int8_weightonly", "fp8_e4m3_weightonly", "fp8_e4m3_e5m2_weightonly"))
PER_TENSOR = TYPES["fp8_e4m3_e4m3_weightonly_per_tensor"]

PRODUCT = ("y = MatMul(x, w)", {"w": normal(8, 12)}, 1)
KINDS: dict[str, tuple[str, dict[str, Array], int]] = {
    "MatMul": PRODUCT,
    "Gemm": ("f = Flatten<axis=2>(x) g = Gemm(f, w, b) y = Reshape(g, s)", {"w": normal(8, 12), "b": normal(12)}, 1),
    "Gemm, transposed": ("f = Flatten<axis=2>(x) g = Gemm<transB=1>(f, w) y = Reshape(g, s)", {"w": normal(12, 8)}, 0),
    "Conv": (
        "t = Transpose<perm=[0,2,1]>(x) c = Conv<kernel_shape=[3], pads=[1,1]>(t, w) y = Transpose<perm=[0,2,1]>(c)",
        {"w": normal(12, 8, 3)},
        0,
    ),
    "with a gate": ("v = Mul(w, gate) y = MatMul(x, v)", {"w": normal(8, 12), "gate": normal(12, seed=1)}, 1),
}


def model_of(body: str, **weights: Array) -> ir.Model:
    shape = {"s": np.array([2, 6, 12], np.int64)} if " s)" in body else {}
    return graph("float[B,S,8] x", "float[B,S,12] y", body, **weights, **shape)


def quantized(model: ir.Model, found: QuantizationType = INT8, **policy: Any) -> QuantizeWeights:
    quantization = QuantizeWeights(QuantizationPolicy(default=found, **policy), "unet")
    quantization(model)
    return quantization


def named(model: ir.Model, **modules: str) -> ir.Model:
    """Give the nodes that compute values of these names modules."""
    for node in model.graph:
        if (name := node.outputs[0].name) in modules:
            node.metadata_props[MODULE_KEY] = modules[name]
    return model


@pytest.mark.parametrize("found", [INT8, E4M3, WHOLE, PER_TENSOR], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_computes_with_restored_weights(kind: str, found: QuantizationType) -> None:
    body, weights, axis = KINDS[kind]
    model, along = model_of(body, **weights), None if found.per_tensor else axis
    wide = weights["w"]
    scales = scales_of(wide, found.weights, along, np.float32, "w")
    restored = dequantize(quantize(wide, scales, found.weights, along), scales, along)
    expected = model_of(body, **{**weights, "w": restored})
    quantization = quantized(model, found)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert operators(model, "DequantizeLinear") == {"DequantizeLinear": 1}
    assert "w" not in model.graph.initializers
    assert {value.dtype for value in model.graph.initializers.values()} >= {found.weights.dtype}
    size = wide.size + scales.size * 4
    assert quantization.quantized == [QuantizedWeight("w", found, wide.size * 4, size)]
    feeds = feeds_for(model)
    assert relative_error(run(model, feeds)["y"], run(expected, feeds)["y"]) < 1e-6
    error = relative_error(run(model, feeds)["y"], run(model_of(body, **weights), feeds)["y"])
    assert 1e-4 < error < {"int8": 0.02, "e4m3": 0.06, "e5m2": 0.12}[found.weights.name]


def test_scales_have_the_type_of_the_weight() -> None:
    model = graph("float16[B,S,8] x", "float16[B,S,12] y", "y = MatMul(x, w)", w=normal(8, 12).astype(np.float16))
    quantized(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    types = {str(name): value.dtype for name, value in model.graph.initializers.items()}
    assert types == {"w.int8": ir.DataType.INT8, "w.int8.scale": ir.DataType.FLOAT16}
    assert model.graph.outputs[0].dtype == ir.DataType.FLOAT16


def test_a_weight_of_several_products_is_stored_once() -> None:
    model = model_of("a = MatMul(x, w) b = MatMul(x, w) y = Add(a, b)", w=normal(8, 12))
    assert len(quantized(model).quantized) == 1
    assert operators(model) == {"DequantizeLinear": 1, "MatMul": 2, "Add": 1}
    model = named(model_of("a = MatMul(x, w) b = MatMul(x, w) y = Add(a, b)", w=normal(8, 12)), a="one", b="two")
    quantized(model, modules=(("two", None),))
    assert operators(model, "DequantizeLinear") == {"DequantizeLinear": 1}
    assert set(model.graph.initializers) == {"w", "w.int8", "w.int8.scale"}
    run(model, feeds_for(model))


@pytest.mark.parametrize(
    "body",
    [
        "y = MatMul(x, v)",
        "v = MatMul(w, w) y = MatMul(x, v)",
        "g = Gather<axis=0>(w, s) f = Cast<to=1>(g) y = Add(x, f)",
    ],
    ids=["computed", "constant times constant", "table"],
)
def test_other_values_stay(body: str) -> None:
    """Products of two activations, and tables."""
    if "Gather" in body:
        model = graph("float[B,S,8] x", "float[B,S,8] y", body, w=normal(4, 8), s=np.array([1], np.int64))
    elif "w" in body:
        model = graph("float[B,S,8] x", "float[B,S,8] y", body, w=normal(8, 8))
        assert [each.node.outputs[0].name for each in weighted_nodes(model.graph)] == ["v"]
        return
    else:
        model = graph("float[B,S,8] x, float[8,12] v", "float[B,S,12] y", body)
    before = text_of(model)
    assert quantized(model).quantized == []
    assert text_of(model) == before


def test_integer_weights_stay() -> None:
    model = graph("int32[B,S,8] x", "int32[B,S,12] y", "y = MatMul(x, w)", w=np.ones((8, 12), np.int32))
    assert quantized(model).quantized == []


def test_types_by_module() -> None:
    weights = {name: normal(8, 8, seed=index) for index, name in enumerate("abcd")}
    body = "p = MatMul(x, a) q = MatMul(p, b) r = MatMul(q, c) y = MatMul(r, d)"
    model = graph("float[B,S,8] x", "float[B,S,8] y", body, **weights)
    named(model, p="blocks.0.to_q", q="blocks.1.to_q", r="conv_in", y="proj")
    found = quantized(model, E4M3, modules=(("proj", INT8), ("blocks.1.*", None)))
    assert [(each.module, each.type) for each in found.quantized] == [("blocks.0.to_q", E4M3), ("proj", INT8)]
    assert set(model.graph.initializers) >= {"a.e4m3", "b", "c", "d.int8"}


@pytest.mark.parametrize("policy", [{"modules": (("block.*", INT8),)}, {"only": ("blocks.0.to_q", "absent")}])
def test_modules_that_match_nothing_are_refused_with_those_that_could(policy: dict[str, Any]) -> None:
    model = named(model_of("p = MatMul(x, u) y = MatMul(p, w)", u=normal(8, 8), w=normal(8, 12)), p="blocks.0.to_q")
    named(model, y="blocks.1.to_q")
    before = text_of(model)
    with refused(OptionError, "matches no matmul or convolution", "blocks.*.to_q"):
        quantized(model, **policy)
    assert text_of(model) == before


def test_many_modules_are_named_by_their_series() -> None:
    weights = {f"w{index}": normal(8, 8) for index in range(60)}
    steps = [f"{'y' if index == 59 else f't{index}'} = MatMul({f't{index - 1}' if index else 'x'}, w{index})"
             for index in range(60)]  # fmt: skip
    model = graph("float[B,S,8] x", "float[B,S,8] y", " ".join(steps), **weights)
    for index, node in enumerate(model.graph):
        node.metadata_props[MODULE_KEY] = f"blocks.{index}.to_q" if index < 10 else f"other{index}"
    with refused(OptionError, "blocks.*.to_q, other10, ", "other48, ..."):
        quantized(model, modules=(("absent", INT8),))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_when_they_are_written(value: float) -> None:
    weight = normal(8, 12)
    weight[3, 4] = value
    model = model_of("y = MatMul(x, w)", w=weight)
    quantized(model)
    with refused(WeightsError, "the weight w holds NaN or infinity"):
        read(tensor_of(model.graph.initializers["w.int8"]))


@pytest.mark.parametrize(
    "body",
    ["q = QuantizeLinear(x, s) y = DequantizeLinear(q, s)", "y = com.microsoft.MatMulNBits<K=8, N=8>(x, q, v)"],
)  # fmt: skip
def test_quantized_graphs_are_refused(body: str) -> None:
    weights = {"s": np.float32(1)} if "Linear" in body else {"q": np.zeros((8, 1, 32), np.uint8), "v": normal(8, 1)}
    model = graph("float[B,8] x", "float[B,8] y", body, **weights)
    with refused(FolderError, "unet/model.onnx is quantized already"):
        require_not_quantized(model, "unet/model.onnx")
    require_not_quantized(model_of("y = MatMul(x, w)", w=normal(8, 12)), "unet/model.onnx")


def saved(model: ir.Model, folder: Path) -> Path:
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=32)
    return folder / "model.onnx"


@pytest.mark.parametrize("found", [INT8, E4M3, PER_TENSOR], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", KINDS)
def test_onnxruntime_keeps_weights_in_8_bits(kind: str, found: QuantizationType, tmp_path: Path) -> None:
    """It neither folds them to the wide type, nor turns the product into one that rounds activations."""
    body, weights, _ = KINDS[kind]
    model = model_of(body, **weights)
    quantized(model, found)
    path, kept = saved(model, tmp_path), tmp_path / "kept.onnx"
    settings = onnxruntime.SessionOptions()
    settings.optimized_model_filepath = str(kept)
    settings.log_severity_level = 3
    feeds = feeds_for(model)
    ours = Graph(path, CPU, settings=SessionSettings(session_options=settings)).run(feeds)
    after = ir.load(kept)
    assert operators(after, "DequantizeLinear", "MatMulNBits") == {"DequantizeLinear": 1, "MatMulNBits": 0}
    assert found.weights.dtype in {value.dtype for value in after.graph.initializers.values()}
    assert relative_error(ours["y"], run(model, feeds)["y"]) < 1e-5


def test_onnxruntime_would_round_activations(tmp_path: Path) -> None:
    """The reason to disable an optimizer: by default a product by int8 is one of two int8 factors on the CPU."""
    model = model_of("y = MatMul(x, w)", w=normal(8, 12))
    feeds = feeds_for(model)
    quantized(model)
    path = saved(model, tmp_path)
    default = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["y"], feeds)[0]
    ours = Graph(path, CPU).run(feeds)["y"]
    assert relative_error(ours, run_in_numpy(model, feeds)) < 1e-6
    assert relative_error(default, ours) > 1e-3


def run_in_numpy(model: ir.Model, feeds: dict[str, Array]) -> Array:
    stored, scale = (read(tensor_of(model.graph.initializers[name])) for name in ("w.int8", "w.int8.scale"))
    product: Array = feeds["x"] @ dequantize(stored, scale, 1)
    return product


def test_a_restored_weight_counts_as_a_constant_matrix() -> None:
    model = model_of("y = MatMul(x, w)", w=normal(8, 12))
    quantized(model)
    restored = next(node for node in model.graph if node.op_type == "MatMul").inputs[1]
    assert is_matrix(restored)
    dynamic = graph(
        "int8[8,12] q, float[12] s, float[B,8] x",
        "float[B,12] y",
        "w = DequantizeLinear<axis=1>(q, s) y = MatMul(x, w)",
    )
    assert not is_matrix(input_of(next(node for node in dynamic.graph if node.op_type == "MatMul"), 1))


@pytest.mark.parametrize(("found", "count"), [(INT8, 1), (E4M3, 0)])
def test_several_graphs_share_weights_in_int8(found: QuantizationType, count: int, tmp_path: Path) -> None:
    """Sessions accept no weights in 8-bit floating point."""
    model = model_of("y = MatMul(x, w)", w=normal(8, 12))
    wide = graph("float[B,256] x", "float[B,512] y", "y = MatMul(x, w)", w=normal(256, 512))
    for each in (model, wide):
        quantized(each, found)
    ir.save(wide, tmp_path / "a.onnx", external_data="a.data", size_threshold_bytes=0)
    first = ir.load(tmp_path / "a.onnx")
    shared = shared_weights([first, copied(first)])
    assert len(shared) == count
    if count:
        assert shared["w.int8"]["dtype"] == "I8"
        assert shared["w.int8"]["shape"] == [256, 512]


def test_weights_are_stored_as_onnx_says(tmp_path: Path) -> None:
    """Another reader of the file, ml_dtypes, finds the same numbers."""
    wide = normal(8, 12)
    model = model_of("y = MatMul(x, w)", w=wide)
    quantized(model, E4M3)
    proto = onnx.load(saved(model, tmp_path))
    tensors = {each.name: onnx.numpy_helper.to_array(each) for each in proto.graph.initializer}
    stored = tensors["w.e4m3"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert relative_error(stored * tensors["w.e4m3.scale"], wide) < 0.05
