from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxconverter_common import float16
from support.graphs import (
    Array,
    copied,
    feeds_for,
    graph,
    int64,
    lowered,
    node_of,
    normal,
    operators,
    relative_error,
    run,
    text_of,
)
from support.nets import chains
from support.operator_tests import feeds_of

from sdonnx.errors import OptionError, WeightsError
from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.edit import (
    add_initializer,
    constant_value,
    dtype_of,
    input_of,
    insert,
    joined_initializer,
    required,
    tensor_of,
)
from sdonnx.graph.modules import MODULE_KEY, MODULE_SEPARATOR, module_path
from sdonnx.graph.passes import FoldWeightTransposes, infer_shapes, tidy
from sdonnx.graph.tensors import Origin, lazy, origin_of, read
from sdonnx.models.spec import ComponentSpec, Role, TensorSpec
from sdonnx.operators.kernel_case import KernelCase, rounded
from sdonnx.operators.kernel_case_graphs import model_of
from sdonnx.operators.operator_table import CONTRACTS, LowerContribOperators
from sdonnx.precision.convert import BFLOAT16_OPERATORS, ConvertPrecision
from sdonnx.precision.policy import PrecisionPolicy, parse_overrides

UNET = ComponentSpec(
    "unet",
    "unet",
    Role.DENOISER,
    (TensorSpec("x", ("B", 4)), TensorSpec("timestep", ("B",), keeps_float32=True)),
    (TensorSpec("y", ("B", 4)),),
)
HALF, FLOAT, BRAIN = ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.BFLOAT16
# fp16 has 11 significant bits, bfloat16 has 8.
HALF_TOLERANCE, BRAIN_TOLERANCE = 4e-3, 2**-6


def converted(model: ir.Model, *float32: str, dtype: ir.DataType = HALF, fallback: ir.DataType = FLOAT) -> ir.Model:
    """Convert and tidy a copy, and check that the result is valid."""
    result = copied(model)
    ConvertPrecision(PrecisionPolicy(dtype, float32, fallback), UNET)(result)
    tidy(result)
    lowered(result)
    return result


def types(model: ir.Model, op_type: str) -> list[ir.DataType | None]:
    """Return the type of the first output of each node of the operator."""
    return [node.outputs[0].dtype for node in model.graph if node.op_type == op_type]


def error_of(model: ir.Model, original: ir.Model) -> float:
    """Return the largest relative error of any output, for inputs that are exact in both types."""
    feeds = {name: values.astype(np.float16) if values.dtype == np.float32 else values
             for name, values in feeds_for(original).items()}  # fmt: skip

    def fed(to: ir.Model) -> dict[str, Array]:
        dtypes = {value.name: dtype_of(value).numpy() for value in to.graph.inputs}
        return {name: values.astype(dtypes[name]) for name, values in feeds.items()}

    found, expected = run(model, fed(model)), run(original, fed(original))
    assert found.keys() == expected.keys()
    return max(relative_error(found[name], expected[name]) for name in expected)


