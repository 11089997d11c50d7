"""The contract table against the real kernels: every corner that a contract accepts, in every type that it names.

The reference is the operator's body (compared with torch in tests/test_contract.py, on these very cases),
run in float32 on the CPU on the values that the kernel got.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from graphs import graph

from sdonnx.doctor.corner import TOLERANCE, Array, Corner, rounded
from sdonnx.families import ComponentSpec, Role
from sdonnx.fusions import fuse
from sdonnx.graph.contract import CONTRACTS
from sdonnx.graph.corner_graphs import model_of
from sdonnx.graph.corners import CORNERS, dtypes_of, norm_attributes
from sdonnx.graph.lowering import LowerContribOperators
from sdonnx.graph.passes import tidy
from sdonnx.parity import relative_error
from sdonnx.precision import ConvertPrecision, PrecisionPolicy
from sdonnx.runtime.device import device_for
from sdonnx.runtime.session import Graph

_NUMPY = {"float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
_NOTHING: Mapping[str, Any] = {}


# --- a case as a graph ------------------------------------------------------------------------------------------------


def feeds_of(model: ir.Model, inputs: Sequence[Array | None]) -> dict[str, Array]:
    feeds = {}
    for value in model.graph.inputs:
        assert value.name is not None
        assert value.dtype is not None
        array = inputs[int(value.name[1:])]
        assert array is not None
        feeds[value.name] = array.astype(value.dtype.numpy())
    return feeds


def lowered_results(case: Corner, inputs: Sequence[Array | None]) -> list[Array]:
    """Return what the reference body gives in float32, on the CPU."""
    body = model_of(case, "float32", inputs)
    LowerContribOperators()(body)
    options = _options()
    # As the body stands: ONNX Runtime 1.31 crashes as it fuses an Add into a LayerNormalization without B.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(_bytes(body), options, providers=["CPUExecutionProvider"])
    results: list[Array] = session.run(None, feeds_of(body, inputs))
    return results


def kernel_results(case: Corner, inputs: Sequence[Array | None], dtype: str) -> list[Array]:
    """Return what the CUDA provider's kernel gives; nothing may fall to the CPU."""
    model = model_of(case, dtype, inputs)
    device_for("cuda")
    options = _options()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = ("CUDAExecutionProvider", {"use_tf32": "0"})
    session = onnxruntime.InferenceSession(_bytes(model), options, providers=[provider])
    results: list[Array] = session.run(None, feeds_of(model, inputs))
    return results


def _bytes(model: ir.Model) -> bytes:
    content: bytes = ir.to_proto(model).SerializeToString()
    return content


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def compare(case: Corner, arrays: Sequence[Array | None], dtype: str, note: Any) -> None:
    """Run the kernel in a type and compare it with the body on the same values."""
    inputs = rounded(arrays, dtype, sorted(CONTRACTS[case.op_type].float32_inputs))
    found, reference = kernel_results(case, inputs, dtype), lowered_results(case, inputs)
    errors = [relative_error(a, b) for a, b in zip(found, reference, strict=True)]
    row = {"operator": case.op_type, "case": case.name, "dtype": dtype, "relative_error": max(errors)}
    note("contracts", row)
    assert max(errors) < TOLERANCE[dtype], (str(case), dtype, errors)


def check(
    _folder: Path,
    note: Any,
    case: str,
    op_type: str,
    inputs: Sequence[Array | None],
    attributes: Mapping[str, Any] = _NOTHING,
    outputs: int = 1,
    weights: Sequence[int] = (),
) -> None:
    """Compare a corner given by its values, in every type of its contract."""
    shapes = tuple(None if array is None else array.shape for array in inputs)
    corner = Corner(op_type, case, shapes, attributes, outputs, tuple(weights))
    for dtype in dtypes_of(corner):
        compare(corner, inputs, dtype, note)


# --- on the GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, id=f"{case}-{dtype}") for case in CORNERS for dtype in dtypes_of(case)],
)
def test_kernel_agrees_with_the_body(case: Corner, dtype: str, note: Any) -> None:
    compare(case, case.draw(), dtype, note)


REFUSED = [
    Corner("GroupNorm", "96 in 32 groups", ((1, 8, 8, 96), (96,), (96,)), norm_attributes(32, 0, 1e-5)),
    Corner("GroupNorm", "514 a group", ((1, 8, 8, 1028), (1028,), (1028,)), norm_attributes(2, 0, 1e-5)),
    Corner("BiasSplitGelu", "2048", ((1, 8, 2048), (2048,))),
]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_kernel_refuses_what_the_contract_refuses(case: Corner) -> None:
    with pytest.raises(Exception, match=case.op_type):
        kernel_results(case, case.draw(), "float16")


