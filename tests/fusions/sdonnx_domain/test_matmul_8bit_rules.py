"""Products with factors that are rounded to 8 bits become products of 8-bit factors, with bias, residual and gelu."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support.graphs import (
    Array,
    copied,
    feeds_for,
    graph,
    interface,
    normal,
    operators,
    relative_error,
    run,
    text_of,
    used,
)

from sdonnx.fusions.sdonnx_domain import use_kernels as kernel_stage
from sdonnx.fusions.sdonnx_domain.attention_rules import order_weights
from sdonnx.fusions.sdonnx_domain.use_kernels import use_kernels
from sdonnx.graph.edit import dims
from sdonnx.graph.passes import tidy
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.operators.operator_table import contract_of
from sdonnx.operators.sdonnx_domain.matmul_8bit import EightBits
from sdonnx.quantization.quantization_config import QuantizationPolicy
from sdonnx.quantization.quantization_types import TYPES
from sdonnx.quantization.quantize_weights import QuantizeWeights

WEIGHTS: dict[str, Array] = {
    name: array.astype(np.float16)
    for name, array in {
        "w": normal(64, 128) / 8,
        "u": normal(64, 128, seed=1) / 8,
        "bias": normal(128, seed=2),
        "gate": normal(128, seed=3),
        "gamma": normal(64, seed=4),
        "beta": normal(64, seed=5),
        "wide_bias": normal(128, seed=6),
        "gamma2": normal(128, seed=7),
        "beta2": normal(128, seed=8),
        "u2": normal(128, 128, seed=9) / 12,
        "w2": normal(64, 128, seed=10) / 8,
    }.items()
}
NORM = "n = LayerNormalization<axis=-1>(x, gamma, beta)"
BODIES = {
    "product": "y = MatMul(x, w)",
    "bias": "p = MatMul(x, w) y = Add(bias, p)",
    "bias and residual": "p = MatMul(x, w) y = com.microsoft.BiasAdd(p, bias, r)",
    "gelu": "p = MatMul(x, w) y = com.microsoft.FastGelu(p, bias)",
    "gate": "g = Mul(w, gate) y = MatMul(x, g)",
    "two products": "p = MatMul(x, w) q = MatMul(x, u) y = Add(p, q)",
}
TYPES_BY_ROWS = ("fp8_e4m3_e4m3_dynamic", "fp8_e5m2_e4m3_dynamic", "fp8_e4m3_e5m2_dynamic", "int8_dynamic")
ALL_TYPES = (*TYPES_BY_ROWS, "fp8_static", "int8_static")


def quantized(
    body: str,
    name: str,
    inputs: str = "float16[B,S,64] x, float16[B,S,128] r",
    known: str = "",
    weights: Mapping[str, Array] = MappingProxyType(WEIGHTS),
) -> ir.Model:
    model = graph(inputs, "float16[B,S,128] y", body, known, **used(body, dict(weights)))
    for node in model.graph:
        node.metadata_props["module"] = "layer"
    QuantizeWeights(QuantizationPolicy(default=TYPES[name]), "unet", {"layer": 4.0})(model)
    tidy(model)
    return model


def swapped(model: ir.Model, tolerance: float = 2e-3) -> tuple[ir.Model, dict[str, int]]:
    """Replace nodes, and check what every replacement must keep."""
    after = copied(model)
    outcome = use_kernels(after, 64)
    assert interface(after) == interface(model)
    for node in after.graph:
        if node.domain == OUR_DOMAIN:
            contract = contract_of(node)
            assert contract is not None
            assert contract.check(node) is None
    again = copied(after)
    use_kernels(again, 64)
    assert text_of(again) == text_of(after)
    feeds = feeds_for(model)
    assert relative_error(run(after, feeds)["y"], run(model, feeds)["y"]) < tolerance
    return after, outcome.fired


@pytest.mark.parametrize("name", ALL_TYPES)
@pytest.mark.parametrize("kind", BODIES)
def test_products(kind: str, name: str) -> None:
    model = quantized(BODIES[kind], name)
    after, fired = swapped(model)
    products = 2 if kind == "two products" else 1
    replaced = {"bias": "Add", "bias and residual": "BiasAdd", "gelu": "FastGelu"}.get(kind, "MatMul")
    assert fired == {f"{replaced}ToOwnScaledMatMul": products}
    counts = operators(
        after, "ScaledMatMul", "QuantizeRows", "DequantizeLinear", "MatMul", "ReduceMax", "BiasAdd", "FastGelu"
    )
    assert counts == {**dict.fromkeys(counts, 0), "ScaledMatMul": products, "QuantizeRows": 1}
    node = next(node for node in after.graph if node.op_type == "ScaledMatMul")
    formats = TYPES[name]
    assert formats.activations is not None
    assert EightBits(node.attributes.get_int("x_format")).name.lower() == formats.activations.name
    assert EightBits(node.attributes.get_int("w_format")).name.lower() == formats.weights.name
    assert node.attributes.get_int("gelu") == (kind == "gelu")
    present = [value is not None for value in node.inputs[4:]]
    assert present == {"bias": [True], "gelu": [True], "bias and residual": [True, True]}.get(kind, [])


@pytest.mark.parametrize("name", ["fp8_e4m3_e4m3_dynamic", "int8_static"])
def test_norms_and_gates_write_8_bits(name: str) -> None:
    """The values are not rounded to fp16 before; several products read them."""
    after, fired = swapped(quantized(f"{NORM} p = MatMul(n, w) q = MatMul(n, u) y = Add(p, q)", name), 2e-2)
    assert operators(after).items() >= {"LayerNormRows": 1, "ScaledMatMul": 2}.items()
    assert operators(after, "QuantizeRows", "LayerNorm", "LayerNormalization") == dict.fromkeys(
        ("QuantizeRows", "LayerNorm", "LayerNormalization"), 0
    )
    assert fired["QuantizeRowsToOwnRows"] == 1
    body = "s = com.microsoft.BiasSplitGelu(x, wide_bias) y = MatMul(s, w)"
    after, _ = swapped(quantized(body, name, "float16[B,S,128] x", "float16[B,S,64] s"), 2e-2)
    assert operators(after, "SplitGeluRows", "QuantizeRows") == {"SplitGeluRows": 1, "QuantizeRows": 0}


ATTENTION = (
    "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v)"
)
PROJECTIONS = {
    name: (normal(64, 128, seed=index) / 8).astype(np.float16) for index, name in enumerate(("wq", "wk", "wv"))
}


def assert_one_product(after: ir.Model) -> ir.Value:
    """Check the operators of attention with queries, keys and values in one product; return its weight."""
    counts = operators(after, "QuantizeRows", "ScaledMatMul", "SelfAttention", "MatMul", "MultiHeadAttention")
    assert counts == {"QuantizeRows": 1, "ScaledMatMul": 1, "SelfAttention": 1, "MatMul": 0, "MultiHeadAttention": 0}
    (node,) = (node for node in after.graph if node.op_type == "ScaledMatMul")
    weight = node.inputs[2]
    assert weight is not None
    assert dims(weight) == (3 * 128, 64)
    return weight


@pytest.mark.parametrize("name", ["fp8_e4m3_e4m3_dynamic", "fp8_static", "int8_dynamic"])
def test_queries_keys_and_values_are_one_product(name: str) -> None:
    after, fired = swapped(quantized(ATTENTION, name, "float16[B,S,64] x", weights=PROJECTIONS))
    assert fired == {"MultiHeadAttentionToOwnSelfAttention": 1}
    assert_one_product(after)


def test_projections_are_read_where_they_are_in_the_file(tmp_path: Path) -> None:
    """`order_weights` places the weights, (N,K) each, behind one another."""
    model = quantized(ATTENTION, "fp8_static", "float16[B,S,64] x", weights=PROJECTIONS)
    order_weights(model)
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=1024)
    after = ir.load(tmp_path / "model.onnx")
    parts = [
        value.const_value for value in after.graph.initializers.values() if value.dtype == ir.DataType.FLOAT8E4M3FN
    ]
    use_kernels(after, 64)
    stored = assert_one_product(after).const_value
    assert isinstance(stored, ir.ExternalTensor)
    assert stored.tobytes() == b"".join(part.tobytes() for part in parts if part is not None and part.size > 1)


def test_projections_in_another_order_stay_apart(tmp_path: Path) -> None:
    model = quantized(ATTENTION, "fp8_static", "float16[B,S,64] x", weights=PROJECTIONS)
    initializers = model.graph.initializers
    for name, value in sorted(initializers.items(), reverse=True):
        initializers.pop(name)
        initializers[name] = value
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=1024)
    outcome = use_kernels(loaded := ir.load(tmp_path / "model.onnx"), 64)
    assert "the weights of queries, keys and values are not behind one another in the file" in {
        each.reason for each in outcome.failures
    }
    assert operators(loaded, "ScaledMatMul", "SelfAttention") == {"ScaledMatMul": 3, "SelfAttention": 0}


@pytest.mark.parametrize("body", [BODIES["product"], "g = Mul(w, gate) p = MatMul(x, g)"], ids=["plain", "gate"])
@pytest.mark.parametrize("is_first", [True, False])
def test_sums_in_norms_become_residuals_of_products(body: str, is_first: bool) -> None:
    """The kernel of the norm then computes the sum, and writes it, next to the norm in 8 bits."""
    terms = "p, r" if is_first else "r, p"
    text = body.replace("y = ", "p = ")
    text += f" n, m, d, s = com.microsoft.SkipLayerNormalization({terms}, gamma2, beta2, bias)"
    text += " h = MatMul(n, u2) y = Add(h, s)"
    known = "float16[B,S,128] p, float16[B,S,128] n, float16[B,S,128] h, float16[B,S,128] s"
    after, fired = swapped(quantized(text, "fp8_e4m3_e4m3_dynamic", known=known), 2e-2)
    assert fired["SkipLayerNormalizationToOwnScaledMatMul"] == 1
    counts = operators(after, "SkipLayerNormalization", "LayerNormRows", "SumRows", "ScaledMatMul", "QuantizeRows")
    assert counts == {
        "SkipLayerNormalization": 0, "LayerNormRows": 0, "SumRows": 1, "ScaledMatMul": 2, "QuantizeRows": 1,
    }  # fmt: skip
    first = next(node for node in after.graph if node.op_type == "ScaledMatMul")
    assert [value is not None for value in first.inputs] == [True, False, True]
    total = next(node for node in after.graph if node.op_type == "SumRows")
    assert [value is not None for value in total.inputs] == [True] * 7
    assert total.attributes.get_int("exponent") == first.attributes.get_int("exponent") > 0


SUM = "p = MatMul(x, w) a = com.microsoft.BiasAdd(p, bias, r)"
SUM_SHAPES = "float16[B,S,128] p, float16[B,S,128] a, float16[B,S,128] q, float16[B,S,128] n"


def test_a_sum_without_a_norm_is_rounded_where_it_is_computed() -> None:
    """Queries to a caption read the sum itself in some transformers."""
    model = quantized(f"{SUM} q = MatMul(a, u2) y = Add(q, a)", "fp8_e4m3_e4m3_dynamic", known=SUM_SHAPES)
    after, fired = swapped(model)
    assert fired["QuantizeRowsToOwnSumRows"] == 1
    assert operators(after, "SumRows", "QuantizeRows", "ScaledMatMul") == {
        "SumRows": 1, "QuantizeRows": 1, "ScaledMatMul": 2,
    }  # fmt: skip


def test_a_sum_in_int8_stays_with_its_product() -> None:
    """cuBLASLt writes sums of 32 bits for int8, which another kernel scales anyway."""
    model = quantized(f"{SUM} q = MatMul(a, u2) y = Add(q, a)", "int8_dynamic", known=SUM_SHAPES)
    after, _ = swapped(model, 2e-2)  # numbers are rounded to 8 bits twice
    assert operators(after, "SumRows", "QuantizeRows") == {"SumRows": 0, "QuantizeRows": 2}


def test_a_norm_whose_weights_depend_on_the_sum_stays_apart() -> None:
    body = f"{SUM} g = ReduceMean<keepdims=0>(a, axes) n = LayerNormalization<axis=-1>(a, g)"
    body += " q = MatMul(n, u2) y = Add(q, a)"
    weights: dict[str, Array] = {**WEIGHTS, "axes": np.array([0, 1], np.int64)}
    model = quantized(body, "fp8_e4m3_e4m3_dynamic", known=f"{SUM_SHAPES}, float16[128] g", weights=weights)
    after, _ = swapped(model, 2e-2)
    assert operators(after, "SumRows", "LayerNormRows") == {"SumRows": 0, "LayerNormRows": 1}


@pytest.mark.parametrize("name", ["fp8_e4m3_e4m3_dynamic", "fp8_static"])
def test_the_product_before_a_gate_adds_its_bias(name: str) -> None:
    body = "p = MatMul(x, w2) s = com.microsoft.BiasSplitGelu(p, wide_bias) y = MatMul(s, u)"
    after, _ = swapped(quantized(body, name, "float16[B,S,64] x", "float16[B,S,128] p, float16[B,S,64] s"), 2e-2)
    first = next(node for node in after.graph if node.op_type == "ScaledMatMul")
    assert [value is not None for value in first.inputs[4:]] == [True]
    (gate,) = (node for node in after.graph if node.op_type == "SplitGeluRows")
    assert [value is not None for value in gate.inputs] == ([True, False, True] if name == "fp8_static" else [True])


def test_a_norm_with_another_reader_stays() -> None:
    model = quantized(f"{NORM} p = MatMul(n, w) c = Concat<axis=-1>(n, n) y = Add(p, c)", "int8_dynamic")
    after, _ = swapped(model)
    assert operators(after, "QuantizeRows", "LayerNormRows", "LayerNorm") == {
        "QuantizeRows": 1, "LayerNormRows": 0, "LayerNorm": 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["fp8_e4m3_e4m3_dynamic_per_tensor", "int8_weightonly"])
def test_other_types_keep_products_of_fp16(name: str) -> None:
    """Scales of whole tensors have no kernel."""
    after, _ = swapped(quantized(BODIES["bias"], name))
    assert operators(after, "ScaledMatMul", "QuantizeRows", "MatMul") == {
        "ScaledMatMul": 0, "QuantizeRows": 0, "MatMul": 1,
    }  # fmt: skip


GATES = "g0, g1, g2 = Split<axis=0, num_outputs=3>(t) "


def gated_products(count: int, late: str = "") -> tuple[str, str]:
    """Return products by gated weights, each of the sum of x and the one before, and the shapes of their values."""
    body, known = GATES, "float16[128] g0, float16[128] g1, float16[128] g2"
    before = "x"
    for index in range(count):
        gate = "l" if late and index == count - 1 else f"g{index}"
        if gate == "l":
            body += f" {late}"
            known += ", float16[128] l"
        body += f" m{index} = Mul(w2s{index}, {gate}) p{index} = MatMul({before}, m{index}) s{index} = Add(x, p{index})"
        known += f", float16[128,128] m{index}, float16[B,S,128] p{index}, float16[B,S,128] s{index}"
        before = f"s{index}"
    return f"{body} y = Identity({before})", known


SQUARES = {f"w2s{index}": (normal(128, 128, seed=20 + index) / 12).astype(np.float16) for index in range(3)}


def test_scales_of_gated_products_are_multiplied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    body, known = gated_products(3)
    model = quantized(body, "fp8_e4m3_e4m3_dynamic", "float16[B,S,128] x, float16[384] t", known, SQUARES)
    after, fired = swapped(model, 2e-2)
    assert fired["stack_scales"] == 1
    monkeypatch.setattr(kernel_stage, "stack_scales", lambda model: 0)
    use_kernels(apart := copied(model), 64)
    feeds = feeds_for(model)
    assert run(apart, feeds)["y"].tobytes() == run(after, feeds)["y"].tobytes()
    # The split of the gates, and the split of the scales.
    assert operators(after, "Mul", "Cast", "Concat", "Split") == {"Mul": 1, "Cast": 2, "Concat": 2, "Split": 2}


def test_a_gate_that_depends_on_a_product_stays_apart() -> None:
    late = "r = ReduceMean<keepdims=0>(s1, axes) l = Add(r, g2)"
    body, known = gated_products(3, late)
    weights: dict[str, Array] = {**SQUARES, "axes": np.array([0, 1], np.int64)}
    model = quantized(body, "fp8_e4m3_e4m3_dynamic", "float16[B,S,128] x, float16[384] t", known, weights)
    after, fired = swapped(model, 2e-2)
    assert fired["stack_scales"] == 1
    assert operators(after, "Mul", "Concat") == {"Mul": 2, "Concat": 2}


def test_a_gate_of_one_number_is_no_gate_of_columns() -> None:
    """The product stays as it is: its scales would have another size."""
    body = "g = Mul(w, one) y = MatMul(x, g)"
    weights: dict[str, Array] = {"w": WEIGHTS["w"], "one": np.full(1, 2, np.float16)}
    model = quantized(body, "fp8_e4m3_e4m3_dynamic", "float16[B,S,64] x", weights=weights)
    after, _ = swapped(model)
    assert operators(after, "ScaledMatMul") == {"ScaledMatMul": 0}


def test_weights_are_the_bytes_of_the_file(tmp_path: Any) -> None:
    model = quantized(BODIES["product"], "fp8_e4m3_e4m3_dynamic")
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=1024)
    loaded = ir.load(tmp_path / "model.onnx")
    (stored,) = (value for value in loaded.graph.initializers.values() if value.dtype == ir.DataType.FLOAT8E4M3FN)
    use_kernels(loaded, 64)
    (bits,) = (value for value in loaded.graph.initializers.values() if value.dtype == ir.DataType.UINT8)
    first, second = stored.const_value, bits.const_value
    assert isinstance(first, ir.ExternalTensor)
    assert isinstance(second, ir.ExternalTensor)
    assert (first.location, first.offset, first.length) == (second.location, second.offset, second.length)
    assert second.numpy().tobytes() == first.numpy().tobytes()
    assert stored.name not in loaded.graph.initializers