NETS = {
    "perceptron": graph(
        "float[B,8] x", "float[B,4] y", "a = Gemm(x, w, b) r = Relu(a) m = MatMul(r, v) y = Softmax<axis=-1>(m)",
        w=normal(8, 16), b=normal(16, seed=1), v=normal(16, 4, seed=2),
    ),
    "convolution": graph(
        "float[B,4,H,W] x", "float[B,8,H,W] y", "c = Conv<pads=[1,1,1,1]>(x, w, b) s = Sigmoid(c) y = Mul(c, s)",
        w=normal(8, 4, 3, 3), b=normal(8, seed=1),
    ),
    "layer norm": graph(
        "float[B,S,8] x, float[B,S,8] s", "float[B,S,8] y, float[B,S,8] t",
        "t = Add(x, s) y = LayerNormalization(t, g, b)", g=normal(8), b=normal(8, seed=1),
    ),
    "heads": graph(
        "float[B,S,8] x", "float[B,2,S,4] y", "r = Reshape(x, shape) y = Transpose<perm=[0,2,1,3]>(r)",
        shape=int64([0, 0, 2, 4]),
    ),
    "mask": graph(
        "float[B,S] x, bool[B,S] m", "float[B,S] y", "a = Where(m, x, low) y = Softmax<axis=-1>(a)",
        low=np.array(-9000, np.float32),
    ),
    "tokens": graph(
        "int64[B,S] ids", "float[B,S,8] y", "e = Gather(table, ids) y = Mul(e, n)", table=normal(10, 8),
        n=np.array(0.3, np.float32),
    ),
    "positions": graph(
        "float[B,6,8] x", "float[B,6,8] y", "y = Add(x, table)", table=normal(1, 6, 8)
    ),
    "constants": graph(
        "float[B,4] x", "float[B,4] y",
        "a = Constant<value=float[4] {1.5, 2.5, 3.5, 4.5}>() b = Mul(x, a) "
        "c = Constant<value=float {3.0}>() y = Div(b, c)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_results_equal_onnxconverter_common(name: str) -> None:
    model = NETS[name]
    found = converted(model)
    expected = ir.from_proto(float16.convert_float_to_float16(ir.to_proto(model), op_block_list=[]))
    feeds = {key: values.astype(np.float16) if values.dtype == np.float32 else values
             for key, values in feeds_for(model).items()}  # fmt: skip
    results, references = run(found, feeds), run(expected, feeds)
    assert results.keys() == references.keys()
    for key, values in references.items():
        assert results[key].dtype == np.float16
        np.testing.assert_array_equal(results[key], values)
    assert error_of(found, model) < HALF_TOLERANCE


@pytest.mark.parametrize("name", NETS)
def test_conversion_keeps_names_and_shapes(name: str) -> None:
    model, result = NETS[name], converted(NETS[name])
    for before, after in zip(
        (*model.graph.inputs, *model.graph.outputs), (*result.graph.inputs, *result.graph.outputs), strict=True
    ):
        assert (after.name, after.shape) == (before.name, before.shape)
        assert after.dtype == (HALF if before.dtype == FLOAT else before.dtype)


@pytest.mark.parametrize("name", NETS)
def test_second_conversion_changes_nothing(name: str) -> None:
    once = converted(NETS[name])
    assert text_of(copied(converted(once))) == text_of(copied(once))


def test_bfloat16() -> None:
    model = graph("float[B,4] x", "float[B,4] y", "y = Add(x, w)", w=normal(4))
    result = converted(model, dtype=ir.DataType.BFLOAT16)
    assert [value.dtype for value in (*result.graph.inputs, *result.graph.outputs)] == [ir.DataType.BFLOAT16] * 2
    np.testing.assert_array_equal(
        constant_value(node_of(result, "Add").inputs[1]), normal(4).astype(ml_dtypes.bfloat16)
    )


LITERALS = {
    "value_float": "c = Constant<value_float=2.5>() y = Mul(x, c)",
    "value_floats": "c = Constant<value_floats=[1.0, 2.0, 3.0, 4.5]>() y = Mul(x, c)",
    "value": "c = Constant<value=float {2.5}>() y = Mul(x, c)",
    "zeros": "s = Shape(x) c = ConstantOfShape(s) y = Add(x, c)",
    "filled": "s = Shape(x) c = ConstantOfShape<value=float[1] {2.5}>(s) y = Add(x, c)",
    "like the input": "c = EyeLike<dtype=1>(x) y = Add(x, c)",
    "range": "n = Squeeze(four) k = Cast<to=1>(n) r = Range(zero, k, half) s = Slice(r, none, four) y = Add(x, s)",
}
NUMBERS = {
    "four": int64([4]), "none": int64([0]), "zero": np.array(0, np.float32), "half": np.array(0.5, np.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", LITERALS)
@pytest.mark.parametrize("float32", [(), ("Mul", "Add"), ("Constant", "ConstantOfShape", "EyeLike")])
def test_constants_of_every_kind(name: str, float32: tuple[str, ...]) -> None:
    """Constants are converted for every reader and every type."""
    body = LITERALS[name]
    weights = {key: value for key, value in NUMBERS.items() if f" {key})" in body or f"{key}," in body}
    model = graph("float[B,4] x", "float[B,4] y", body, **weights)
    overrides = [override for override in float32 if operators(model, override)[override]]
    assert error_of(converted(model, *overrides), model) < HALF_TOLERANCE


def test_integer_and_string_constants_are_unchanged() -> None:
    body = "c = Constant<value_ints=[0, 2, 2]>() r = Reshape(x, c) y = Neg(r) "
    body += 'd = ConstantOfShape<value=int64[1] {3}>(c) t = Constant<value_string="a">()'
    model = graph("float[B,4] x", "float[B,2,2] y, int64[P,Q,R] d, string t", body)
    result = converted(model)
    assert [output.dtype for output in result.graph.outputs] == [HALF, ir.DataType.INT64, ir.DataType.STRING]


CHAIN = "a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) y = Relu(c)"
W = {"w": normal(4, 4)}


def in_modules(model: ir.Model, *paths: str) -> ir.Model:
    for node, path in zip(model.graph, paths, strict=True):
        if path:
            node.metadata_props[MODULE_KEY] = path
    return model


def chain() -> ir.Model:
    model = graph("float[B,4] x", "float[B,4] y", CHAIN, **W)
    return in_modules(model, "down.0.proj", "down.0", "mid_block.proj", "mid_block")


def test_no_override_leaves_nothing_in_float32() -> None:
    result = converted(chain())
    assert types(result, "MatMul") + types(result, "Relu") == [HALF] * 4
    assert operators(result, "Cast") == {"Cast": 0}
    assert list(result.graph.initializers) == ["w.float16"]


def test_operator_stays_in_float32() -> None:
    model = chain()
    result = converted(model, "MatMul")
    assert types(result, "MatMul") == [FLOAT, FLOAT]
    assert types(result, "Relu") == [HALF, HALF]
    # One cast into and one out of each of the two nodes.
    assert operators(result, "Cast") == {"Cast": 4}
    assert list(result.graph.initializers) == ["w"]
    assert error_of(result, model) < HALF_TOLERANCE


@pytest.mark.parametrize("pattern", ["mid_block.*", "mid_block*", "mid*", "*mid_block*", "mid_block.proj", "*.proj"])
def test_module_stays_in_float32(pattern: str) -> None:
    kept = [FLOAT if ".proj" in pattern else HALF, FLOAT] if pattern == "*.proj" else [HALF, FLOAT]
    result = converted(chain(), pattern)
    assert types(result, "MatMul") == kept
    # mid_block.* also matches the module mid_block itself.
    assert types(result, "Relu") == [HALF, HALF if pattern.endswith(".proj") else FLOAT]


@pytest.mark.parametrize("pattern", ["down.0.*", "down.?", "down.[0-3].*"])
def test_patterns_are_those_of_fnmatch(pattern: str) -> None:
    result = converted(chain(), pattern)
    assert types(result, "Relu") == [FLOAT, HALF]


def test_node_of_several_modules_matches_each_of_them() -> None:
    model = in_modules(graph("float[B,4] x", "float[B,4] y", "y = MatMul(x, w)", **W), MODULE_SEPARATOR.join("ab"))
    for pattern in "ab":
        assert types(converted(model, pattern), "MatMul") == [FLOAT]


def test_report_counts_nodes_in_float32() -> None:
    conversion = ConvertPrecision(PrecisionPolicy(HALF, ("MatMul", "mid_block.*")), UNET)
    conversion(chain())
    assert conversion.kept == {"MatMul": 2, "mid_block.*": 1}


def test_first_override_decides() -> None:
    policy = PrecisionPolicy(HALF, ("mid_block.*", "MatMul"))
    overrides = [policy.override_for(node) for node in chain().graph]
    assert overrides == ["MatMul", None, "mid_block.*", "mid_block.*"]


def test_override_after_a_wider_one_is_accepted() -> None:
    result = converted(chain(), "mid_block.*", "mid_block.proj")
    assert types(result, "MatMul") == [HALF, FLOAT]


@pytest.mark.parametrize("pattern", ["matmul", "Softmax", "up_blocks.*", "mid", "proj", "unet.mid_block"])
def test_override_without_a_match_is_refused(pattern: str) -> None:
    model = chain()
    before = text_of(model)
    with pytest.raises(OptionError) as caught:
        ConvertPrecision(PrecisionPolicy(HALF, ("MatMul", pattern)), UNET)(model)
    assert str(caught.value) == (
        f"the override unet:{pattern} matches nothing; expected an operator (MatMul, Relu) or a module "
        "(down.*, mid_block.*)"
    )
    assert text_of(model) == before


COMPONENTS = ("text_encoder", "unet")


def test_overrides_are_parsed() -> None:
    texts = ["unet:MatMul", "text_encoder:layers.*", "unet:mid_block.attentions.0", "unet:a:b"]
    assert parse_overrides(texts, COMPONENTS) == {
        "text_encoder": ("layers.*",),
        "unet": ("MatMul", "mid_block.attentions.0", "a:b"),
    }
    assert parse_overrides([], COMPONENTS) == {"text_encoder": (), "unet": ()}


@pytest.mark.parametrize("text", ["MatMul", "unet:", ":MatMul", "vae:MatMul", "", "UNET:MatMul", "unet"])
def test_override_without_a_component_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=f"the override {text!r} names no component; expected .* text_encoder, unet"):
        parse_overrides(["unet:MatMul", text], COMPONENTS)


def test_input_stays_in_float32() -> None:
    """fp16 would round a timestep of 999.25 to 999."""
    body = "f = Mul(timestep, n) s = Sin(f) u = Unsqueeze(s, one) y = Mul(x, u)"
    weights = {"n": np.array(1, np.float32), "one": int64([1])}
    model = graph("float[B,4] x, float[B] timestep", "float[B,4] y", body, **weights)
    result = converted(model)
    assert [value.dtype for value in result.graph.inputs] == [HALF, FLOAT]
    assert types(result, "Mul") == [FLOAT, HALF]
    feeds: dict[str, Array] = {"x": np.ones((2, 4), np.float16), "timestep": np.array([999.25, 3.5], np.float32)}
    expected = np.sin(feeds["timestep"])[:, None].repeat(4, 1)
    assert relative_error(run(result, feeds)["y"], expected) < 1e-3


def test_input_in_float32_is_cast_once() -> None:
    body = "r = Relu(timestep) a = Mul(x, timestep) b = Mul(a, timestep) y = Add(b, r)"
    result = converted(graph("float[4] x, float[4] timestep", "float[4] y", body))
    assert operators(result, "Cast") == {"Cast": 1}


GROUP_NORM = "com.microsoft.GroupNorm<groups=2, epsilon=0.001, channels_last=1, activation=0>(x, g, b)"


def test_scale_and_shift_of_a_group_norm_stay_in_float32() -> None:
    """The kernels read gamma and beta in float32, and another reader of the weight reads it in fp16."""
    model = graph(
        "float[B,H,W,8] x", "float[B,H,W,8] y", f"n = {GROUP_NORM} y = Mul(n, g)", g=normal(8), b=normal(8, seed=1)
    )
    result = converted(model)
    assert [required(value).dtype for value in node_of(result, "GroupNorm").inputs] == [HALF, FLOAT, FLOAT]
    assert set(result.graph.initializers) == {"g", "b", "g.float16"}
    assert operators(result, "Cast") == {"Cast": 0}
    assert types(result, "GroupNorm") == [HALF]


def test_skip_and_bias_of_a_group_norm_are_converted() -> None:
    call = GROUP_NORM.replace("GroupNorm", "SkipGroupNorm").replace("b)", "b, s, c)")
    weights = {"g": normal(8), "b": normal(8, seed=1), "c": normal(8, seed=2)}
    inputs, outputs = "float[B,H,W,8] x, float[B,H,W,8] s", "float[B,H,W,8] y, float[B,H,W,8] t"
    model = graph(inputs, outputs, f"y, t = {call}", **weights)
    result = converted(model)
    assert [required(value).dtype for value in node_of(result, "SkipGroupNorm").inputs] == [
        HALF,
        FLOAT,
        FLOAT,
        HALF,
        HALF,
    ]
    assert error_of(result, model) < HALF_TOLERANCE


@pytest.mark.parametrize("float32", [(), ("Resize",)])
def test_scales_stay_in_float32(float32: tuple[str, ...]) -> None:
    scales = np.array([1, 1, 2, 2], np.float32)
    model = graph("float[1,4,5,6] x", "float[1,4,10,12] y", "y = Resize(x, , scales)", scales=scales)
    result = converted(model, *float32)
    assert input_of(node_of(result, "Resize"), 2).dtype == FLOAT
    assert types(result, "Resize") == [FLOAT if float32 else HALF]
    assert error_of(result, model) < HALF_TOLERANCE


@pytest.mark.parametrize("op", ["Sin", "Cos"])
def test_angles_are_computed_in_float32(op: str) -> None:
    result = converted(graph("float[B,4] x", "float[B,4] y", f"a = {op}(x) y = Mul(a, x)"))
    assert types(result, op) == [FLOAT]
    assert types(result, "Mul") == [HALF]


def test_float32_propagates_through_copies_and_sums() -> None:
    body = "a = Exp(x) b = Mul(a, n) c = Reshape(b, shape) d = Sub(c, x) y = Relu(d)"
    model = graph("float[B,4] x", "float[B,4] y", body, n=np.array(3, np.float32), shape=int64([0, 4]))
    result = converted(model, "Exp")
    assert types(result, "Mul") + types(result, "Reshape") == [FLOAT, FLOAT]
    # The other operand is in fp16.
    assert types(result, "Sub") == [HALF]


def test_each_value_is_cast_once() -> None:
    """One value in float32 has three readers in fp16 and is an output; one in fp16 has two readers in float32."""
    body = "a = Exp(x) b = Relu(a) c = Tanh(a) d = Sigmoid(a) e = Log(b) f = Sqrt(b) g = Add(c, d) y = Add(g, b)"
    outputs = "float[B,4] a, float[B,4] y, float[B,4] e, float[B,4] f"
    model = graph("float[B,4] x", outputs, body)
    result = converted(model, "Exp", "Log", "Sqrt")
    casts = [(input_of(node, 0).name, node.outputs[0].dtype) for node in result.graph if node.op_type == "Cast"]
    assert len(casts) == len(set(casts))
    assert operators(result, "Cast") == {"Cast": 5}  # x, a, b, and the outputs e and f
    # No Cast reads the output of another Cast.
    sources = [input_of(node, 0).producer() for node in result.graph if node.op_type == "Cast"]
    assert not any(source is not None and source.op_type == "Cast" for source in sources)


def test_output_computed_in_float32_has_the_common_type() -> None:
    model = graph("float[B,4] x", "float[B,4] y, float[B,4] z", "y = Exp(x) z = Relu(y)")
    result = converted(model, "Exp")
    assert [(value.name, value.dtype) for value in result.graph.outputs] == [("y", HALF), ("z", HALF)]
    assert error_of(result, model) < HALF_TOLERANCE


def test_casts_have_the_module_of_their_value() -> None:
    result = converted(chain(), "down.0.proj")
    casts = [module_path(node) for node in result.graph if node.op_type == "Cast"]
    assert casts == ["", "down.0.proj"]


@given(case=chains(), data=st.data(), fused=st.booleans())
@settings(max_examples=40, deadline=None)
def test_random_nets_with_random_policies(case: tuple[ir.Model, int], data: st.DataObject, fused: bool) -> None:
    model = copied(case[0])
    if fused:
        fuse(model, "cuda")
    names = sorted({node.op_type for node in model.graph} - {"Constant", "Shape"})
    float32 = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
    result = converted(model, *float32)
    assert {value.dtype for value in (*result.graph.inputs, *result.graph.outputs)} == {HALF}
    for node in result.graph:
        if node.op_type in float32:
            assert not any(output.dtype == HALF for output in node.outputs)
        elif node.op_type == "Cast":
            producer = input_of(node, 0).producer()
            assert producer is None or producer.op_type != "Cast"
    # Errors of consecutive operators accumulate.
    assert error_of(result, case[0]) < 10 * HALF_TOLERANCE


CASTS = {
    "to the working type": ("float[B,4] x", "a = Cast<to=1>(x) y = Relu(a)", "float[B,4] y"),
    "of integers": ("int64[B,4] x", "a = Cast<to=1>(x) y = Relu(a)", "float[B,4] y"),
    "to integers": ("float[B,4] x", "a = Cast<to=7>(x) y = Add(a, a)", "int64[B,4] y"),
    "through double": ("float[B,4] x", "a = Cast<to=11>(x) b = Exp(a) y = Cast<to=1>(b)", "float[B,4] y"),
    "of a float32 value": ("float[B,4] x", "a = Sin(x) b = Cast<to=1>(a) y = Relu(b)", "float[B,4] y"),
    "to fp16": ("float[B,4] x", "a = Sin(x) y = Cast<to=10>(a)", "float16[B,4] y"),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts(name: str) -> None:
    inputs, body, outputs = CASTS[name]
    model = graph(inputs, outputs, body)
    result = converted(model)
    assert result.graph.outputs[0].dtype == (HALF if "float" in outputs else ir.DataType.INT64)
    assert error_of(result, model) < HALF_TOLERANCE


HALF_NETS = {
    "plain": ("a = Add(x, w) y = Relu(a)", ()),
    "kept operator": ("a = Add(x, w) y = Exp(a)", ("Add",)),
    "kept output": ("a = Exp(x) y = Add(a, w)", ("Add",)),
    "kept constant": ("c = Constant<value_float=2.0>() d = Cast<to=10>(c) a = Mul(x, d) y = Add(a, w)", ("Mul",)),
    "angle": ("a = Add(x, w) s = Sin(a) y = Mul(s, a)", ()),
    "angle behind casts": ("a = Add(x, w) f = Cast<to=1>(a) s = Sin(f) c = Cast<to=10>(s) y = Add(c, a)", ()),
}


@pytest.mark.parametrize("name", HALF_NETS)
def test_fp16_export(name: str) -> None:
    """The casts of the export are kept; overrides and angles are computed in float32."""
    body, float32 = HALF_NETS[name]
    model = graph("float16[B,4] x", "float16[B,4] y", body, w=normal(4).astype(np.float16))
    result = converted(model, *float32)
    for op_type in (*float32, "Sin"):
        assert set(types(result, op_type)) <= {FLOAT}
    assert result.graph.outputs[0].dtype == HALF
    assert error_of(result, model) < HALF_TOLERANCE


def test_scale_and_shift_of_an_fp16_group_norm_become_float32() -> None:
    halves = {"g": normal(8).astype(np.float16), "b": normal(8, seed=1).astype(np.float16)}
    model = graph("float16[B,H,W,8] x", "float16[B,H,W,8] y", f"y = {GROUP_NORM}", **halves)
    result = converted(model)
    inputs = node_of(result, "GroupNorm").inputs
    assert [required(value).dtype for value in inputs] == [HALF, FLOAT, FLOAT]
    np.testing.assert_array_equal(constant_value(inputs[1]), halves["g"].astype(np.float32))


def test_shared_weight_is_converted_once() -> None:
    body = "a = MatMul(x, w) b = MatMul(a, w) c = Exp(b) d = MatMul(c, w) y = MatMul(d, w)"
    result = converted(graph("float[B,4] x", "float[B,4] y", body, **W))
    assert list(result.graph.initializers) == ["w.float16"]
    kept = converted(in_modules(graph("float[B,4] x", "float[B,4] y", body, **W), "a", "", "", "", ""), "a")
    assert set(kept.graph.initializers) == {"w", "w.float16"}


def wide_weight(value: float) -> ir.Model:
    weight = normal(16, 16)
    weight[1, 2] = value
    model = graph("float[B,16] x", "float[B,16] y", "y = MatMul(x, w)", w=weight)
    ConvertPrecision(PrecisionPolicy(), UNET)(model)
    return model


@pytest.mark.parametrize("value", [65520.0, -1e6, 3e38])
def test_weight_out_of_range_is_refused_when_saved(value: float, tmp_path: Path) -> None:
    model = wide_weight(value)  # the weight is not read before
    message = f"the weight w reaches {abs(value):g}, beyond the range of FLOAT16; expected .*; .*--force_fp32_ops auto"
    with pytest.raises(WeightsError, match=message.replace("+", r"\+")):
        ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")


@pytest.mark.parametrize("value", [65504.0, 65519.0, -65504.0, np.inf, 1e-9])
def test_weight_in_range_is_rounded(value: float, tmp_path: Path) -> None:
    model = wide_weight(value)
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
    (weight,) = onnx.load(tmp_path / "model.onnx").graph.initializer
    assert weight.data_type == onnx.TensorProto.FLOAT16
    assert onnx.numpy_helper.to_array(weight)[1, 2] == np.float16(value)


def test_operator_in_float32_accepts_any_weight() -> None:
    model = graph("float[B,4] x", "float[B,4] y", "y = MatMul(x, w)", w=normal(4, 4) * 1e6)
    result = converted(model, "MatMul")
    assert relative_error(required(constant_value(node_of(result, "MatMul").inputs[1])), normal(4, 4) * 1e6) == 0


# --- bfloat16 instead of float32 --------------------------------------------------------------------------------------


def falling_back(model: ir.Model, *overrides: str) -> ir.Model:
    """Convert a copy with bfloat16 for the overrides, and check that it is valid and has the same interface."""
    result = converted(model, *overrides, fallback=BRAIN)
    pairs = zip((*model.graph.inputs, *model.graph.outputs), (*result.graph.inputs, *result.graph.outputs), strict=True)
    for before, after in pairs:
        assert (after.name, after.shape) == (before.name, before.shape)
        assert after.dtype in ((HALF, FLOAT) if before.dtype == FLOAT else (before.dtype,))
    assert BRAIN not in {value.dtype for value in result.graph.outputs}
    return result


def evaluated(model: ir.Model, feeds: dict[str, Array]) -> dict[str, Array]:
    """Run the graph with float32 arithmetic for bfloat16 nodes, each result rounded to bfloat16.

    ONNX Runtime has few bfloat16 kernels for the CPU; those for GPUs also accumulate in float32.
    """
    plain = copied(model)
    LowerContribOperators()(plain)
    infer_shapes(plain)
    for node in [node for node in plain.graph if node.op_type != "Cast"]:
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == BRAIN:
                node.replace_input_with(index, insert(node, "Cast", [value], {"to": FLOAT}, dtype=FLOAT))
        for output in [output for output in node.outputs if output.dtype == BRAIN]:
            output.type = ir.TensorType(FLOAT)
            rounded = ir.node("Cast", [output], {"to": BRAIN})
            rounded.outputs[0].type = ir.TensorType(BRAIN)
            node.append(rounded)
            for use in [use for use in output.uses() if use.node is not rounded]:
                use.node.replace_input_with(use.idx, rounded.outputs[0])
    return run(plain, feeds)


def brain(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array)).bfloat16()


@pytest.mark.parametrize("fallback", [HALF, ir.DataType.DOUBLE, ir.DataType.INT64])
def test_other_fallback_types_are_refused(fallback: ir.DataType) -> None:
    with pytest.raises(OptionError, match=f"a fallback of {fallback}; expected FLOAT or BFLOAT16"):
        PrecisionPolicy(HALF, ("MatMul",), fallback)


def test_operator_in_bfloat16() -> None:
    model = chain()
    result = falling_back(model, "MatMul")
    assert types(result, "MatMul") == [BRAIN, BRAIN]
    assert types(result, "Relu") == [HALF, HALF]
    assert operators(result, "Cast") == {"Cast": 4}
    assert list(result.graph.initializers) == ["w.bfloat16"]
    np.testing.assert_array_equal(
        constant_value(result.graph.initializers["w.bfloat16"]), W["w"].astype(ml_dtypes.bfloat16)
    )
    x = normal(16, 4).astype(np.float16)
    state = torch.from_numpy(x)
    for _ in range(2):
        state = (state.bfloat16() @ brain(W["w"])).half().relu()
    assert relative_error(evaluated(result, {"x": x})["y"], state.numpy()) < BRAIN_TOLERANCE
    # The error comes from bfloat16; in float32, only rounding to fp16 would remain.
    assert relative_error(evaluated(result, {"x": x})["y"], evaluated(model, {"x": x.astype(np.float32)})["y"]) > 1e-3


def test_module_in_bfloat16() -> None:
    result = falling_back(chain(), "mid_block.*")
    assert types(result, "MatMul") == [HALF, BRAIN]
    assert types(result, "Relu") == [HALF, FLOAT]  # has no bfloat16 kernel


def test_report_counts_nodes_in_bfloat16() -> None:
    """Nodes that stay in float32, without a bfloat16 kernel, are counted as well."""
    conversion = ConvertPrecision(PrecisionPolicy(HALF, ("MatMul", "mid_block.*"), BRAIN), UNET)
    conversion(chain())
    assert conversion.kept == {"MatMul": 2, "mid_block.*": 1}


@pytest.mark.parametrize("op_type", sorted(BFLOAT16_OPERATORS))
def test_onnx_defines_bfloat16_for_the_operators(op_type: str) -> None:
    schema = onnx.defs.get_schema(op_type, 23)
    allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    assert "tensor(bfloat16)" in allowed[schema.inputs[0].type_str]


@pytest.mark.parametrize("op_type", ["Sin", "Cos", "Exp", "Tanh", "Relu"])
def test_operator_without_a_bfloat16_kernel_stays_in_float32(op_type: str) -> None:
    model = graph("float[B,4] x", "float[B,4] y", f"a = {op_type}(x) y = Mul(a, x)")
    result = falling_back(model, op_type)
    assert types(result, op_type) == [FLOAT]
    assert types(result, "Mul") == [HALF]
    assert error_of(result, model) < HALF_TOLERANCE


def test_range_stays_in_float32() -> None:
    result = falling_back(graph("float[B,4] x", "float[B,4] y", LITERALS["range"], **NUMBERS), "Range", "Cast")
    assert types(result, "Range") == [FLOAT]


def contrib(case: KernelCase) -> ir.Model:
    """Return a kernel case in float32, with one standard operator before and one after it."""
    model = model_of(case, "float32", case.make_inputs())
    node, y = node_of(model, case.op_type), model.graph.outputs[0]
    x = node.inputs[0]
    assert x is not None
    node.replace_input_with(0, insert(node, "Tanh", [x], shape=x.shape))
    after = ir.node("Tanh", [y])
    after.outputs[0].name, after.outputs[0].type, after.outputs[0].shape = "y", y.type, y.shape
    model.graph.append(after)
    model.graph.outputs[0] = after.outputs[0]
    return model


@pytest.mark.parametrize("op_type", CONTRACTS)
def test_contrib_operator_uses_a_dtype_of_its_contract(op_type: str) -> None:
    contract = CONTRACTS[op_type]
    case = next(case for case in contract.kernel_cases() if case.name in contract.first_use)
    model = contrib(case)
    result = falling_back(model, op_type)
    node = node_of(result, op_type)
    expected = BRAIN if BRAIN in contract.dtypes else FLOAT
    for index, value in enumerate(node.inputs):
        assert value is None or value.dtype == (FLOAT if index in contract.float32_inputs else expected), index
    assert {output.dtype for output in node.outputs if output.uses()} == {expected}
    arrays = rounded(case.make_inputs(), "float16")
    found, wide = evaluated(result, feeds_of(result, arrays))["y"], evaluated(model, feeds_of(model, arrays))["y"]
    assert relative_error(found, wide) < (2 * BRAIN_TOLERANCE if expected == BRAIN else HALF_TOLERANCE)


def test_bfloat16_attention_equals_torch() -> None:
    q, k, v = (normal(2, 6, 32, seed=seed).astype(np.float16) for seed in range(3))
    body = "y = com.microsoft.MultiHeadAttention<num_heads=4>(q, k, v)"
    model = graph("float[2,6,32] q, float[2,6,32] k, float[2,6,32] v", "float[2,6,32] y", body)
    result = falling_back(model, "MultiHeadAttention")
    heads = [torch.from_numpy(x).bfloat16().unflatten(-1, (4, 8)).transpose(1, 2) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2).half().numpy()
    found = evaluated(result, {"q": q, "k": k, "v": v})["y"]
    assert relative_error(found, expected) < BRAIN_TOLERANCE


def test_bfloat16_layer_norm_equals_torch() -> None:
    model = NETS["layer norm"]
    result = falling_back(model, "LayerNormalization")
    x, s = (normal(2, 6, 8, seed=seed).astype(np.float16) for seed in (3, 4))
    gamma, beta = normal(8), normal(8, seed=1)
    found = evaluated(result, {"x": x, "s": s})
    total = torch.from_numpy(x) + torch.from_numpy(s)
    np.testing.assert_array_equal(found["t"], total.numpy())
    expected = F.layer_norm(total.bfloat16(), (8,), brain(gamma), brain(beta)).half().numpy()
    assert relative_error(found["y"], expected) < BRAIN_TOLERANCE


def test_bfloat16_holds_values_beyond_fp16() -> None:
    """A product of a million passes through several operators until it is small again."""
    body = "a = MatMul(x, w) b = Reshape(a, shape) c = Mul(b, n) y = Tanh(c)"
    weights = {"w": normal(4, 4) * 1e6, "shape": int64([0, 4]), "n": np.array(1e-6, np.float32)}
    model = graph("float[B,4] x", "float[B,4] y", body, **weights)
    result = falling_back(model, "MatMul")
    for op_type in ("MatMul", "Reshape", "Mul"):
        assert types(result, op_type) == [BRAIN]
    assert types(result, "Tanh") == [HALF]
    x = normal(2, 4).astype(np.float16)
    wide = torch.from_numpy(x).bfloat16() @ brain(weights["w"])
    assert wide.abs().max() > 65504
    expected = torch.tanh((wide * brain(weights["n"])).half()).numpy()
    assert relative_error(evaluated(result, {"x": x})["y"], expected) < 2 * BRAIN_TOLERANCE


def test_float32_and_bfloat16_operands_give_float32() -> None:
    """An operator that propagates types reads a value of each type."""
    model = graph("float[B,4] x", "float[B,4] y", "a = Exp(x) b = MatMul(x, w) c = Add(a, b) y = Tanh(c)", **W)
    result = falling_back(model, "Exp", "MatMul")
    assert types(result, "Exp") + types(result, "MatMul") + types(result, "Add") == [FLOAT, BRAIN, FLOAT]


def test_float32_input_with_bfloat16_fallback() -> None:
    body = "f = Mul(timestep, n) s = Sin(f) u = Unsqueeze(s, one) m = MatMul(x, w) y = Mul(m, u)"
    weights = {"n": np.array(1, np.float32), "one": int64([1]), **W}
    result = falling_back(graph("float[B,4] x, float[B] timestep", "float[B,4] y", body, **weights), "MatMul")
    assert [value.dtype for value in result.graph.inputs] == [HALF, FLOAT]
    assert types(result, "Sin") + types(result, "MatMul") == [FLOAT, BRAIN]


def test_output_computed_in_bfloat16_has_the_common_type() -> None:
    model = graph("float[B,4] x", "float[B,4] y, float[B,4] z", "y = MatMul(x, w) z = Tanh(y)", **W)
    result = falling_back(model, "MatMul")
    assert [(value.name, value.dtype) for value in result.graph.outputs] == [("y", HALF), ("z", HALF)]
    assert operators(result, "Cast") == {"Cast": 2}  # to bfloat16, and from it for the output and its reader


@pytest.mark.parametrize("fallback", [FLOAT, BRAIN])
def test_output_of_an_operator_with_optional_outputs(fallback: ir.DataType) -> None:
    """Text encoders end in such an operator."""
    result = converted(NETS["layer norm"], "LayerNormalization", fallback=fallback)
    assert types(result, "LayerNormalization") == [fallback]
    assert [(value.name, value.dtype) for value in result.graph.outputs] == [("y", HALF), ("t", HALF)]


@pytest.mark.parametrize("name", HALF_NETS)
def test_fp16_export_with_bfloat16_fallback(name: str) -> None:
    body, overrides = HALF_NETS[name]
    model = graph("float16[B,4] x", "float16[B,4] y", body, w=normal(4).astype(np.float16))
    result = falling_back(model, *overrides)
    for op_type in overrides:
        assert types(result, op_type) == [BRAIN if op_type in BFLOAT16_OPERATORS else FLOAT]
    feeds = feeds_for(model)
    found, expected = evaluated(result, feeds)["y"], evaluated(model, feeds)["y"]
    assert relative_error(found, expected) < (BRAIN_TOLERANCE if overrides else HALF_TOLERANCE)


@given(case=chains(), data=st.data(), fused=st.booleans())
@settings(max_examples=25, deadline=None)
def test_random_nets_with_bfloat16_fallback(case: tuple[ir.Model, int], data: st.DataObject, fused: bool) -> None:
    model = copied(case[0])
    if fused:
        fuse(model, "cuda")
    names = sorted({node.op_type for node in model.graph} - {"Constant", "Shape"})
    overrides = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
    result = falling_back(model, *overrides)
    for node in result.graph:
        if node.op_type in overrides and node.op_type != "Cast":
            assert HALF not in {output.dtype for output in node.outputs}
        contract = CONTRACTS.get(node.op_type) if node.domain else None
        if BRAIN in {output.dtype for output in node.outputs}:
            assert BRAIN in contract.dtypes if contract else node.op_type in BFLOAT16_OPERATORS
    feeds = {name: values.astype(np.float16) if values.dtype == np.float32 else values
             for name, values in feeds_for(case[0]).items()}  # fmt: skip
    wide = {name: values.astype(np.float32) if values.dtype == np.float16 else values for name, values in feeds.items()}
    found, expected = evaluated(result, feeds), run(case[0], wide)
    assert max(relative_error(found[name], expected[name]) for name in expected) < 10 * BRAIN_TOLERANCE


def test_autoencoder_of_stable_diffusion_is_converted(tiny_cuda_fp16: Path) -> None:
    """force_upcast is true by default, but diffusers' pipelines of Stable Diffusion 1 and 2 ignore it."""
    for component in ("vae_encoder", "vae_decoder"):
        assert json.loads((tiny_cuda_fp16 / component / "config.json").read_text())["force_upcast"] is True
        model = onnx.load(tiny_cuda_fp16 / component / "model.onnx", load_external_data=False)
        types = {initializer.data_type for initializer in model.graph.initializer if len(initializer.dims) == 4}
        assert types == {onnx.TensorProto.FLOAT16}


def test_weights_are_not_widened_to_be_narrowed() -> None:
    """A module in float16 is traced in float32; its weights are arranged in float16 if the graph becomes float16."""
    stored = {name: normal(8, 8, seed=seed).astype(np.float16) for seed, name in enumerate("abc")}
    widened: list[str] = []

    def net(names: str) -> ir.Model:
        wide_values = {name: values.astype(np.float32) for name, values in stored.items()}
        nodes = "t = Transpose(a) j = MatMul(x, t) k = MatMul(j, b) y = MatMul(k, c)"
        model = graph("float[B,8] x", "float[B,8] y", nodes, **wide_values)
        for name in names:

            def wide(name: str = name) -> Array:
                widened.append(name)
                return stored[name].astype(np.float32)

            origin = Origin(np.dtype(np.float16), partial(stored.__getitem__, name))
            model.graph.initializers[name].const_value = lazy(wide, ir.DataType.FLOAT, (8, 8), name, origin)
        FoldWeightTransposes()(model)
        return model

    def weights(model: ir.Model) -> list[Array]:
        return [read(tensor_of(input_of(node, 1))) for node in model.graph if node.op_type == "MatMul"]

    def convert(model: ir.Model, *float32: str) -> ir.Model:
        ConvertPrecision(PrecisionPolicy(HALF, float32), UNET)(model)
        return model

    narrow = convert(net("abc"))
    expected = [stored["a"].T, stored["b"], stored["c"]]
    for found, values in zip(weights(narrow), expected, strict=True):
        np.testing.assert_array_equal(found, values, strict=True)
    assert widened == []
    kept = convert(net("abc"), "MatMul")
    assert [values.dtype for values in weights(kept)] == [np.float32] * 3
    assert sorted(widened) == ["a", "b", "c"]
    mixed = convert(net("ab"))
    np.testing.assert_array_equal(weights(mixed)[2], stored["c"], strict=True)


def test_joined_weights_have_an_origin_if_all_parts_have() -> None:
    def part(name: str, dtype: type | None) -> ir.Value:
        values = normal(4, 8)
        origin = None if dtype is None else Origin(np.dtype(dtype), lambda: values.astype(dtype))
        return add_initializer(model.graph, name, lazy(lambda: values, ir.DataType.FLOAT, (4, 8), origin=origin))

    model = graph("float[B,4] x", "float[B,4] y", "y = Relu(x)")
    half, other, double, plain = (
        part(name, dtype) for name, dtype in (("h", np.float16), ("o", np.float16), ("d", np.float64), ("p", None))
    )

    def origin(*parts: ir.Value) -> Origin | None:
        return origin_of(tensor_of(joined_initializer(model.graph, parts, np.concatenate, (8, 8))))

    found = required(origin(half, other))
    assert found.make().dtype == found.dtype == np.float16
    assert found.make().shape == (8, 8)
    assert origin(half, plain) is origin(plain, half) is origin(half, double) is None
