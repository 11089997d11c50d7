"""Activations in 8 bits: the numbers of torch's casts, one rounding for several readers, and which products have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
import torch
from support.dequantize import dequantize
from support.graphs import Array, feeds_for, graph, normal, operators, run
from support.pipelines import refused

from sdonnx.errors import OptionError
from sdonnx.folder.stored_numbers import quantize, scales_of
from sdonnx.graph.modules import MODULE_KEY
from sdonnx.metrics import relative_error
from sdonnx.quantization.quantization_config import QuantizationPolicy
from sdonnx.quantization.quantization_types import FORMATS, TYPES, QuantizationType
from sdonnx.quantization.quantize_weights import QuantizeWeights

DYNAMIC = [each for each in TYPES.values() if not each.is_weight_only and not each.is_static]
STATIC = [each for each in TYPES.values() if each.is_static]
FLOATS = {np.float32: "float", np.float16: "float16"}


def product(dtype: Any = np.float32, body: str = "y = MatMul(x, w)", **weights: Array) -> ir.Model:
    weights = weights or {"w": normal(32, 48)}
    kind = FLOATS[dtype]
    text = f"{kind}[B,S,32] x"
    return graph(text, f"{kind}[B,S,48] y", body, **{name: array.astype(dtype) for name, array in weights.items()})


def quantized(
    model: ir.Model, found: QuantizationType, scales: dict[str, float] | None = None, **policy: Any
) -> QuantizeWeights:
    for node in model.graph:
        if node.op_type in ("MatMul", "Gemm"):
            node.metadata_props.setdefault(MODULE_KEY, f"layers.{node.outputs[0].name}")
    quantization = QuantizeWeights(QuantizationPolicy(default=found, **policy), "unet", scales or {})
    quantization(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return quantization


def in_torch(x: Array, name: str, per_tensor: bool) -> npt.NDArray[np.float32]:
    """Return x after torch's cast to 8 bits and back, with scales of rows or of the whole."""
    wide = torch.from_numpy(x.astype(np.float32))
    most = wide.abs().amax([0, 1, 2] if per_tensor else -1, keepdim=True)
    scale = (most * float(np.float32(1 / FORMATS[name].max_value))).clamp(min=1e-12)
    quotient = wide / scale
    kinds = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    narrow = quotient.round() if name == "int8" else quotient.clamp(-6e4, 6e4).to(kinds[name]).float()
    restored: npt.NDArray[np.float32] = (narrow * scale).numpy()
    return restored


def restored_weight(weight: Array, found: QuantizationType) -> Array:
    axis = None if found.per_tensor else 1
    scales = scales_of(weight, found.weights, axis, weight.dtype, "w")
    return dequantize(quantize(weight, scales, found.weights, axis), scales, axis)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("found", DYNAMIC, ids=lambda each: each.name)
def test_dynamic_types_compute_what_torch_does(found: QuantizationType, dtype: Any) -> None:
    model = product(dtype)
    feeds = {"x": (normal(2, 6, 32) * np.exp(normal(2, 6, 1, seed=1))).astype(dtype)}
    feeds["x"][1, 2] = 0
    exact = run(product(dtype), feeds)["y"].astype(np.float32)
    quantized(model, found)
    assert found.activations is not None
    x = in_torch(feeds["x"], found.activations.name, found.per_tensor).astype(dtype)
    expected = x.astype(np.float32) @ restored_weight(normal(32, 48).astype(dtype), found).astype(np.float32)
    result = run(model, feeds)["y"]
    assert result.dtype == dtype
    assert relative_error(result.astype(np.float32), expected) < (1e-5 if dtype is np.float32 else 2e-3)
    limits = {"int8": 0.03, "e4m3": 0.06, "e5m2": 0.1}
    assert 1e-3 < relative_error(result.astype(np.float32), exact) < limits[found.activations.name] * 1.5
    assert not result[1, 2].any()


@pytest.mark.parametrize("found", STATIC, ids=lambda each: each.name)
def test_calibrated_types_have_one_scale(found: QuantizationType) -> None:
    """Larger values than the calibration has seen saturate."""
    model, feeds = product(), {"x": normal(2, 6, 32)}
    feeds["x"][0, 0, 0] = 100
    quantized(model, found, {"layers.y": 4.0})
    assert operators(model, "QuantizeLinear", "DequantizeLinear") == {"QuantizeLinear": 1, "DequantizeLinear": 2}
    assert found.activations is not None
    scale = np.float32(4.0 / found.activations.max_value)
    x = found.activations.rounded((feeds["x"] / scale).astype(np.float32)).astype(np.float32) * scale
    expected = x @ restored_weight(normal(32, 48), found)
    assert abs(x).max() == pytest.approx(4.0, rel=1e-6)
    assert relative_error(run(model, feeds)["y"], expected) < 1e-5