def attention_graph(head_size: int, heads: int, dtype: str) -> ir.Model:
    """Attention with its heads split and joined around it, as exporters write it."""
    width, kind = heads * head_size, {"float16": "float16", "float32": "float"}[dtype]
    split = " ".join(f"{x}_s = Reshape({x}, split) {x}_h = Transpose<perm=[0,2,1,3]>({x}_s)" for x in ("q", "k", "v"))
    return graph(
        ", ".join(f"{kind}[B,{length},{width}] {x}" for x, length in (("q", "S"), ("k", "L"), ("v", "L"))),
        f"{kind}[B,S,{width}] y",
        f"{split} a = Attention(q_h, k_h, v_h) t = Transpose<perm=[0,2,1,3]>(a) y = Reshape(t, join)",
        split=np.array([0, 0, heads, head_size], np.int64),
        join=np.array([0, 0, width], np.int64),
    )


def attention_feeds(head_size: int, heads: int, queries: int, keys: int) -> dict[str, Array]:
    draw = np.random.default_rng(head_size)
    lengths = {"q": queries, "k": keys, "v": keys}
    return {x: draw.standard_normal((2, length, heads * head_size), np.float32) for x, length in lengths.items()}


# Sizes of heads and of images of Stable Diffusion 1.5's innermost blocks: 160 is where ONNX Runtime's
# kernel for ONNX's own operator is silently wrong in fp16 on sm_90 (flash attention; relative error 1.3).
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (256, 256), (256, 77)])
@pytest.mark.parametrize("disabled", [(), ("attention",)], ids=["fused", "unfused"])
def test_attention_of_head_size_160_is_right_as_it_is_run(
    disabled: tuple[str, ...], queries: int, keys: int, dtype: str, tmp_path: Path, note: Any
) -> None:
    """With the runtime's own session and options."""
    model = attention_graph(160, 8, dtype)
    fuse(model, "cuda", disabled=disabled)
    ir.save(model, tmp_path / "model.onnx")
    feeds = {name: values.astype(_NUMPY[dtype]) for name, values in attention_feeds(160, 8, queries, keys).items()}
    session = Graph(tmp_path / "model.onnx", device_for("cuda")).session
    found = session.run(None, feeds)[0]
    plain = _bytes(attention_graph(160, 8, "float32"))
    reference = onnxruntime.InferenceSession(plain, _options(), providers=["CPUExecutionProvider"])
    wide = {name: values.astype(np.float32) for name, values in feeds.items()}
    error = relative_error(found.astype(np.float32), reference.run(None, wide)[0])
    row = {"dtype": dtype, "queries": queries, "keys": keys, "disabled": list(disabled), "relative_error": error}
    note("head size 160", row)
    assert error < TOLERANCE[dtype]


FALLING_BACK = ("MatMul", "MultiHeadAttention", "SkipLayerNormalization", "GroupNorm")


def block_in_bfloat16() -> tuple[ir.Model, ir.Model]:
    """A transformer block in float32, and in fp16 with bfloat16 for what can overflow, where kernels exist."""
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal((64, 64), np.float32) / 8 for name in ("wq", "wk", "wv", "wo")}
    vectors = {name: draw.standard_normal(64, np.float32) for name in ("g", "b")}
    norm = "com.microsoft.GroupNorm<groups=32, epsilon=0.001, channels_last=1, activation=0>"
    model = graph(
        "float[B,H,W,64] image",
        "float[B,S,64] y",
        f"""n = {norm}(image, g, b) x = Reshape(n, flat)
        q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
        a = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v) o = MatMul(a, wo)
        l, , , s = com.microsoft.SkipLayerNormalization<epsilon=0.00001>(o, x, g, b) t = Tanh(l) y = Add(t, s)""",
        known="float[B,H,W,64] n, float[B,S,64] a, float[B,S,64] l, float[B,S,64] s",
        flat=np.array([0, -1, 64], np.int64),
        **weights,
        **vectors,
    )
    narrow = ir.from_proto(ir.to_proto(model))
    spec = ComponentSpec("unet", "unet", Role.DENOISER, (), ())
    ConvertPrecision(PrecisionPolicy(float32=FALLING_BACK, fallback=ir.DataType.BFLOAT16), spec)(narrow)
    tidy(narrow)
    return model, narrow


def test_bfloat16_in_place_of_float32_runs(tmp_path: Path, note: Any) -> None:
    model, narrow = block_in_bfloat16()
    ir.save(narrow, tmp_path / "model.onnx")
    image = np.random.default_rng(1).standard_normal((2, 6, 10, 64)).astype(np.float16)
    found = Graph(tmp_path / "model.onnx", device_for("cuda")).session.run(None, {"image": image})[0]
    LowerContribOperators()(model)
    reference = onnxruntime.InferenceSession(_bytes(model), _options(), providers=["CPUExecutionProvider"])
    error = relative_error(found.astype(np.float32), reference.run(None, {"image": image.astype(np.float32)})[0])
    note("bfloat16 fallback", {"relative_error": error})
    assert error < TOLERANCE["bfloat16"]
