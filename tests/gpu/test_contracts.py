"""Every contract against the real kernels: each kernel case, in each data type of its contract.

The reference is the operator's body (which tests/operators/test_contract.py compares with torch on the same cases), run
in float32 on the CPU on the values that the kernel reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support.graphs import graph
from support.operator_tests import (
    attention_feeds,
    attention_graph,
    compare_kernel,
    kernel_results,
    model_bytes,
    operator_test,
    quiet_options,
)

from sdonnx.fusions.fusion_table import fuse
from sdonnx.graph.passes import tidy
from sdonnx.metrics import relative_error
from sdonnx.models.spec import ComponentSpec, Role
from sdonnx.operators.kernel_case import TOLERANCE, KernelCase
from sdonnx.operators.operator_table import CONTRACTS, KERNEL_CASES, LowerContribOperators, dtypes_of
from sdonnx.precision.convert import ConvertPrecision
from sdonnx.precision.policy import PrecisionPolicy
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph

_NUMPY = {"float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
REFUSED = [case for op_type in CONTRACTS for case in operator_test(op_type).refused]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, id=f"{case}-{dtype}") for case in KERNEL_CASES for dtype in dtypes_of(case)],
)
def test_kernel_agrees_with_the_reference_body(case: KernelCase, dtype: str, note: Any) -> None:
    compare_kernel(case, case.make_inputs(), dtype, note)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_kernel_refuses_cases_that_the_contract_refuses(case: KernelCase) -> None:
    with pytest.raises(Exception, match=case.op_type):
        kernel_results(case, case.make_inputs(), "float16")


# Sizes of heads and of images of Stable Diffusion 1.5's innermost blocks: 160 is where ONNX Runtime's
# kernel for ONNX's own operator is silently wrong in fp16 on sm_90 (flash attention; relative error 1.3).
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (256, 256), (256, 77)])
@pytest.mark.parametrize("disabled", [(), ("attention",)], ids=["fused", "unfused"])
def test_attention_of_head_size_160_agrees_with_float32(
    disabled: tuple[str, ...], queries: int, keys: int, dtype: str, tmp_path: Path, note: Any
) -> None:
    """The session and its options are the run-time's."""
    model = attention_graph(160, 8, dtype)
    fuse(model, "cuda", disabled=disabled)
    assert not [node for node in model.graph if node.op_type == "Attention"]
    ir.save(model, tmp_path / "model.onnx")
    feeds = {name: values.astype(_NUMPY[dtype]) for name, values in attention_feeds(160, 8, queries, keys).items()}
    session = Graph(tmp_path / "model.onnx", device_for("cuda")).session
    found = session.run(None, feeds)[0]
    plain = model_bytes(attention_graph(160, 8, "float32"))
    reference = onnxruntime.InferenceSession(plain, quiet_options(), providers=["CPUExecutionProvider"])
    wide = {name: values.astype(np.float32) for name, values in feeds.items()}
    error = relative_error(found.astype(np.float32), reference.run(None, wide)[0])
    row = {"dtype": dtype, "queries": queries, "keys": keys, "disabled": list(disabled), "relative_error": error}
    note("head size 160", row)
    assert error < TOLERANCE[dtype]


FALLING_BACK = ("MatMul", "MultiHeadAttention", "SkipLayerNormalization", "GroupNorm")


def block_in_bfloat16() -> tuple[ir.Model, ir.Model]:
    """Return a transformer block in float32, and in fp16 with bfloat16 for operators that can overflow."""
    generator = np.random.default_rng(0)
    weights = {name: generator.standard_normal((64, 64), np.float32) / 8 for name in ("wq", "wk", "wv", "wo")}
    vectors = {name: generator.standard_normal(64, np.float32) for name in ("g", "b")}
    norm = "com.microsoft.GroupNorm<groups=32, epsilon=0.001, channels_last=1, activation=0>"
    model = graph(
        "float[B,H,W,64] image",
        "float[B,S,64] y",
        f"""n = {norm}(image, g, b) x = Reshape(n, flat)
        q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
        a = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v) o = MatMul(a, wo)
        l, , , s = com.microsoft.SkipLayerNormalization<epsilon=0.00001>(o, x, g, b) t = Tanh(l) y = Add(t, s)""",
        "float[B,H,W,64] n, float[B,S,64] a, float[B,S,64] l, float[B,S,64] s",
        flat=np.array([0, -1, 64], np.int64),
        **weights,
        **vectors,
    )
    narrow = ir.from_proto(ir.to_proto(model))
    spec = ComponentSpec("unet", "unet", Role.DENOISER, (), ())
    ConvertPrecision(PrecisionPolicy(float32=FALLING_BACK, fallback=ir.DataType.BFLOAT16), spec)(narrow)
    tidy(narrow)
    return model, narrow


def test_block_with_bfloat16_fallback_agrees_with_float32(tmp_path: Path, note: Any) -> None:
    model, narrow = block_in_bfloat16()
    ir.save(narrow, tmp_path / "model.onnx")
    image = np.random.default_rng(1).standard_normal((2, 6, 10, 64)).astype(np.float16)
    found = Graph(tmp_path / "model.onnx", device_for("cuda")).session.run(None, {"image": image})[0]
    LowerContribOperators()(model)
    reference = onnxruntime.InferenceSession(model_bytes(model), quiet_options(), providers=["CPUExecutionProvider"])
    error = relative_error(found.astype(np.float32), reference.run(None, {"image": image.astype(np.float32)})[0])
    note("bfloat16 fallback", {"relative_error": error})
    assert error < TOLERANCE["bfloat16"]