def test_products_of_one_value_share_its_rounding() -> None:
    weights = {name: normal(32, 48, seed=index) for index, name in enumerate("qkv")}
    body = "a = MatMul(x, q) b = MatMul(x, k) c = MatMul(x, v) d = Add(a, b) y = Add(c, d)"
    for found, scales in ((TYPES["fp8_e4m3_e4m3_dynamic"], {}), (TYPES["fp8_static"], dict.fromkeys(
        ("layers.a", "layers.b", "layers.c"), 3.0))):  # fmt: skip
        model = product(body=body, **weights)
        quantized(model, found, scales)
        counts = operators(model, "ReduceMax", "QuantizeLinear", "Transpose")
        assert counts == {"ReduceMax": int(not scales), "QuantizeLinear": int(bool(scales)), "Transpose": 3}
    mixed = product(body=body, **weights)
    quantized(mixed, TYPES["int8_dynamic"], modules=(("layers.a", None), ("layers.b", TYPES["fp8_e4m3_e4m3_dynamic"])))
    assert operators(mixed, "ReduceMax", "DequantizeLinear") == {"ReduceMax": 2, "DequantizeLinear": 2}


def test_weights_are_stored_in_the_layout_of_products() -> None:
    model = product()
    quantized(model, TYPES["int8_dynamic"])
    assert {name: value.shape for name, value in model.graph.initializers.items() if name.startswith("w")} == {
        "w.int8.T": ir.Shape([48, 32]),
        "w.int8.scale": ir.Shape([48]),
    }
    turned = graph("float[M,32] x", "float[M,48] y", "y = Gemm<transB=1>(x, w)", w=normal(48, 32))
    quantized(turned, TYPES["int8_dynamic"])
    assert turned.graph.initializers["w.int8"].shape == ir.Shape([48, 32])
    assert operators(turned, "Transpose") == {"Transpose": 0}


@pytest.mark.parametrize("sizes", [(32, 40), (24, 48)])
def test_products_of_other_sizes_stay(sizes: tuple[int, int]) -> None:
    rows, columns = sizes
    model = graph(f"float[B,S,{rows}] x", f"float[B,S,{columns}] y", "y = MatMul(x, w)", w=normal(rows, columns))
    assert quantized(model, TYPES["int8_dynamic"]).quantized == []
    assert len(quantized(model, TYPES["int8_weightonly"]).quantized) == 1


def test_products_of_values_of_unknown_types_stay() -> None:
    body = "s = com.microsoft.BiasSplitGelu(x, b) y = MatMul(s, w)"
    model = graph("float[B,S,64] x", "float[B,S,48] y", body, w=normal(32, 48), b=normal(64))
    QuantizeWeights(QuantizationPolicy(default=TYPES["int8_dynamic"]), "unet")(model)
    assert operators(model) == {"BiasSplitGelu": 1, "MatMul": 1}


def test_products_of_the_prompt_have_their_weights_quantized_only() -> None:
    model = graph(
        "float[B,S,32] sample, float[B,L,32] prompt", "float[B,S,48] y",
        "q = MatMul(sample, w) k = MatMul(prompt, v) m = ReduceMean<keepdims=1>(k, one) y = Add(q, m)",
        w=normal(32, 48), v=normal(32, 48, seed=1), one=np.array([1], np.int64),
    )  # fmt: skip
    found = quantized(model, TYPES["fp8_e4m3_e4m3_dynamic"])
    assert [each.module for each in found.quantized] == ["layers.q", "layers.k"]
    assert operators(model, "ReduceMax", "DequantizeLinear") == {"ReduceMax": 1, "DequantizeLinear": 2}
    assert set(model.graph.initializers) >= {"w.e4m3.T", "v.e4m3"}


def test_convolutions_stay() -> None:
    model = graph(
        "float[B,16,H,W] x", "float[B,32,H,W] y", "y = Conv<kernel_shape=[1,1]>(x, w)", w=normal(32, 16, 1, 1)
    )
    assert quantized(model, TYPES["fp8_e4m3_e4m3_dynamic"]).quantized == []


def test_a_gate_stays_behind_the_weight() -> None:
    body = "v = Mul(w, gate) y = MatMul(x, v)"
    weights = {"w": normal(32, 48), "gate": normal(48, seed=1)}
    model, feeds = product(body=body, **weights), {"x": normal(2, 6, 32)}
    exact = run(model, feeds)["y"]
    quantized(model, TYPES["int8_dynamic"])
    assert 1e-3 < relative_error(run(model, feeds)["y"], exact) < 0.03


def test_a_module_without_a_scale_is_refused() -> None:
    with refused(OptionError, "unet:layers.y has no calibrated scale", "--calibration_prompts"):
        quantized(product(), TYPES["fp8_static"], {"layers.x": 1.0})


@pytest.mark.parametrize(("most", "word"), [(1e-8, "0"), (1e9, "inf")])
def test_scales_of_zero_or_infinity_are_refused(most: float, word: str) -> None:
    with refused(OptionError, f"the scale of unet:layers.y is {word} in FLOAT16", "take a dynamic type"):
        quantized(product(np.float16), TYPES["int8_static"], {"layers.y": most})


def test_a_product_of_several_modules_has_the_largest_scale() -> None:
    model = product()
    next(iter(model.graph)).metadata_props[MODULE_KEY] = "a;b"
    quantized(model, TYPES["int8_static"], {"a": 1.0, "b": 127.0})
    (name,) = (name for name in model.graph.initializers if name.startswith("scale_"))
    assert name == "scale_1_float"
    feeds = feeds_for(model)
    assert np.isfinite(run(model, feeds)["y"]).all()
